import json

import pytest

from stepserve.cli import bench
from stepserve.cli.jobs import bundled_jobs


@pytest.fixture
def known(fake_server):
    """The fake server knows the answers to the problems of seed 0."""
    jobs = bundled_jobs(30, 0, None)
    fake_server.answers = {job.prompt: job.problem.response for job in jobs}
    return jobs


OPTIONS = ("bench", "--rate", "5", "--requests", "30", "--arrivals", "constant")


def test_a_comparison_from_command_line_to_report(stepserve, fake_server, known, tmp_path, capsys):
    path = tmp_path / "out.json"
    compared = ("--slo-multiple", "0.6", "--compare", "fixed,deadline_fit", "--json", str(path))
    assert stepserve(*OPTIONS, *compared) == 0
    report = json.loads(path.read_text())
    # Unloaded at 0.9: 0.9 s each, so everybody's deadline is 0.54 s; the floor 0.5 meets it.
    assert report["base"]["e2e_s"]["mean"] == pytest.approx(0.9)
    assert report["deadline_s"]["min"] == report["deadline_s"]["max"] == pytest.approx(0.54)
    fixed, fit = report["variants"]["fixed"], report["variants"]["deadline_fit"]
    assert (fixed["slo_attainment"], fit["slo_attainment"]) == (0.0, 1.0)
    assert (fixed["accuracy"]["value"], fixed["threshold_mean"]) == (1.0, pytest.approx(0.9))
    wrong = sum(len(job.prompt) % 2 for job in known) / 30
    assert fit["accuracy"]["value"] == pytest.approx(1.0 - wrong)
    assert fit["e2e_s"]["p99"] == pytest.approx(0.5)
    # The last of 30 regular arrivals comes at 5.8 s after the first.
    assert fit["goodput_requests_per_s"] == pytest.approx(30 / 6.3)
    assert fit["goodput_tokens_per_s"] == pytest.approx(150 / 6.3)
    assert report["accuracy_difference"]["reference"] == "fixed"
    assert report["accuracy_difference"]["variants"]["deadline_fit"]["value"] == pytest.approx(
        -wrong
    )
    out, err = capsys.readouterr()
    assert "deadline: 540 ms, 0.6 x the mean of 8 single requests at threshold 0.9, 900 ms" in out
    said = f"deadline_fit against fixed: SLO met +100.0 points, accuracy -{100 * wrong:.1f} points,"
    assert said in out
    assert err == ""  # no progress bar in a pipe


def test_variants_ask_the_same_questions_and_differ_in_their_own_fields(stepserve, fake_server):
    assert stepserve(*OPTIONS, "--warmup", "0", "--compare", "fixed,deadline_fit") == 0
    fixed, fit = fake_server.bodies[:30], fake_server.bodies[30:]
    assert [b["messages"] for b in fixed] == [b["messages"] for b in fit]
    assert {b["dlm"]["min_confidence_threshold"] for b in fixed} == {0.9}
    assert {b["dlm"]["min_confidence_threshold"] for b in fit} == {0.5}
    assert not any("slo" in b for b in fixed + fit)


def test_a_foreign_server_is_sent_standard_fields_only(stepserve, fake_server, capsys):
    mode = ("--slo-mode", "none", "--deadline-ms", "1000", "--warmup", "1")
    assert stepserve(*OPTIONS, *mode) == 0
    assert {frozenset(body) for body in fake_server.bodies} == {
        frozenset(("model", "messages", "stream", "stream_options", "max_tokens", "temperature"))
    }
    assert "100.0" in capsys.readouterr().out


def test_a_server_that_counts_its_decisions_is_quoted(stepserve, fake_server, tmp_path, capsys):
    path = tmp_path / "out.json"
    fake_server.metrics = "stepserve:cap_lowest 0.5\nstepserve:cap_mean 0.75\n"
    assert stepserve(*OPTIONS, "--json", str(path)) == 0
    server = json.loads(path.read_text())["variants"]["run"]["server"]
    assert (server["cap_lowest"], server["cap_mean"], server["migrations"]) == (0.5, 0.75, 0)
    assert "0.50 / 0.75" in capsys.readouterr().out


def test_own_variants_and_detailed_records(stepserve, tmp_path):
    path = tmp_path / "out.json"
    variant = '{"dlm": {"min_confidence_threshold": 0.25}}'
    status = stepserve(
        *OPTIONS, "--variant", f"low={variant}", "--deadline-ms", "300", "--detailed",
        "--json", str(path),
    )  # fmt: skip
    assert status == 0
    low = json.loads(path.read_text())["variants"]["low"]
    assert low["body"] == json.loads(variant)
    assert low["server"] is None, "this server has no such metrics"
    assert len(low["records"]) == 30
    record = low["records"][2]
    assert record["due_s"] == record["sent_s"] == pytest.approx(0.4)
    assert record["text_s"] == pytest.approx([0.65, 0.65])
    assert (record["met"], record["tokens"], record["correct"]) == (True, 5, False)


def test_nothing_completed_is_a_failure(stepserve, fake_server, capsys):
    fake_server.status = 429
    assert stepserve(*OPTIONS, "--warmup", "0", "--deadline-ms", "1") == 1
    out = capsys.readouterr().out
    assert "0 / 30 / 0" in out
    assert "run: first of the rejected: HTTP 429: no room" in out
    assert "run: no request was completed" in out


def test_a_report_without_a_folder_is_refused_before_the_run(stepserve, fake_server, capsys):
    assert stepserve(*OPTIONS, "--json", "/nowhere/out.json") == 2
    assert "--json: no folder /nowhere" in capsys.readouterr().err
    assert not fake_server.bodies


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--json", "."), "--json: . is a folder, not a file"),
        (("--seed", "-1"), "--seed: must be at least 0"),
        (("--requests", "-1"), "--requests: must be at least 1"),
        (("--duration-s", "nan"), "--duration-s: must be a finite number, not nan"),
    ],
)
def test_options_that_make_no_sense_are_one_line_before_any_request(
    stepserve, fake_server, capsys, words, message
):
    assert stepserve(*OPTIONS, *words) == 2
    assert capsys.readouterr().err == f"stepserve bench: {message}\n"
    assert not fake_server.bodies


def test_without_a_rate_there_is_a_default_which_is_said(stepserve, fake_server, capsys):
    assert stepserve("bench", "--requests", "3", "--warmup", "0") == 0
    assert "fake at http://127.0.0.1:8000: 3 requests, 4 a second" in capsys.readouterr().out


def test_right_in_time_counts_every_arrival(stepserve, known, tmp_path, capsys):
    """At 0.9 all are right and none in time; at 0.5 all in time, and the careless ones wrong."""
    path = tmp_path / "out.json"
    compared = ("--deadline-ms", "600", "--compare", "fixed,deadline_fit", "--json", str(path))
    assert stepserve(*OPTIONS, *compared) == 0
    variants = json.loads(path.read_text())["variants"]
    right = sum(not len(job.prompt) % 2 for job in known) / 30
    assert variants["fixed"]["right_in_time"]["value"] == 0.0
    assert variants["deadline_fit"]["right_in_time"]["value"] == pytest.approx(right)
    assert variants["deadline_fit"]["right_in_time"]["trials"] == 30
    assert "right in time" in capsys.readouterr().out


def test_another_server_may_give_our_names_another_meaning(
    stepserve, fake_server, tmp_path, capsys
):
    path = tmp_path / "out.json"
    fake_server.report = {"dlm": [1], "metrics": {"forwards": "many"}, "slo": None}
    assert stepserve(*OPTIONS, "--detailed", "--json", str(path)) == 0
    said = "run: ignored dlm, metrics.forwards in the replies of this server: not a number"
    assert said in capsys.readouterr().out
    run = json.loads(path.read_text())["variants"]["run"]
    assert (run["completed"], run["forwards_mean"], run["records"][0]["dlm"]) == (30, None, [1])


def test_results_are_written_even_if_they_cannot_be_shown(stepserve, tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    monkeypatch.setattr(bench, "tables", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        stepserve(*OPTIONS, "--json", str(path))
    assert json.loads(path.read_text())["variants"]["run"]["completed"] == 30


def test_an_idle_server_that_fails_stops_the_benchmark(stepserve, fake_server, capsys):
    fake_server.status = 500
    assert stepserve(*OPTIONS, "--slo-multiple", "2") == 1
    assert "a request to the idle server failed: HTTP 500: no room" in capsys.readouterr().err
    assert len(fake_server.bodies) == 2  # the warm-up, and no load after it


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--variant", "x"), "must be NAME=JSON"),
        (("--variant", "x={"), "not JSON"),
        (("--body", "[1]"), "must be a JSON object"),
        (("--burst", "1:2"), "START:SECONDS:FACTOR"),
        (("--deadline-ms", "1", "--slo-multiple", "2"), "not allowed with"),
    ],
)
def test_wrong_options_are_explained(stepserve, capsys, words, message):
    with pytest.raises(SystemExit, match="2"):
        stepserve(*OPTIONS, *words)
    assert message in capsys.readouterr().err


def test_a_dropped_share_is_stated(stepserve, tmp_path, capsys):
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,10,5\n1,999,5\n")
    options = ("--dataset", "random", "--max-total-tokens", "100", "--slo-per-token-ms", "300")
    assert stepserve("bench", "--arrivals", f"trace:{trace}", *options) == 0
    out = capsys.readouterr().out
    assert "1 arrivals longer than --max-total-tokens were not sent" in out
    assert "deadline: 1500 ms" in out

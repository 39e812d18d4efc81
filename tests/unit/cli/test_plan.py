"""``stepserve plan``: what it recommends, compares with, and says when it is asked wrongly."""

import argparse
import json

import pytest

from stepserve.cli import plan
from stepserve.core.errors import FieldError
from stepserve.cost.step_table import StepProfile
from support.planning import H100_MS, TOKENS

LOAD = "--rate 0.3 --prompt-tokens 1062 --output-tokens 256 --slo-s 4"


@pytest.fixture
def profiles(tmp_path):
    """Options for step tables in files, as ``stepserve profile`` writes them."""
    words = []
    for degree, row in H100_MS.items():
        path = tmp_path / f"tp{degree}.json"
        StepProfile(TOKENS, tuple(ms / 1e3 for ms in row), "published").save(path)
        words += ["--profile", f"{degree}={path}"]
    return words


def ask(line, *words):
    parser = argparse.ArgumentParser(prog="stepserve")
    plan.add_parser(parser.add_subparsers())
    return plan.run(parser.parse_args(["plan", *line.split(), *words]))


def test_tp4_without_cache_at_a_low_load(profiles, tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert ask(f"{LOAD} --nodes 2 --cache none", *profiles, "--json", str(out)) == 0
    text = capsys.readouterr().out
    assert "recommended: 2 x TP4" in text
    assert "nodes 0-1: TP4 on 0,1,2,3" in text
    assert "8 x TP1" in text
    result = json.loads(out.read_text())
    assert result["recommended"]["slots"][1] == {"node": 1, "gpus": [0, 1, 2, 3]}
    assert result["recommended"]["latency_s"][0] < result["smallest"]["latency_s"][0]
    assert result["recommended"]["latency_s"] == [pytest.approx(256 / 3.02 * 0.0257, rel=0.02)]
    assert result["planned_rate_per_s"] == [pytest.approx(0.45)]


def test_headroom_and_host_time_count(profiles, tmp_path):
    out = tmp_path / "plan.json"
    uses = []
    for words in ("--headroom 1", "--headroom 2", "--headroom 1 --overhead-ms 10"):
        ask(f"{LOAD} {words} --tp 1 --json {out}", *profiles)
        uses.append(json.loads(out.read_text())["recommended"]["use"])
    assert uses[1] == pytest.approx(2 * uses[0])
    assert uses[2] > uses[0]


def test_a_load_beyond_every_layout_is_called_so(profiles, tmp_path, capsys):
    out = tmp_path / "plan.json"
    line = "--rate 99 --prompt-tokens 1062 --output-tokens 256 --slo-s 4"
    assert ask(f"{line} --json {out}", *profiles) == 1
    text = capsys.readouterr().out
    assert "overloaded" in text
    assert text.endswith("The load cannot be carried: no layout of these GPUs has the capacity.\n")
    smallest = json.loads(out.read_text())["smallest"]
    assert smallest["overloaded"]
    assert smallest["within_slo"] == 0.0


def test_an_slo_that_one_class_misses(profiles, tmp_path, capsys):
    workload, out = tmp_path / "classes.toml", tmp_path / "plan.json"
    workload.write_text(
        "[[class]]\nprompt_tokens = 300\noutput_tokens = 64\nslo_s = 5\nrate_per_s = 3\n"
        "[[class]]\nprompt_tokens = 300\noutput_tokens = 512\nslo_s = 0.2\nrate_per_s = 1.0\n"
    )
    assert ask(f"--workload {workload} --json {out}", *profiles) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert "The SLO cannot be met" in last
    assert "300 + 512 tokens take" in last
    assert "s, not 0.2 s" in last
    assert "300 + 64" not in last
    result = json.loads(out.read_text())["recommended"]
    assert result["within_slo"] == pytest.approx(0.75)
    assert result["slack"] < 1.0


@pytest.mark.parametrize("planner", ["two_stage", "as_published", "greedy"])
def test_the_named_profile_needs_no_data_folder(planner, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("STEPSERVE_DATA", str(tmp_path))
    assert ask(f"{LOAD} --profile published --planner {planner}") == 0
    text = capsys.readouterr().out
    assert "H100" in text
    assert "host overhead: 7.6 ms" in text


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("--rate 1 --prompt-tokens 9 --output-tokens 9", "--slo-s"),
        (f"{LOAD} --nodes 0", "--nodes"),
        (f"{LOAD} --headroom 0.5", "--headroom"),
        (f"{LOAD} --thresholds 0.9 0.8", "--tokens-per-step"),
        (f"{LOAD} --thresholds 0.8 0.9 --tokens-per-step 3 4", "--thresholds"),
        (f"{LOAD} --block-tokens 0", "--block-tokens"),
        (f"{LOAD} --overhead-ms -1", "--overhead-ms"),
        (f"{LOAD} --tp 3", "--tp"),
        (f"{LOAD} --gpus 3 --tp 2", "--tp"),
        (f"{LOAD} --profile B200/llada-8b", "--profile"),
        (f"{LOAD} --profile x=1", "--profile"),
        (f"{LOAD} --profile 1=missing.json", "--profile"),
        ("--rate -1 --prompt-tokens 9 --output-tokens 9 --slo-s 1", "--rate"),
        ("--rate 1 --prompt-tokens 9000 --output-tokens 9 --slo-s 1", "--profile"),
        ("--workload missing.toml", "--workload"),
        (f"{LOAD} --workload missing.toml", "--prompt-tokens"),
        (f"{LOAD} --json nowhere/out.json", "--json"),
        (f"{LOAD} --json .", "--json"),
        (f"{LOAD} --headroom nan", "--headroom"),
        (f"{LOAD} --overhead-ms inf", "--overhead-ms"),
        ("--rate 1 --prompt-tokens 9 --output-tokens 9 --slo-s nan", "--slo-s"),
    ],
)
def test_a_wrong_option_is_named(line, option):
    with pytest.raises(FieldError) as caught:
        ask(line)
    assert caught.value.field == option


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", "--workload"),
        ("class = 1", "--workload"),
        ("class = [1]", "--workload: class[0]"),
        ("[[class]]\nprompt_tokens = 1\n", "--workload: class[0].output_tokens"),
        ("[[class]]\nprompts = 1\n", "--workload: class[0].prompts"),
        (
            "[[class]]\nprompt_tokens = 1\noutput_tokens = 1\nslo_s = 0\nrate_per_s = 1\n",
            "--workload: class[0].slo_s",
        ),
    ],
)
def test_a_wrong_workload_file_is_explained(text, field, tmp_path):
    path = tmp_path / "classes.toml"
    path.write_text(text)
    with pytest.raises(FieldError) as caught:
        ask(f"--workload {path}")
    assert caught.value.field == field


def test_a_degree_without_a_table_is_named(profiles):
    with pytest.raises(FieldError, match="add 8=FILE"):
        ask(f"{LOAD} --tp 8", *profiles)

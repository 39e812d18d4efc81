"""What arrives: from names, shapes and files, at drawn and at recorded times."""

import gzip
import itertools
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepserve.core.errors import FieldError
from stepserve.sim.experiment import read_experiment
from stepserve.sim.lengths import TOKEN_WORKLOADS
from stepserve.sim.requests import draw, slo_classes, targets
from stepserve.sim.workload import read_trace

MOONCAKE = """\
{"timestamp": 0, "input_length": 1200, "output_length": 50, "hash_ids": [0, 1, 2]}
{"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [0, 3]}
{"timestamp": 4000, "input_length": 30, "output_length": 7, "hash_ids": [4]}
"""
USERS = "arrived_s,prompt_tokens,output_tokens,class\n1.5,10,3,slow\n0.5,20,4,fast\n4.5,30,5,fast\n"
CLASSES = [{"name": "fast", "tbt_s": 0.05}, {"name": "slow", "tbt_s": 0.2, "e2e_s": 9.0}]


def experiment(family="autoregressive", slo=(), **workload):
    setting = {"model": "qwen2.5-14b", "instances": 2}
    if family == "diffusion":
        setting = {"model": "llada-8b", "nodes": [4], "hardware": "H100", "base_s": 2.0}
    if workload.get("arrivals") != "recorded":
        workload = {"requests": 30, "rates_per_s": [1.0], **workload}
    systems = ["infaas" if family == "diffusion" else "dynaserve"]
    return read_experiment(
        {"setting": setting, "workload": workload, "systems": systems, "slo": list(slo)}
    )


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(TOKEN_WORKLOADS),
    st.integers(0, 1000),
    st.floats(0.5, 20.0),
    st.floats(1.1, 4.0),
)
def test_another_rate_stretches_the_same_requests(workload, seed, rate, factor):
    one = experiment(name=workload)
    slow, fast = draw(one, rate, seed), draw(one, rate * factor, seed)
    assert [r.index for r in slow] == list(range(30))
    for a, b in zip(slow, fast, strict=True):
        assert a.arrival_s == pytest.approx(factor * b.arrival_s)
        assert (a.prompt_tokens, a.output_tokens) == (b.prompt_tokens, b.output_tokens)


def test_a_longer_run_begins_with_the_shorter():
    short, long = (draw(experiment(name="hybrid", requests=n), 5.0, 3) for n in (300, 1000))
    assert short == long[:300]


@pytest.mark.parametrize(("arrivals", "cv"), [("poisson", 1.0), ("gamma", 3.0), ("constant", 0.0)])
def test_gaps_vary_as_they_should(arrivals, cv):
    one = experiment(name="azure-conv", arrivals=arrivals, cv=3.0, requests=20_000)
    times = [r.arrival_s for r in draw(one, 4.0, 1)]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.1)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.15, abs=1e-6)


def test_the_two_hour_curve_has_the_published_windows():
    requests = draw(experiment("diffusion", name="gsm8k", arrivals="burstgpt"), 20.2167, 3)
    assert len(requests) == pytest.approx(63_736, rel=0.02)
    per_window = [0] * 24
    for r in requests:
        per_window[int(r.arrival_s // 300)] += 1
    assert per_window[16] == max(per_window) == pytest.approx(6065, rel=0.05)
    assert per_window[5] == pytest.approx(194, rel=0.25)
    short = experiment("diffusion", name="gsm8k", arrivals="burstgpt", window_s=30.0)
    found = draw(short, 8.0, 0)
    assert found[-1].arrival_s < 720.0
    assert len(found) == pytest.approx(63_736 * 8.0 / 20.2167 / 10, rel=0.1)


def test_shapes_are_fixed_lengths_and_equally_likely():
    one = experiment(shapes=[[8192, 32], [219, 1467]], requests=400)
    assert one.workload.label == "fixed-8192-32+219-1467"
    drawn = draw(one, 1.0, 0)
    long = sum((r.prompt_tokens, r.output_tokens) == (8192, 32) for r in drawn)
    assert {r.prompt_tokens for r in drawn} == {8192, 219}
    assert 150 < long < 250


def test_a_mooncake_trace_keeps_its_times_lengths_and_hashes(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE)
    one = experiment(file=str(path), arrivals="recorded")
    drawn = draw(one, 0.0, 0)
    assert [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in drawn] == [
        (0.0, 1200, 50), (3.0, 700, 5), (4.0, 30, 7),
    ]  # fmt: skip
    assert [r.block_hashes for r in drawn] == [(0, 1, 2), (0, 3), (4,)]
    assert one.rates_per_s == (0.0,), "as recorded"
    scaled = draw(one, 5.0, 0)
    assert [r.arrival_s for r in scaled] == pytest.approx([0.0, 0.3, 0.4])


def test_rows_of_a_file_are_drawn_where_times_are(tmp_path):
    path = tmp_path / "lengths.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write("input_tokens,output_tokens\n100,7\n200,9\n")
    drawn = draw(experiment(file=str(path), requests=50), 2.0, 0)
    assert {(r.prompt_tokens, r.output_tokens) for r in drawn} == {(100, 7), (200, 9)}
    with pytest.raises(FieldError, match="arrival_s"):
        draw(experiment(file=str(path), arrivals="recorded"), 0.0, 0)


def test_a_users_file_says_which_class_a_request_is_of(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(USERS, encoding="utf-8-sig")
    one = experiment(file=str(path), arrivals="recorded", slo=CLASSES)
    drawn = draw(one, 0.0, 0)
    assert [r.arrival_s for r in drawn] == [0.5, 1.5, 4.5]
    assert slo_classes(one, 0, drawn) == [0, 1, 0]
    assert [(slo.tbt_s, slo.e2e_s) for slo in targets(one)] == [(0.05, None), (0.2, 9.0)]
    with pytest.raises(FieldError, match="slow"):
        slo_classes(experiment(file=str(path), slo=CLASSES[:1]), 0, drawn)


def test_a_diffusion_request_of_a_file_has_whole_blocks(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(USERS)
    one = experiment("diffusion", file=str(path), arrivals="recorded", slo=CLASSES)
    drawn = draw(one, 0.0, 0)
    assert [(r.output_tokens, r.answer_tokens) for r in drawn] == [(32, 4), (32, 3), (32, 5)]
    assert [slo.e2e_s for slo in targets(one)] == [10.0, 9.0]


def test_a_recording_can_be_cut(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(USERS)
    assert len(draw(experiment(file=str(path), arrivals="recorded", requests=2), 0.0, 0)) == 2
    assert len(draw(experiment(file=str(path), arrivals="recorded", duration_s=4.0), 0.0, 0)) == 2


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.csv", USERS.encode("utf-16")),
        ("t.csv", "arrived_s,prompt_tokens\n1,é\n".encode("latin-1")),
        ("t.csv.gz", b"no gzip"),
        ("t.jsonl", b"{\n"),
        ("t.jsonl", b"[1]\n"),
        ("t.jsonl", b""),
    ],
)
def test_a_file_that_is_no_trace_is_named(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(FieldError, match=name.replace(".", r"\.")):
        read_trace(path)
    with pytest.raises(FieldError, match="nowhere"):
        read_trace(tmp_path / "nowhere.csv")

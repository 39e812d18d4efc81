import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepserve.core.errors import FieldError
from stepserve.sim.datasets import (
    DATASETS,
    burstgpt_curve,
    poisson,
    published_requests,
    published_run,
    two_hours,
)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(DATASETS), st.integers(0, 1000), st.floats(1.0, 50.0))
def test_load_changes_arrivals_and_nothing_else(dataset, seed, rate):
    some, other = (poisson(dataset, r, 40, seed) for r in (rate, 2 * rate))
    assert [r.index for r in some] == list(range(40))
    for a, b in zip(some, other, strict=True):
        assert a.arrival_s == pytest.approx(2 * b.arrival_s)
        assert (a.prompt_tokens, a.output_tokens, a.answer_tokens) == (
            b.prompt_tokens,
            b.output_tokens,
            b.answer_tokens,
        )
        assert a.prompt_tokens >= 1
        assert a.output_tokens % 32 == 0
        assert a.prompt_tokens + a.output_tokens < 4096
        assert a.answer_tokens is None or 1 <= a.answer_tokens <= a.output_tokens


def test_same_seed_same_requests():
    assert poisson("mbpp", 3.0, 50, 1) == poisson("mbpp", 3.0, 50, 1)
    assert poisson("mbpp", 3.0, 50, 1) != poisson("mbpp", 3.0, 50, 2)


def test_gsm8k_prompts_are_as_long_as_published():
    prompts = [r.prompt_tokens for r in poisson("gsm8k", 1.0, 4000, 0)]
    assert statistics.fmean(prompts) == pytest.approx(1062, rel=0.01)
    assert statistics.stdev(prompts) / statistics.fmean(prompts) == pytest.approx(0.08, rel=0.1)


def test_sharegpt_without_data_resembles_the_public_set(monkeypatch, tmp_path):
    recorded = poisson("sharegpt", 1.0, 6000, 0)
    monkeypatch.setenv("STEPSERVE_DATA", str(tmp_path))
    stand_in = poisson("sharegpt", 1.0, 6000, 0)
    for name in ("prompt_tokens", "output_tokens"):
        means = [statistics.fmean(getattr(r, name) for r in rs) for rs in (recorded, stand_in)]
        assert means[0] == pytest.approx(means[1], rel=0.2)


def test_constant_gaps():
    arrivals = [r.arrival_s for r in poisson("gsm8k", 4.0, 5, 0, cv=0.0)]
    assert arrivals == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.25])


def test_the_two_hour_curve_has_the_published_windows():
    requests = two_hours("gsm8k", 20.2167, 3)
    assert len(requests) == pytest.approx(63_736, rel=0.02)
    per_window = [0] * 24
    for r in requests:
        per_window[int(r.arrival_s // 300)] += 1
    assert per_window[16] == max(per_window) == pytest.approx(6065, rel=0.05)
    assert per_window[5] == pytest.approx(194, rel=0.25)


def test_a_shorter_window_keeps_the_rates():
    assert max(burstgpt_curve(8.0, 60.0).rates_per_s) == 8.0
    short = two_hours("gsm8k", 8.0, 0, window_s=30.0)
    assert short[-1].arrival_s < 720.0
    assert len(short) == pytest.approx(63_736 * 8.0 / 20.2167 / 10, rel=0.1)


def test_published_runs():
    run = published_run("llada-8b", "mmlu-pro")
    assert run.base_s * run.multiples[0] == pytest.approx(12.0)
    assert run.difficulty > published_run("llada-8b", "gsm8k").difficulty == 1.0
    assert published_run("llada-8b", "sharegpt").base_s * 5 == 12.5
    assert published_requests("gsm8k") == 1319
    assert published_requests("sharegpt") == 63_736


def test_unknown_names_are_refused():
    for call, field in [
        (lambda: poisson("imagenet", 1.0, 1, 0), "dataset"),
        (lambda: published_run("dream-7b", "sharegpt"), "dataset"),
        (lambda: published_requests("imagenet"), "dataset"),
        (lambda: burstgpt_curve(0.0), "peak_per_s"),
    ]:
        with pytest.raises(FieldError) as error:
            call()
        assert error.value.field == field

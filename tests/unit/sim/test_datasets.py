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

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepserve.core.errors import FieldError
from stepserve.core.request import DiffusionOptions, Family, FinishReason, Request
from stepserve.core.step import Step, StepKind
from stepserve.sim.outcomes import (
    MEAN_STEPS,
    THRESHOLDS,
    TraceOutcomes,
    fitted_counts,
    recorded_counts,
    split,
    true_remaining,
)

MIXED = {1.0: 40.16, 0.9: 42.14, 0.8: 44.27, 0.7: 46.60, 0.6: 49.29, 0.5: 52.18, 0.4: 56.04}
MIXED |= {0.3: 59.84, 0.2: 64.92, 0.1: 71.15, 0.0: 78.63}
"""Published steps when a share of the steps runs at 0.6 and the rest at 0.9 (DiLaServe B3)."""

thresholds = st.sampled_from((*THRESHOLDS, 0.95, 0.83, 0.61, 0.3))
outputs = st.integers(1, 400)
blocks = st.sampled_from([4, 8, 32])


def request(output=256, block=32, name="r"):
    options = DiffusionOptions(block_tokens=block)
    return Request(name, Family.DIFFUSION, "", 100, output, 0.0, diffusion=options)


def outcomes(seed=0, **options):
    return TraceOutcomes(seed, counts=fitted_counts(), **options)


def run(model, truth, threshold_of, limit=2000):
    """Step to the end; the outcomes. ``threshold_of(step)`` picks the threshold."""
    found = []
    while not found or found[-1].finished is None:
        assert len(found) < limit
        step = Step(truth.request_id, StepKind.CACHED, 32, 356, threshold_of(len(found)))
        found.append(model.step(truth, step))
    return found


@pytest.mark.parametrize("counts", [fitted_counts(), recorded_counts()], ids=["fitted", "recorded"])
def test_step_counts_have_the_published_moments(counts):
    if counts is None:
        pytest.skip("needs the published data sets")
    rng = random.Random(1)
    columns = list(zip(*(counts.draw(rng) for _ in range(12_000)), strict=True))
    for column, mean in zip(columns, MEAN_STEPS, strict=True):
        assert statistics.fmean(column) == pytest.approx(mean, rel=0.02)
        assert 0.26 < statistics.stdev(column) / statistics.fmean(column) < 0.34
    for column, published in zip(columns[1:], (0.91, 0.87, 0.81, 0.68), strict=True):
        assert statistics.correlation(columns[0], column) == pytest.approx(published, abs=0.035)
    for i, published in enumerate((0.020, 0.048, 0.12, 0.25)):
        pairs = zip(columns[i], columns[i + 1], strict=True)
        share = statistics.fmean(round(low) >= round(high) for high, low in pairs)
        assert share == pytest.approx(published, abs=0.04)


@given(st.integers(0, 400), st.lists(st.floats(0.01, 50.0), min_size=1, max_size=12), st.data())
def test_split_spreads_every_step_within_bounds(total, weights, data):
    sizes = data.draw(st.lists(st.integers(1, 32), min_size=len(weights), max_size=len(weights)))
    counts = split(total, weights, sizes)
    assert sum(counts) == min(max(total, len(sizes)), sum(sizes))
    assert all(1 <= n <= size for n, size in zip(counts, sizes, strict=True))


@given(st.integers(0, 10_000), outputs, blocks, st.sampled_from(THRESHOLDS), st.floats(0.3, 3.0))
def test_a_constant_threshold_takes_exactly_the_drawn_steps(seed, output, block, threshold, hard):
    model = outcomes(seed, difficulty=hard)
    truth = model.start(request(output, block), 3)
    expected = truth.steps[THRESHOLDS.index(threshold)]
    assert true_remaining(truth, threshold) == expected
    found = run(model, truth, lambda _: threshold)
    assert len(found) == expected
    assert found[-1].finished is FinishReason.LENGTH
    assert sum(o.settled for o in found) == found[-1].emitted == output


@given(st.integers(0, 10_000), outputs, blocks, st.lists(thresholds, min_size=1, max_size=9))
def test_progress_is_monotone_and_stays_within_the_block(seed, output, block, picks):
    model = outcomes(seed)
    truth = model.start(request(output, block), 0)
    before = 0
    for o in run(model, truth, lambda i: picks[i % len(picks)]):
        assert o.settled >= 1
        assert o.emitted == before + o.settled
        assert (before + o.settled - 1) // block == before // block
        before = o.emitted
    assert before == output


@given(st.integers(0, 10_000), st.lists(thresholds, min_size=1, max_size=9), thresholds)
def test_the_oracle_counts_down_to_the_end(seed, picks, then):
    model = outcomes(seed)
    truth = model.start(request(), 0)
    for pick in picks:
        model.step(truth, Step("r", StepKind.CACHED, 32, 356, pick))
    expected = true_remaining(truth, then)
    left = len(run(model, truth, lambda _: then)) if truth.settled < 256 else 0
    # a count between two known thresholds is not whole: what a block leaves of a step is saved
    slack = 0 if then in THRESHOLDS or not 0.5 < then < 0.9 else 8
    assert expected - slack <= left <= expected


def test_mixed_thresholds_reproduce_the_published_curve():
    model = outcomes(1)
    found = {}
    for share in MIXED:
        total = 0
        for index in range(300):
            rng = random.Random(index)
            low = [rng.random() < share for _ in range(256)]
            truth = model.start(request(), index)
            total += len(run(model, truth, lambda i, low=low: 0.6 if low[i] else 0.9))
        found[share] = total / 300
    # the published curve is of a configuration with fewer steps: scaled between its ends
    low, high = found[1.0] / MIXED[1.0], found[0.0] / MIXED[0.0]
    for share, published in MIXED.items():
        scaled = published * (share * low + (1 - share) * high)
        assert found[share] == pytest.approx(scaled, rel=0.03)


def test_truths_depend_on_seed_and_number_alone():
    model = outcomes(7)
    forward = [model.start(request(), i) for i in range(20)]
    backward = [model.start(request(), i) for i in reversed(range(20))]
    assert [t.counts for t in forward] == [t.counts for t in reversed(backward)]
    assert forward[0].counts != forward[1].counts
    assert forward[0].counts != outcomes(8).start(request(), 0).counts
    again = outcomes(7).start(request(), 5)
    assert run(model, forward[5], lambda _: 0.8) == run(model, again, lambda _: 0.8)


def test_difficulty_and_length_scale_the_steps():
    mean = {
        (scale, output): statistics.fmean(
            outcomes(0, difficulty=scale).start(request(output), i).steps[0] for i in range(300)
        )
        for scale, output in [(1.0, 256), (1.0, 512), (1.5, 256)]
    }
    assert mean[1.0, 512] == pytest.approx(2 * mean[1.0, 256], rel=0.03)
    assert mean[1.5, 256] == pytest.approx(1.5 * mean[1.0, 256], rel=0.03)


@given(st.integers(0, 1000), st.integers(1, 256), st.sampled_from(THRESHOLDS))
def test_an_end_of_text_stops_the_request_early(seed, eos, threshold):
    model = outcomes(seed)
    truth = model.start(request(), 0, eos_tokens=eos)
    expected = true_remaining(truth, threshold)
    found = run(model, truth, lambda _: threshold)
    assert found[-1].finished is FinishReason.STOP
    assert found[-1].emitted == eos
    assert all(o.emitted < eos for o in found[:-1])
    assert abs(len(found) - expected) <= 1


@settings(max_examples=30)
@given(st.integers(0, 1000), outputs)
def test_confidence_is_a_summary_of_probabilities(seed, output):
    model = outcomes(seed)
    found = run(model, model.start(request(output), 0), lambda _: 0.7)
    assert found[0].confidence is not None
    for c in (o.confidence for o in found if o.confidence is not None):
        assert 0.0 <= c.minimum <= c.p25 <= c.median <= c.p75 <= 1.0
        assert c.minimum <= c.mean <= 1.0


def test_harder_requests_look_less_confident():
    model = outcomes(0, haze_sigma=0.0)
    steps, shown = [], []
    for index in range(200):
        truth = model.start(request(), index)
        steps.append(truth.steps[0])
        first = model.step(truth, Step("r", StepKind.CACHED, 32, 356, 0.9))
        shown.append(first.confidence.mean)
    assert statistics.correlation(steps, shown) < -0.8


def test_bad_options_and_steps_name_the_field():
    for option in ({"difficulty": 0.0}, {"block_sigma": -1.0}, {"haze_sigma": float("inf")}):
        with pytest.raises(FieldError) as error:
            outcomes(0, **option)
        assert error.value.field == next(iter(option))
    model = outcomes(0)
    with pytest.raises(FieldError, match="eos_tokens"):
        model.start(request(), 0, eos_tokens=0)
    with pytest.raises(FieldError, match="threshold"):
        model.step(model.start(request(), 0), Step("r", StepKind.DECODE, 1, 1))

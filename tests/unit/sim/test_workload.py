import gzip

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepserve.core.errors import FieldError
from stepserve.sim.workload import (
    Arrival,
    RateCurve,
    jitter,
    mean_rate_per_s,
    read_trace,
    renewal,
    resample,
    stretch,
    within,
)

rates = st.floats(0.1, 100.0)
cvs = st.floats(0.0, 4.0)
seeds = st.integers(0, 2**32 - 1)


def draw(seed, rate=5.0, cv=1.0, **limits):
    return renewal(RateCurve.constant(rate), cv, np.random.default_rng(seed), **limits)


@given(rates, cvs, seeds, st.integers(1, 200))
def test_arrivals_are_sorted_seeded_and_as_many_as_asked(rate, cv, seed, requests):
    arrivals = draw(seed, rate, cv, requests=requests)
    times = [a.at_s for a in arrivals]
    assert len(times) == requests
    assert times == sorted(times)
    assert times[0] >= 0.0
    assert arrivals == draw(seed, rate, cv, requests=requests)


@given(cvs, seeds, st.integers(1, 100))
def test_asking_for_fewer_gives_the_beginning(cv, seed, requests):
    assert draw(seed, cv=cv, requests=requests) == draw(seed, cv=cv, requests=100)[:requests]


@given(cvs, seeds, st.floats(0.5, 50.0))
def test_a_duration_bounds_every_arrival_and_both_limits_hold(cv, seed, duration_s):
    timed = draw(seed, cv=cv, duration_s=duration_s)
    assert all(a.at_s < duration_s for a in timed)
    assert len(draw(seed, cv=cv, duration_s=duration_s, requests=3)) <= 3


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 2.0])
def test_mean_rate_and_variation_of_the_gaps(cv):
    times = np.array([a.at_s for a in draw(1, rate=8.0, cv=cv, requests=40_000)])
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(1 / 8.0, rel=0.04)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05, abs=1e-6)


def test_regular_arrivals_are_exact():
    assert [a.at_s for a in draw(0, rate=4.0, cv=0.0, duration_s=1.0)] == [0.25, 0.5, 0.75]


def test_a_burst_multiplies_the_rate_within_its_time_only():
    curve = RateCurve.constant(10.0).burst(100.0, 50.0, 4.0)
    times = [a.at_s for a in renewal(curve, 0.0, np.random.default_rng(0), duration_s=200.0)]
    counts, _ = np.histogram(times, bins=[0, 100, 150, 200])
    assert counts == pytest.approx([1000, 2000, 500], abs=1)
    assert curve.expected(200.0) == pytest.approx(3500.0)


def test_nothing_arrives_while_the_rate_is_zero():
    curve = RateCurve((0.0, 10.0, 20.0), (5.0, 0.0, 5.0))
    times = [a.at_s for a in renewal(curve, 1.0, np.random.default_rng(3), duration_s=30.0)]
    assert times
    assert not [t for t in times if 10.0 < t < 20.0]


@given(st.lists(st.tuples(st.floats(0.1, 9.0), st.floats(0.1, 9.0)), min_size=1, max_size=5))
def test_times_inverts_expected(pieces):
    starts = np.concatenate([[0.0], np.cumsum([length for length, _ in pieces])[:-1]])
    curve = RateCurve(tuple(starts), tuple(rate for _, rate in pieces))
    counts = np.array([0.5, 3.0, 40.0])
    assert [curve.expected(t) for t in curve.times(counts)] == pytest.approx(counts)


@pytest.mark.parametrize(
    ("starts", "rates", "field"),
    [
        ((1.0,), (1.0,), "starts_s"),
        ((0.0, 0.0), (1.0, 1.0), "starts_s"),
        ((0.0,), (0.0,), "rates_per_s"),
        ((0.0, 1.0), (-1.0, 1.0), "rates_per_s"),
    ],
)
def test_a_bad_rate_curve_names_its_field(starts, rates, field):
    with pytest.raises(FieldError) as error:
        RateCurve(starts, rates)
    assert error.value.field == field


def test_limits_and_variation_are_checked():
    with pytest.raises(FieldError, match="requests"):
        draw(0)
    with pytest.raises(FieldError, match="cv"):
        draw(0, cv=-1.0, requests=1)


def write(path, text):
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt") as file:
        file.write(text)
    return path


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
def test_traces_of_the_data_folder(tmp_path, name):
    text = "req_id,arrival_s,input_tokens,output_tokens,type\n0,0.5,879,8,code\n1,0.25,10,2,conv\n"
    assert read_trace(write(tmp_path / name, text)) == (Arrival(0.25, 10, 2), Arrival(0.5, 879, 8))


def test_traces_under_their_publishers_column_names(tmp_path):
    azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
        f"2023-11-16 18:17:0{second}.9799600,{second},7\n" for second in (3, 5)
    )
    first, second = read_trace(write(tmp_path / "azure.csv", azure))
    assert (first.at_s, first.prompt_tokens, first.output_tokens) == (0.0, 3, 7)
    assert second.at_s == pytest.approx(2.0)
    burst = "Timestamp,Model,Request tokens,Response tokens,Log Type\n5,ChatGPT,472,18,API log\n"
    assert read_trace(write(tmp_path / "burst.csv", burst)) == (Arrival(5.0, 472, 18),)


def test_a_trace_may_have_no_lengths(tmp_path):
    assert read_trace(write(tmp_path / "t.csv", "arrival_s\n1\n")) == (Arrival(1.0, None, None),)


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        ("when,input_tokens\n1,2\n", "arrival_s", "no such column"),
        ("arrival_s,input_tokens\nsoon,2\n", "arrival_s", "t.csv:2: 'soon'"),
        ("arrival_s,input_tokens\n1,2\n-1,2\n", "arrival_s", "t.csv:3"),
        ("arrival_s,input_tokens\n1,2.5\n", "input_tokens", "not a whole number"),
        ("arrival_s,output_tokens\n1,-4\n", "output_tokens", "negative"),
        ("arrival_s,output_tokens\n1\n", "output_tokens", "not a whole number"),
        ("arrival_s\n", "arrival_s", "no rows"),
    ],
)
def test_a_bad_trace_names_column_and_line(tmp_path, text, field, message):
    with pytest.raises(FieldError) as error:
        read_trace(write(tmp_path / "t.csv", text))
    assert error.value.field == field
    assert message in str(error.value)


TRACE = tuple(Arrival(0.1 * i, i, 2 * i) for i in range(1000))


def test_mean_rate():
    assert mean_rate_per_s(TRACE) == pytest.approx(10.0)
    assert mean_rate_per_s(TRACE[:1]) == 0.0


@settings(max_examples=25)
@given(st.floats(0.05, 6.0), seeds)
def test_resampling_multiplies_the_rate_and_keeps_lengths_of_the_minute(factor, seed):
    scaled = resample(TRACE, factor, np.random.default_rng(seed))
    assert len(scaled) == pytest.approx(factor * len(TRACE), rel=0.6)
    assert [a.at_s for a in scaled] == sorted(a.at_s for a in scaled)
    for arrival in scaled:
        assert arrival.output_tokens == 2 * arrival.prompt_tokens
        assert abs(arrival.at_s - 0.1 * arrival.prompt_tokens) < 61.0


def test_thinning_keeps_arrivals_as_they_are():
    assert set(resample(TRACE, 0.3, np.random.default_rng(0))) < set(TRACE)
    assert resample(TRACE, 1.0, np.random.default_rng(0)) == TRACE


def test_stretching_compresses_time():
    assert stretch(TRACE, 2.0)[30] == Arrival(pytest.approx(1.5), 30, 60)


@pytest.mark.parametrize(
    "rescale", [lambda f: stretch(TRACE, f), lambda f: resample(TRACE, f, np.random.default_rng(0))]
)
def test_a_factor_must_be_positive(rescale):
    with pytest.raises(FieldError, match="factor"):
        rescale(0.0)


def test_jitter_delays_within_its_width_and_sorts():
    rounded = tuple(Arrival(3.0 * (i // 10), i) for i in range(100))
    moved = jitter(rounded, 3.0, np.random.default_rng(0))
    assert [a.at_s for a in moved] == sorted(a.at_s for a in moved)
    assert all(0.0 <= a.at_s - rounded[a.prompt_tokens].at_s < 3.0 for a in moved)


def test_requests_beyond_the_context_are_dropped_not_clipped():
    kept = (Arrival(0.0, 10, 10), Arrival(2.0, None, 5))
    assert within((*kept, Arrival(1.0, 20, 1)), 20) == kept

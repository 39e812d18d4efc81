"""Formulas on traces small enough to work out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepserve.metrics.latency import (
    AnswerTrace,
    TextEvent,
    e2e_s,
    output_tokens,
    percentile,
    tbt_s,
    token_gaps_s,
    tpot_s,
    ttft_s,
)


def trace(*events, arrival_s=0.0, ended_s=10.0, started_s=None, ok=True):
    events = tuple(TextEvent(at_s, tokens) for at_s, tokens in events)
    return AnswerTrace(arrival_s, events, ended_s, started_s, ok)


def test_known_trace():
    """Fault 76: time between text events, and the same shared out over tokens."""
    known = trace((1.5, 4), (2.0, 1), (4.0, 4), arrival_s=1.0, ended_s=4.5)
    assert output_tokens(known) == 9
    assert e2e_s(known) == 3.5
    assert ttft_s(known) == 0.5
    assert tbt_s(known) == (0.5, 2.0)
    assert token_gaps_s(known) == (0.5, 0.5, 0.5, 0.5, 0.5)
    assert tpot_s(known) == 2.5 / 5


@pytest.mark.parametrize(("started_s", "expected"), [(1.0, 0.25), (None, 0.5)])
def test_answer_in_one_event(started_s, expected):
    """Fault 21: defined, neither 0 nor infinite."""
    single = trace((2.0, 4), started_s=started_s)
    assert tpot_s(single) == expected
    assert tbt_s(single) == token_gaps_s(single) == ()


def test_answer_without_text():
    assert ttft_s(trace()) is None
    assert tpot_s(trace()) is None


@given(st.lists(st.tuples(st.floats(0.001, 5), st.integers(1, 32)), min_size=2, max_size=20))
def test_sharing_out_keeps_the_total(gaps):
    at_s, events = 0.0, []
    for gap, tokens in gaps:
        at_s += gap
        events.append((at_s, tokens))
    known = trace(*events)
    shared = token_gaps_s(known)
    assert sum(shared) == pytest.approx(sum(tbt_s(known)))
    assert sum(shared) / len(shared) == pytest.approx(tpot_s(known))


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 1), (1, 1), (50, 2), (51, 3), (75, 3), (99, 4), (100, 4)]
)
def test_percentile_is_one_of_the_values(percent, expected):
    assert percentile([4, 1, 3, 2], percent) == expected


def test_percentile_of_nothing():
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)

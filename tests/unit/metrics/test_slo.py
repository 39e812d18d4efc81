"""Attainment, goodput, capacity."""

import pytest

from stepserve.core.request import SLO
from stepserve.metrics.latency import AnswerTrace, TextEvent
from stepserve.metrics.slo import (
    attainment,
    goodput_requests_per_s,
    goodput_tokens_per_s,
    meets,
    missed,
    serving_capacity,
)

ANSWER = AnswerTrace(0.0, (TextEvent(1.0, 4), TextEvent(2.0, 4)), ended_s=2.0)
FAILED = AnswerTrace(0.0, (), ended_s=0.1, ok=False)
EMPTY = AnswerTrace(0.0, (), ended_s=0.1)


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (SLO(), True),
        (SLO(e2e_s=2.0), True),
        (SLO(e2e_s=1.9), False),
        (SLO(ttft_s=1.0, tpot_s=0.25), True),
        (SLO(ttft_s=0.9), False),
        (SLO(tpot_s=0.2), False),
        (SLO(tbt_s=1.0), True),
        (SLO(tbt_s=0.9), False),
    ],
)
def test_every_target_must_be_kept(slo, met):
    assert meets(slo, ANSWER) is met


def test_missed_targets_are_named():
    assert missed(SLO(e2e_s=1.9, ttft_s=0.9, tpot_s=0.25, tbt_s=0.9), ANSWER) == (
        "e2e",
        "ttft",
        "tbt",
    )
    assert missed(SLO(ttft_s=0.9), EMPTY) == ()


def test_failed_answers_meet_nothing():
    assert not meets(SLO(), FAILED)
    assert meets(SLO(ttft_s=0.01), EMPTY)


SERVED = [
    (SLO("interactive", e2e_s=2.0), ANSWER),
    (SLO("interactive", e2e_s=1.0), ANSWER),
    (SLO("batch"), ANSWER),
    (SLO("batch"), FAILED),
]


def test_shares_and_rates():
    assert attainment(SERVED) == 0.5
    assert attainment([]) is None
    assert goodput_requests_per_s(SERVED, duration_s=4.0) == 0.5
    assert goodput_tokens_per_s(SERVED, duration_s=4.0) == 4.0


@pytest.mark.parametrize(
    ("attained", "capacity"),
    [({1: 1.0, 2: 0.95, 4: 0.5, 8: 0.95}, 2), ({1: 0.5}, None), ({1: 1.0}, 1), ({}, None)],
)
def test_capacity_stops_at_the_first_shortfall(attained, capacity):
    assert serving_capacity(attained, target=0.9) == capacity

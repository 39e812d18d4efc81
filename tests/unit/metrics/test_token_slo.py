"""Token-level service levels on traces whose numbers are known."""

import numpy as np
import pytest

from stepserve.metrics.latency import percentile
from stepserve.metrics.slo import pooled_tbt_s, tbt_attainment, token_goodput_per_s

# Two answers; the gap of 0.3 s is that of a hand-over. Binary fractions: exact differences.
FIRST = [1.0, 1.0625, 1.125, 1.4375, 1.5]
SECOND = [2.0, 2.125]
ONE_TOKEN = [3.0]


def test_gaps_start_at_the_second_token_and_are_pooled_over_answers() -> None:
    gaps = pooled_tbt_s([FIRST, ONE_TOKEN, SECOND, []])
    assert gaps.tolist() == [0.0625, 0.0625, 0.3125, 0.0625, 0.125]


def test_the_gap_of_a_handover_counts_against_attainment() -> None:
    gaps = pooled_tbt_s([FIRST])
    assert tbt_attainment(gaps, 0.1) == 0.75
    assert tbt_attainment(gaps, 0.0625) == 0.75  # a gap at the limit keeps it
    assert tbt_attainment(gaps, 0.3125) == 1.0


def test_goodput_with_and_without_first_tokens() -> None:
    gaps = pooled_tbt_s([FIRST, SECOND, ONE_TOKEN])
    assert token_goodput_per_s(gaps, 0.1, duration_s=2.0) == 1.5
    assert token_goodput_per_s(gaps, 0.1, duration_s=2.0, first_tokens=3) == 3.0


def test_percentiles_are_nearest_rank() -> None:
    """Of 100 gaps the 99th in order is the 99th percentile: one bad gap in 100 is allowed."""
    good = [0.05 * k for k in range(100)]
    gaps = pooled_tbt_s([[*good, good[-1] + 0.5]])
    assert len(gaps) == 100
    assert percentile(gaps.tolist(), 99.0) == pytest.approx(0.05)
    assert percentile(np.append(gaps, 0.4).tolist(), 99.0) == 0.4


def test_nothing_to_judge() -> None:
    assert tbt_attainment(pooled_tbt_s([ONE_TOKEN]), 0.1) is None
    assert token_goodput_per_s(pooled_tbt_s([]), 0.1, 1.0) == 0.0

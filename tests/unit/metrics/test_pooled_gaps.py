"""Gaps between tokens, on traces whose numbers are known."""

import numpy as np
import pytest

from stepserve.metrics.latency import percentile
from stepserve.metrics.slo import pooled_tbt_s

# Two answers; the gap of 0.3 s is that of a hand-over. Binary fractions: exact differences.
FIRST = [1.0, 1.0625, 1.125, 1.4375, 1.5]
SECOND = [2.0, 2.125]
ONE_TOKEN = [3.0]


def test_gaps_start_at_the_second_token_and_are_pooled_over_answers() -> None:
    gaps = pooled_tbt_s([FIRST, ONE_TOKEN, SECOND, []])
    assert gaps.tolist() == [0.0625, 0.0625, 0.3125, 0.0625, 0.125]
    assert not len(pooled_tbt_s([ONE_TOKEN]))


def test_percentiles_are_nearest_rank() -> None:
    """Of 100 gaps the 99th in order is the 99th percentile: one bad gap in 100 is allowed."""
    good = [0.05 * k for k in range(100)]
    gaps = pooled_tbt_s([[*good, good[-1] + 0.5]])
    assert len(gaps) == 100
    assert percentile(gaps.tolist(), 99.0) == pytest.approx(0.05)
    assert percentile(np.append(gaps, 0.4).tolist(), 99.0) == 0.4

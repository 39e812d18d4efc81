"""Service levels of single tokens: gaps between them, pooled over answers (DynaServe 3.10.5).

An answer is the times at which its tokens came, in seconds on one clock, in order. TBT of the
k-th token, k >= 2, is t_k - t_(k-1), whichever instance made either token: the gap of a hand-over
is one of them. All gaps of all answers are pooled, so long answers weigh more.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def pooled_tbt_s(answers: Iterable[Sequence[float]]) -> Floats:
    """Every gap between two tokens of an answer, of all answers."""
    gaps = [np.diff(np.asarray(times_s, dtype=float)) for times_s in answers if len(times_s) > 1]
    return np.concatenate(gaps) if gaps else np.empty(0)


def tbt_attainment(tbt_s: Floats, limit_s: float) -> float | None:
    """#(TBT <= limit) / #TBT; ``None`` without any."""
    return float(np.mean(tbt_s <= limit_s)) if len(tbt_s) else None


def token_goodput_per_s(
    tbt_s: Floats, limit_s: float, duration_s: float, first_tokens: int = 0
) -> float:
    """(#(TBT <= limit) + first tokens) / duration.

    A first token has no gap before it. ``first_tokens``: those to be counted, which are those
    within a TTFT target, all of them, or none; published numbers do not say.
    """
    return (int(np.count_nonzero(tbt_s <= limit_s)) + first_tokens) / duration_s

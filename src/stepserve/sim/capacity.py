"""Finds the largest rate that a system holds (DynaServe 3.10.5: serving capacity).

Whoever asks serves the same arrivals at every rate, stretched in time: what held at a rate then
holds below it, in practice. The search trusts that, so its answer is a rate that was tried and
held, next to one that was tried and failed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from stepserve.core.errors import FieldError

MOST_PER_S = 1e6
DIGITS = 4
"""Rates are tried at so many significant digits: what a file says can be tried again."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """``per_s``: the largest rate that held, 0 for none. ``probes``: each rate, if it held."""

    per_s: float
    probes: tuple[tuple[float, bool], ...]


def capacity(
    holds: Callable[[float], bool],
    first_per_s: float,
    *,
    growth: float = 1.3,
    step_per_s: float = 0.1,
    share: float = 0.02,
    least_per_s: float = 0.1,
) -> Capacity:
    """Look around ``first_per_s`` until a rate holds and another fails, then bisect.

    The way out grows: by ``growth``, its square, and so on, down to ``least_per_s``. Bisecting
    ends where the two are within ``step_per_s``, or within ``share`` of the smaller where that
    is more.
    """
    probes: list[tuple[float, bool]] = []

    def held(rate_per_s: float) -> bool:
        probes.append((rate_per_s, holds(rate_per_s)))
        return probes[-1][1]

    low, high = 0.0, math.inf
    rate, factor = max(least_per_s, round_rate(first_per_s)), growth
    while low == 0.0 or high == math.inf:
        if rate > MOST_PER_S:
            raise FieldError("capacity.search", "any rate is held: runs are too short")
        if held(rate):
            low = rate
        else:
            high = rate
        if high <= least_per_s:
            return Capacity(0.0, tuple(probes))
        rate = round_rate(low * factor) if low else max(least_per_s, round_rate(high / factor))
        factor *= growth
    while high - low > max(step_per_s, share * low):
        middle = round_rate((low + high) / 2.0)
        if middle in (low, high):
            break
        low, high = (middle, high) if held(middle) else (low, middle)
    return Capacity(low, tuple(probes))


def round_rate(rate_per_s: float) -> float:
    """At ``DIGITS``."""
    return float(f"{rate_per_s:.{DIGITS}g}")

"""Caps by marginal quality per unit of load: a shadow price for the cluster's time.

Source: ours (DiLaServe E4), on the horizons of DiLaServe C4. Everybody starts at the highest
threshold. While more is due by a deadline than can be done until then, whoever is due by it and
loses the least weighted quality per second of instance time saved goes down one threshold.
Deadlines are met in order, so a request is lowered for the first one that needs it.

The quality that a request loses is what the table says of its two thresholds, times its weight,
times the share of its output still to be settled: settled tokens keep theirs. Where a price
falls from one threshold to the next it is the mean of both (the convex hull). For one deadline
the greedy is then optimal but for what the last request lowered saves too much; for several, but
for that at each of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import ClassVar

import numpy as np

from stepserve.core.bounds import Bounded, Share, descends
from stepserve.core.errors import check
from stepserve.core.instance import InstanceSpec
from stepserve.core.protocols import Demand, Parts

from .horizons import horizons


class MarginalCaps:
    """Load control that knows what each request's quality is worth."""

    @dataclass(frozen=True, slots=True)
    class Options(Bounded):
        """``margin``: the share of a deadline that is planned against; else ``control.margin``.

        ``utilisation``: share of the cluster's time that is planned with. ``quality_points`` at
        ``quality_thresholds``, the highest first: linear in between, constant beyond; by default
        the published accuracy of LLaDA-8B on GSM8K, made monotone (DiLaServe B3).
        """

        weighs: ClassVar[bool] = True  # slo.weight
        margin: Share | None = None
        utilisation: Share = 0.8
        quality_thresholds: tuple[float, ...] = (0.9, 0.8, 0.7, 0.6, 0.5)
        quality_points: tuple[float, ...] = (78.6, 78.6, 77.0, 71.7, 65.9)

        def __post_init__(self) -> None:
            """Raises FieldError naming the numbers that make no sense."""
            Bounded.__post_init__(self)
            grid, points = self.quality_thresholds, list(self.quality_points)
            check(descends(grid), "quality_thresholds", "must descend, at least one")
            fits = len(points) == len(grid) and points == sorted(points, reverse=True)
            check(fits, "quality_points", "must not rise, one per quality threshold")

    def __init__(self, options: Options, parts: Parts) -> None:
        self._cost = parts.cost
        self._margin = parts.margin(options.margin)
        self._utilisation = options.utilisation
        self._thresholds = options.quality_thresholds[::-1]
        self._points = options.quality_points[::-1]
        self._drops: dict[tuple[float, ...], list[float]] = {}

    def caps(
        self, demands: Sequence[Demand], specs: Sequence[InstanceSpec], now_s: float
    ) -> list[float]:
        """See ``CapPolicy.caps``. An infeasible request gets its lowest threshold."""
        found = horizons(
            self._cost,
            demands,
            specs,
            now_s,
            margin=self._margin,
            utilisation=self._utilisation,
        )
        seconds, infeasible = found.seconds, found.infeasible
        prices: list[list[float]] = [[]] * len(demands)
        levels = [0] * len(demands)
        # (price, next level, weight, index): of equal requests one is never two levels ahead,
        # and where lowering is free the lighter one goes first
        next_down: list[tuple[float, int, float, int]] = []
        used = 0.0
        for supply_s, indexes in found:
            for index in indexes:
                row = seconds[index]
                if infeasible[index]:
                    levels[index] = len(row) - 1
                elif len(row) > 1:
                    own = prices[index] = self._prices(demands[index], row)
                    heappush(next_down, (own[0], 1, demands[index].request.slo.weight, index))
                used += row[levels[index]]
            while next_down and used > supply_s and next_down[0][0] < inf:
                _, level, weight, index = heappop(next_down)
                row = seconds[index]
                used += row[level] - row[level - 1]
                levels[index] = level
                if level + 1 < len(row):
                    heappush(next_down, (prices[index][level], level + 1, weight, index))
        return [demand.thresholds[k] for demand, k in zip(demands, levels, strict=True)]

    def _prices(self, demand: Demand, seconds: Sequence[float]) -> list[float]:
        """Weighted points lost per second saved by each threshold down; they never fall."""
        drops = self._drops.get(demand.thresholds)
        if drops is None:
            points = np.interp(demand.thresholds, self._thresholds, self._points)
            drops = self._drops[demand.thresholds] = (points[:-1] - points[1:]).tolist()
        pools: list[tuple[float, float, float, int]] = []  # price, points, seconds, thresholds
        for level, drop in enumerate(drops):
            lost, saved_s, count = drop, seconds[level] - seconds[level + 1], 1
            price = lost / saved_s if saved_s > 0.0 else inf
            while pools and pools[-1][0] > price:
                _, more_lost, more_s, more = pools.pop()
                lost, saved_s, count = lost + more_lost, saved_s + more_s, count + more
                price = lost / saved_s if saved_s > 0.0 else inf
            pools.append((price, lost, saved_s, count))
        left = max(1.0 - demand.done, 1e-9)  # an unfinished request has something to settle
        scale = demand.request.slo.weight * left
        return [scale * price for price, _, _, count in pools for _ in range(count)]

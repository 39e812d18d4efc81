"""One cap level for everybody: the highest at which all deadlines can be kept.

Source: DiLaServe C4 (``horizons``). Quality is concave in the threshold (0.9 to 0.7 costs 1.6
points of accuracy, 0.7 to 0.5 costs 11, DiLaServe B3) and a lower threshold saves about the same
share of every request, so lowering everybody a little is cheaper than lowering a few to the floor,
which is what ``load_caps`` does. ``marginal_caps`` weighs requests one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stepserve.core.bounds import Bounded, Share
from stepserve.core.instance import InstanceSpec
from stepserve.core.protocols import Demand, Parts

from .horizons import Horizons, horizons


class HorizonCaps:
    """Load control for deadlines of any mix."""

    @dataclass(frozen=True, slots=True)
    class Options(Bounded):
        """``margin``: the share of a deadline that is planned against; else ``control.margin``.

        ``utilisation``: share of the cluster's time that is planned with.
        """

        margin: Share | None = None
        utilisation: Share = 0.8

    def __init__(self, options: Options, parts: Parts) -> None:
        self._cost = parts.cost
        self._margin = parts.margin(options.margin)
        self._utilisation = options.utilisation

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
        most = max(len(demand.thresholds) for demand in demands)
        level = next((k for k in range(most) if _fits(found, k)), most - 1)
        return [
            demand.thresholds[-1 if is_infeasible else min(level, len(demand.thresholds) - 1)]
            if demand.can_be_lowered
            else demand.thresholds[0]
            for demand, is_infeasible in zip(demands, found.infeasible, strict=True)
        ]


def _fits(found: Horizons, level: int) -> bool:
    """Whether demand at a level never exceeds supply up to a deadline still in reach."""
    used = 0.0
    for supply_s, indexes in found:
        for index in indexes:
            row = found.seconds[index]
            used += row[-1 if found.infeasible[index] else min(level, len(row) - 1)]
        if used > supply_s:
            return False
    return True

"""One cap level for everybody: the highest at which all deadlines can be kept.

Sources: dilaserve.md C4 (what is due within a horizon must fit into what the cluster executes
until then) and Part E 4 (caps by marginal quality). Quality is concave in the threshold (0.9 to
0.7 costs 1.6 points of accuracy, 0.7 to 0.5 costs 11, B3) and a lower threshold saves about the
same share of every request, so lowering everybody a little is cheaper than lowering a few to
the floor, which is what ``load_caps`` does.
"""

import math
from collections.abc import Sequence

from stepserve.core.instance import InstanceSpec
from stepserve.core.protocols import CostModel, Demand

from .load_caps import possible, tokens_per_s


class HorizonCaps:
    """Load control for deadlines of any mix."""

    def __init__(self, cost: CostModel, *, margin: float, batch_tokens: int) -> None:
        """``batch_tokens``: most tokens of one batch, which supply is quoted for."""
        self._cost = cost
        self._margin = margin
        self._batch_tokens = batch_tokens

    def caps(
        self, demands: Sequence[Demand], specs: Sequence[InstanceSpec], now_s: float
    ) -> list[float]:
        """See ``CapPolicy.caps``. A request that is believed lost gets its lowest threshold."""
        block = demands[0].request.diffusion.block_tokens
        supply = sum(tokens_per_s(self._cost, s, self._batch_tokens, block) for s in specs)
        lost = [not possible(demand, self._margin, now_s) for demand in demands]
        due = sorted(
            (self._left_s(d, now_s), i) for i, d in enumerate(demands) if d.request.slo.e2e_s
        )
        most = max(len(demand.thresholds) for demand in demands)
        level = next(
            (k for k in range(most) if self._fits(demands, due, lost, k, supply)), most - 1
        )
        return [
            d.thresholds[-1 if lost[i] else min(level, len(d.thresholds) - 1)]
            for i, d in enumerate(demands)
        ]

    def _fits(
        self,
        demands: Sequence[Demand],
        due: Sequence[tuple[float, int]],
        lost: Sequence[bool],
        level: int,
        supply: float,
    ) -> bool:
        """Whether demand at a level never exceeds supply up to a deadline still in reach."""
        used = 0.0
        for left_s, index in due:
            tokens = demands[index].tokens
            used += tokens[-1] if lost[index] else tokens[min(level, len(tokens) - 1)]
            if not lost[index] and used > supply * left_s:
                return False
        return True

    def _left_s(self, demand: Demand, now_s: float) -> float:
        slo_s = demand.request.slo.e2e_s
        return (
            math.inf if slo_s is None else demand.request.arrival_s + self._margin * slo_s - now_s
        )

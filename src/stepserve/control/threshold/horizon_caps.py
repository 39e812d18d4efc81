"""One cap level for everybody: the highest at which all deadlines can be kept.

Sources: dilaserve.md C4 (what is due within a horizon must fit into what the cluster executes
until then) and Part E 4 (caps by marginal quality). Quality is concave in the threshold (0.9 to
0.7 costs 1.6 points of accuracy, 0.7 to 0.5 costs 11, B3) and a lower threshold saves about the
same share of every request, so lowering everybody a little is cheaper than lowering a few to
the floor, which is what ``load_caps`` does.

Demand is counted in seconds of an instance, not in tokens: a cached step's share of a full
batch, and what a recompute step adds to one. Tokens miss what a step costs beside its tokens
(the latency floor, the host), which is most of a cached step.
"""

from collections.abc import Sequence

from stepserve.core.instance import InstanceSpec
from stepserve.core.protocols import CostModel, Demand

from .load_caps import possible, tokens_per_s

BATCH_TOKENS = 8192
"""Instances of different TP degrees are compared at this size of batch."""


class HorizonCaps:
    """Load control for deadlines of any mix."""

    def __init__(self, cost: CostModel, *, margin: float, utilisation: float) -> None:
        """``utilisation``: share of the cluster's time that is planned with."""
        self._cost = cost
        self._margin = margin
        self._utilisation = utilisation

    def caps(
        self, demands: Sequence[Demand], specs: Sequence[InstanceSpec], now_s: float
    ) -> list[float]:
        """See ``CapPolicy.caps``. A request that is believed lost gets its lowest threshold."""
        spec = min(specs, key=lambda s: s.tp_degree)
        block = demands[0].request.diffusion.block_tokens
        rates = {s.tp_degree: tokens_per_s(self._cost, s, BATCH_TOKENS, block) for s in specs}
        instances = sum(rates[s.tp_degree] for s in specs) / rates[spec.tp_degree]
        lost = [d.can_be_lowered and not possible(d, self._margin, now_s) for d in demands]
        left_s = [
            None
            if (slo_s := d.request.slo.e2e_s) is None
            else d.request.arrival_s + self._margin * slo_s - now_s
            for d in demands
        ]
        last_s = max((s for s in left_s if s is not None), default=0.0)
        # whoever has no deadline is served beside the others: due with the last of them
        due = sorted((last_s if s is None else s, i) for i, s in enumerate(left_s))
        seconds = self._seconds(demands, spec)
        supply = self._utilisation * instances
        most = max(len(demand.thresholds) for demand in demands)
        lost = [
            is_lost and demand.can_be_lowered for is_lost, demand in zip(lost, demands, strict=True)
        ]
        fits = (k for k in range(most) if _fits(seconds, due, lost, k, supply))
        level = next(fits, most - 1)
        return [
            d.thresholds[-1 if lost[i] else min(level, len(d.thresholds) - 1)]
            if d.can_be_lowered
            else d.thresholds[0]
            for i, d in enumerate(demands)
        ]

    def _seconds(self, demands: Sequence[Demand], spec: InstanceSpec) -> list[tuple[float, ...]]:
        """Time of one instance that each request still takes, at each of its thresholds."""
        units: dict[tuple[int, int], tuple[float, float]] = {}
        rows = []
        for demand in demands:
            sizes = demand.heavy_tokens, demand.light_tokens
            if sizes not in units:
                units[sizes] = self._unit(*sizes, spec)
            heavy_s, light_s = units[sizes]
            pairs = zip(demand.heavy, demand.light, strict=True)
            seconds = tuple(h * heavy_s + n * light_s for h, n in pairs)
            rows.append(seconds if demand.can_be_lowered else seconds[:1])
        return rows

    def _unit(
        self, heavy_tokens: int, light_tokens: int, spec: InstanceSpec
    ) -> tuple[float, float]:
        """Seconds of a heavy and of a light step as shares of a full batch."""
        rows = spec.max_residents
        batch_s = self._cost.step_time_s(rows * light_tokens, rows, spec)
        tokens = heavy_tokens + (rows - 1) * light_tokens
        more_s = max(0.0, self._cost.step_time_s(tokens, rows, spec) - batch_s)
        return batch_s / rows + more_s, batch_s / rows


def _fits(
    seconds: Sequence[tuple[float, ...]],
    due: Sequence[tuple[float, int]],
    lost: Sequence[bool],
    level: int,
    supply: float,
) -> bool:
    """Whether demand at a level never exceeds supply up to a deadline still in reach."""
    used = 0.0
    for left_s, index in due:
        needed = seconds[index]
        used += needed[-1] if lost[index] else needed[min(level, len(needed) - 1)]
        if not lost[index] and used > supply * left_s:
            return False
    return True

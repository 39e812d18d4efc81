"""Demand and supply by deadline horizon: what is due until then must fit into what can be done.

Source: DiLaServe C4. Demand is counted in seconds of an instance, not in tokens: a cached
step's share of a full batch, and what a recompute step adds to one. Tokens miss what a step
costs beside its tokens (the latency floor, the host), which is most of a cached step.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stepserve.core.instance import InstanceSpec
from stepserve.core.protocols import CostModel, Demand

from .load_caps import possible, tokens_per_s

BATCH_TOKENS = 8192
"""Instances of different TP degrees are compared at this size of batch."""


@dataclass(frozen=True, slots=True)
class Horizons:
    """``seconds``: per demand, time of one instance that it still takes at each threshold that
    it may be lowered to, highest first. ``infeasible``: whose deadline is out of reach, and binds
    nobody. ``due``: (seconds left, index of the demand) in order of deadline. ``supply``:
    instance-seconds per second.
    """

    seconds: Sequence[tuple[float, ...]]
    infeasible: Sequence[bool]
    due: Sequence[tuple[float, int]]
    supply: float

    def __iter__(self) -> Iterator[tuple[float, list[int]]]:
        """(supply until a deadline, who is due then), in order of deadline.

        A deadline that nobody can keep is joined with the next one that somebody can; after
        the last such one nothing binds any more (infinite supply).
        """
        waiting: list[int] = []
        for left_s, group in itertools.groupby(self.due, key=lambda pair: pair[0]):
            indexes = [index for _, index in group]
            waiting += indexes
            if not all(self.infeasible[index] for index in indexes):
                yield self.supply * left_s, waiting
                waiting = []
        yield float("inf"), waiting


def horizons(
    cost: CostModel,
    demands: Sequence[Demand],
    specs: Sequence[InstanceSpec],
    now_s: float,
    *,
    margin: float,
    utilisation: float,
) -> Horizons:
    """Of demands planned against ``margin`` of their deadlines, with ``utilisation`` of supply.

    Whoever has no deadline is served beside the others: due with the last of them.
    """
    spec = min(specs, key=lambda s: s.tp_degree)
    options = demands[0].request.diffusion
    rates = {s.tp_degree: tokens_per_s(cost, s, BATCH_TOKENS, options) for s in specs}
    instances = sum(rates[s.tp_degree] for s in specs) / rates[spec.tp_degree]
    left_s = [
        None if d.request.slo.e2e_s is None else d.request.left_s(now_s, margin) for d in demands
    ]
    last_s = max((s for s in left_s if s is not None), default=0.0)
    return Horizons(
        _seconds(cost, demands, spec),
        [not possible(demand, margin, now_s) for demand in demands],
        sorted((last_s if s is None else s, i) for i, s in enumerate(left_s)),
        utilisation * instances,
    )


def _seconds(
    cost: CostModel, demands: Sequence[Demand], spec: InstanceSpec
) -> list[tuple[float, ...]]:
    units: dict[tuple[int, int], tuple[float, float]] = {}
    rows = []
    for demand in demands:
        sizes = demand.heavy_tokens, demand.light_tokens
        if sizes not in units:
            units[sizes] = _unit(cost, *sizes, spec)
        heavy_s, light_s = units[sizes]
        pairs = zip(demand.heavy, demand.light, strict=True)
        seconds = tuple([h * heavy_s + n * light_s for h, n in pairs])
        rows.append(seconds if demand.can_be_lowered else seconds[:1])
    return rows


def _unit(
    cost: CostModel, heavy_tokens: int, light_tokens: int, spec: InstanceSpec
) -> tuple[float, float]:
    """Seconds of a heavy and of a light step as shares of a full batch."""
    rows = spec.max_running_requests
    batch_s = cost.step_time_s(rows * light_tokens, rows, spec)
    tokens = heavy_tokens + (rows - 1) * light_tokens
    more_s = max(0.0, cost.step_time_s(tokens, rows, spec) - batch_s)
    return batch_s / rows + more_s, batch_s / rows

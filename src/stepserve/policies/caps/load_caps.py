"""Threshold caps that keep everybody's demand within what the cluster can execute.

Source: DiLaServe B6: demand and supply in tokens; the most advanced requests are served first, each
reserving the minimum of those behind it. Deviations: the deadline horizon is the mean of the
requests' own SLOs, which is DiLaServe B6's one SLO where all are equal (``horizon_caps`` treats
unequal ones properly, DiLaServe C4); a request that is not to be lowered (without a deadline, or
``best_effort``) is reserved for in full.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stepserve.core.bounds import Bounded, Count, Share
from stepserve.core.instance import InstanceSpec
from stepserve.core.protocols import CostModel, Demand, Parts
from stepserve.core.request import CacheMode, DiffusionOptions

NOMINAL_TOKENS = 1536
"""Length of the request that ``rate`` is quoted for (DiLaServe B6)."""


def tokens_per_s(
    cost: CostModel, spec: InstanceSpec, batch_tokens: int, options: DiffusionOptions
) -> float:
    """Supply of one instance: a block of ``k`` nominal requests, one recompute step and
    ``block_tokens - 1`` cached steps, all in step (``rate`` of DiLaServe B6). Block-causal models
    open a block with two blocks' tokens instead of a recompute step.
    """
    rows, block_tokens = max(1, batch_tokens // NOMINAL_TOKENS), options.block_tokens
    opening = 2 * block_tokens if options.cache_mode is CacheMode.BLOCK else NOMINAL_TOKENS
    light, heavy = rows * block_tokens, rows * opening
    seconds = (block_tokens - 1) * cost.step_time_s(light, rows, spec)
    seconds += cost.step_time_s(heavy, rows, spec)
    return ((block_tokens - 1) * light + heavy) / seconds


def possible(demand: Demand, margin: float, now_s: float) -> bool:
    """Whether the deadline is still believed to be in reach (``possible`` of DiLaServe B6)."""
    return demand.request.left_s(now_s, margin) > demand.least_s


class LoadCaps:
    """The published load control."""

    @dataclass(frozen=True, slots=True)
    class Options(Bounded):
        """``margin``: the share of a deadline that is planned against; else ``control.margin``.

        ``utilisation``: share of the supply that is planned with (1 in the published system).
        ``batch_tokens``: most tokens of one batch, as published.
        """

        margin: Share | None = None
        utilisation: Share = 0.8
        batch_tokens: Count = 8192

    def __init__(self, options: Options, parts: Parts) -> None:
        self._cost = parts.cost
        self._margin = parts.margin(options.margin)
        self._utilisation = options.utilisation
        self._batch_tokens = options.batch_tokens

    def caps(
        self, demands: Sequence[Demand], specs: Sequence[InstanceSpec], now_s: float
    ) -> list[float]:
        """See ``CapPolicy.caps``."""
        slos = [d.request.slo.e2e_s for d in demands if d.request.slo.e2e_s is not None]
        if not slos:
            return [demand.thresholds[0] for demand in demands]
        options = demands[0].request.diffusion
        rates = {
            degree: tokens_per_s(self._cost, spec, self._batch_tokens, options)
            for degree, spec in {spec.tp_degree: spec for spec in specs}.items()
        }
        horizon_s = sum(slos, 0.0) / len(slos)
        supply = self._utilisation * horizon_s * sum(rates[spec.tp_degree] for spec in specs)
        order = sorted(range(len(demands)), key=lambda i: -demands[i].done)  # stable: by arrival
        tokens = [demand.tokens for demand in demands]
        least = [
            row[-1 if demand.can_be_lowered else 0]
            for demand, row in zip(demands, tokens, strict=True)
        ]
        rest = sum(least, 0.0)
        caps, used = [0.0] * len(demands), 0.0
        for index in order:
            demand = demands[index]
            rest -= least[index]
            level = self._level(demand, tokens[index], supply - used - rest, now_s)
            caps[index] = demand.thresholds[level]
            used += tokens[index][level]
        return caps

    def _level(self, demand: Demand, tokens: tuple[float, ...], room: float, now_s: float) -> int:
        """Index of the highest threshold whose demand fits in the room; the last if none does."""
        if not demand.can_be_lowered:
            return 0
        last = len(tokens) - 1
        if not possible(demand, self._margin, now_s):
            return last
        return next((i for i, needed in enumerate(tokens) if needed <= room), last)

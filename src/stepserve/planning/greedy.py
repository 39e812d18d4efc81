"""The plain planner: try every layout at every threshold, take the first that fits.

Baseline of ``two_stage``, without a solver. A layout fits a threshold if some number of
running requests per instance, the same everywhere, gives enough throughput and meets every SLO on
every instance. All running requests recompute together and run cached steps together, as
``time_left`` of DiLaServe B6 assumes. For small clusters: 4 nodes of 4 GPUs have 35 layouts, 8
nodes of 8 have thousands.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from stepserve.core.config import NoOptions
from stepserve.core.plan import ClusterPlan, PlanProblem, Slot

from .layouts import Partition, arrange, counts, kept, partitions, stops_everything
from .steps import light_tokens, step_counts, step_s, yields


class GreedyPlanner:
    """Highest threshold first; of the layouts that fit it, the one with fewest changes."""

    Options = NoOptions

    def __init__(self, options: NoOptions | None = None, parts: object = None) -> None:
        """Nothing is needed: a problem says it all."""

    def plan(self, problem: PlanProblem) -> ClusterPlan:
        """See ``Planner.plan``. A change that would stop every instance at once is not made."""
        plan = self.target(problem)
        if stops_everything(problem.present, plan.slots):
            return _first_fit(problem, [problem.present])
        return plan

    def target(self, problem: PlanProblem) -> ClusterPlan:
        """As ``plan``, for a cluster that may stop serving."""
        options = [arrange(problem, chosen) for chosen in _layouts(problem)]
        options.sort(key=lambda slots: len(set(problem.present) - set(slots)))
        return _first_fit(problem, options)


def _first_fit(problem: PlanProblem, options: Sequence[tuple[Slot, ...]]) -> ClusterPlan:
    """The highest threshold that a layout fits, and the first such; else the most instances."""
    for index, threshold in enumerate(problem.thresholds):
        for slots in options:
            slack = _slack(problem, counts(slots), index)
            if slack is not None:
                return ClusterPlan(slots, threshold, slack, f"fits threshold {threshold}")
    most = max(options, key=len)
    return ClusterPlan(most, problem.thresholds[-1], -math.inf, "no layout fits")


def _layouts(problem: PlanProblem) -> Iterator[Sequence[Partition]]:
    """One split per node; nodes of a size are alike, so only what they have together counts."""
    nodes = sorted(Counter(problem.gpus_per_node).items())
    pools = [
        itertools.combinations_with_replacement(partitions(gpus, problem.tp_degrees), count)
        for gpus, count in nodes
    ]
    for combination in itertools.product(*pools):
        left = {gpus: list(pool) for (gpus, _), pool in zip(nodes, combination, strict=True)}
        chosen = []
        for node, gpus in enumerate(problem.gpus_per_node):  # each takes what keeps most
            best = max(left[gpus], key=lambda split: kept(problem.present, node, split))
            left[gpus].remove(best)
            chosen.append(best)
        yield chosen


def _slack(problem: PlanProblem, layout: Counter[int], index: int) -> float | None:
    """Mean slack with the fewest running requests that carry the load; ``None``: none fits."""
    total_per_s = sum(c.rate_per_s for c in problem.classes)
    shares = [c.rate_per_s / total_per_s for c in problem.classes]
    smallest = min(c.full_tokens for c in problem.classes)
    for running_requests in range(
        1, max(t[-1][0] for t in problem.step_s.values()) // smallest + 1
    ):
        capacity_per_s = slack = 0.0
        for degree, count in layout.items():
            latency_s = _latency_s(problem, degree, running_requests, index)
            if any(s > c.slo_s for s, c in zip(latency_s, problem.classes, strict=True)):
                return None  # more running requests are only slower
            mean_s = sum(w * s for w, s in zip(shares, latency_s, strict=True))
            capacity_per_s += count * running_requests / mean_s
            rows = zip(shares, latency_s, problem.classes, strict=True)
            slack += count * sum(w * (1.0 - s / c.slo_s) for w, s, c in rows)
        if capacity_per_s >= total_per_s:
            return slack / layout.total()
    return None


def _latency_s(problem: PlanProblem, degree: int, running_requests: int, index: int) -> list[float]:
    """Latency of each class on an instance with this many running requests of the mean length."""
    table = problem.step_s[degree]
    total_per_s = sum(c.rate_per_s for c in problem.classes)
    full = sum(c.rate_per_s * c.full_tokens for c in problem.classes) / total_per_s
    light = sum(c.rate_per_s * light_tokens(problem, c) for c in problem.classes) / total_per_s
    latency_s = []
    for c in problem.classes:
        heavy_steps, light_steps = step_counts(problem, c, yields(problem, c)[index])
        full_s = step_s(table, max(c.full_tokens, running_requests * full))
        light_s = step_s(table, running_requests * light) if light_steps else 0.0
        latency_s.append(heavy_steps * full_s + light_steps * light_s)
    return latency_s

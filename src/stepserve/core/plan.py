"""Cluster plans: which GPUs form which instance, and the order in which to change that.

The planner is asked periodically with a ``PlanProblem`` (what the cluster is, what arrives, how
long steps take) and answers with a ``ClusterPlan``; ``stages`` says how to get there
(DiLaServe's two-stage reconfiguration, DiLaServe A2.6 and DiLaServe B8).
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from stepserve.core.bounds import Bounded, Count, FinitePositive, Whole, ascends, descends
from stepserve.core.errors import check
from stepserve.core.request import CacheMode

BATCH_SIZES = (32, 64, 128, 160, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
"""Tokens of the batches that a plan chooses from (DiLaServe C7)."""


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """The GPUs of one instance: a node, and indices within it, ascending."""

    node: int
    gpus: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raises FieldError for a slot without GPUs, or with indices that do not ascend."""
        check(self.node >= 0, "slot.node", "must not be negative")
        ascend = ascends(self.gpus) and self.gpus[0] >= 0
        check(ascend, "slot.gpus", "must be ascending indices, at least one")

    @property
    def tp_degree(self) -> int:
        """Tensor-parallel degree of the instance."""
        return len(self.gpus)

    def overlaps(self, other: "Slot") -> bool:
        """Whether the two share a GPU."""
        return self.node == other.node and not set(self.gpus).isdisjoint(other.gpus)


@dataclass(frozen=True, slots=True)
class WorkloadClass(Bounded):
    """Requests of similar lengths that arrive at ``rate_per_s``, headroom included."""

    prompt_tokens: Whole
    output_tokens: Count
    slo_s: FinitePositive
    rate_per_s: FinitePositive

    @property
    def full_tokens(self) -> int:
        """Tokens that a recompute step executes: prompt and output."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class PlanProblem(Bounded):
    """What the planner is asked.

    ``gpus_per_node``: one entry per node. ``classes``: at least one; without arrivals there is
    nothing to plan. ``thresholds`` descend; ``tokens_per_step`` has one entry for each: mean
    tokens that a step settles there. ``step_s`` maps a TP degree to (tokens executed, seconds),
    ascending by tokens. ``present``: the instances there are; not all GPUs need be in use.
    """

    gpus_per_node: tuple[int, ...]
    tp_degrees: tuple[int, ...]
    classes: tuple[WorkloadClass, ...]
    thresholds: tuple[float, ...]
    tokens_per_step: tuple[float, ...]
    step_s: Mapping[int, tuple[tuple[int, float], ...]]
    block_tokens: Count = 32
    cache_mode: CacheMode = CacheMode.DUAL
    present: tuple[Slot, ...] = ()

    def __post_init__(self) -> None:
        """Raises FieldError naming what does not fit together."""
        Bounded.__post_init__(self)
        self._check_cluster()
        check(len(self.classes) >= 1, "classes", "at least one is needed")
        grid = self.thresholds
        within = descends(grid) and grid[-1] > 0.0 and grid[0] <= 1.0
        check(within, "thresholds", "must descend in 0..1")
        yields = self.tokens_per_step
        check(len(yields) == len(grid), "tokens_per_step", "needs one entry per threshold")
        check(all(t > 0.0 for t in yields), "tokens_per_step", "must be positive")
        longest = max(c.full_tokens for c in self.classes)
        for degree in self.tp_degrees:
            table = self.step_s.get(degree, ())
            name = f"step_s[{degree}]"
            sizes = [tokens for tokens, _ in table]
            check(bool(sizes), name, "is missing or empty")
            check(ascends(sizes) and sizes[0] >= 1, name, "sizes must ascend from 1")
            check(all(0.0 < s < math.inf for _, s in table), name, "seconds must be positive")
            check(sizes[-1] >= longest, name, f"ends below the longest request ({longest} tokens)")

    def _check_cluster(self) -> None:
        check(len(self.gpus_per_node) >= 1, "gpus_per_node", "at least one node is needed")
        degrees = self.tp_degrees
        ascend = ascends(degrees) and degrees[0] >= 1
        check(ascend, "tp_degrees", "must ascend from at least 1")
        for gpus in set(self.gpus_per_node):
            tiled = gpus >= 1 and _tiles(gpus, degrees)
            check(tiled, "tp_degrees", f"instances cannot use all of a node's {gpus} GPUs")
        taken = [(slot.node, gpu) for slot in self.present for gpu in slot.gpus]
        check(len(taken) == len(set(taken)), "present", "two instances share a GPU")
        for slot in self.present:
            check(slot.tp_degree in degrees, "present", f"TP degree {slot.tp_degree} is not known")
            inside = slot.node < len(self.gpus_per_node)
            inside = inside and slot.gpus[-1] < self.gpus_per_node[slot.node]
            check(inside, "present", f"{slot} is outside the cluster")


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The instances there should be; equal to the problem's ``present`` to leave all as it is.

    ``mean_threshold`` is the planned mean per output token, ``slack`` the planned mean share of
    the SLO left over: negative where it is missed, minus infinity where the load exceeds what
    the cluster can process.
    """

    slots: tuple[Slot, ...]
    mean_threshold: float
    slack: float
    why: str


class Planner(Protocol):
    """Chooses the instances of a cluster. May take seconds: never called inside a handler."""

    def plan(self, problem: PlanProblem) -> ClusterPlan:
        """The same plan for the same problem."""
        ...


@dataclass(frozen=True, slots=True)
class Stage:
    """Instances to stop and to start together: they are linked by GPUs they share."""

    stop: tuple[Slot, ...]
    start: tuple[Slot, ...]


def stages(present: tuple[Slot, ...], target: tuple[Slot, ...]) -> tuple[Stage, ...]:
    """The changes from one layout to another, as stages to run one after another (DiLaServe B8).

    A stage is a connected component of stopped and started instances that share a GPU; a
    start waits for the stops it overlaps. Unchanged instances are in no stage. Stages ascend
    by their lowest (node, GPU).
    """
    stop = set(present) - set(target)
    start = set(target) - set(present)
    groups: list[set[Slot]] = []
    for slot in sorted(stop | start):
        touched = [group for group in groups if any(slot.overlaps(other) for other in group)]
        groups = [group for group in groups if group not in touched]
        groups.append({slot}.union(*touched))
    ordered = sorted(groups, key=lambda group: min((s.node, s.gpus[0]) for s in group))
    return tuple(Stage(tuple(sorted(g & stop)), tuple(sorted(g & start))) for g in ordered)


def _tiles(gpus: int, degrees: tuple[int, ...]) -> bool:
    """Whether instances of these degrees can add up to exactly this many GPUs."""
    sums = {0}
    for total, degree in itertools.product(range(1, gpus + 1), degrees):
        if total - degree in sums:
            sums.add(total)
    return gpus in sums

"""Layouts of a cluster: how its nodes can be split, and which GPUs an instance then takes."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

from stepserve.core.plan import PlanProblem, Slot, stages

Partition = tuple[int, ...]
"""TP degrees of the instances of one node, largest first; they add up to its GPUs."""


def partitions(gpus: int, degrees: Sequence[int]) -> tuple[Partition, ...]:
    """Every way to split a node, those with large instances first: 4 GPUs can be split as
    4, 2 + 2, 2 + 1 + 1 or 1 + 1 + 1 + 1.
    """
    if gpus == 0:
        return ((),)
    return tuple(
        (degree, *rest)
        for degree in sorted(degrees, reverse=True)
        if degree <= gpus
        for rest in partitions(gpus - degree, [d for d in degrees if d <= degree])
    )


def counts(slots: Sequence[Slot]) -> Counter[int]:
    """Instances of each TP degree."""
    return Counter(slot.tp_degree for slot in slots)


def smallest_instances(problem: PlanProblem) -> Counter[int]:
    """As many instances as there can be: all TP 1 where that is allowed. Most throughput."""
    total: Counter[int] = Counter()
    for gpus in problem.gpus_per_node:
        most = max(partitions(gpus, problem.tp_degrees), key=len)
        total.update(most)
    return total


def arrange(problem: PlanProblem, chosen: Sequence[Partition]) -> tuple[Slot, ...]:
    """Slots of a layout with one partition per node, keeping as many instances as possible."""
    nodes = enumerate(zip(problem.gpus_per_node, chosen, strict=True))
    return tuple(slot for n, (gpus, p) in nodes for slot in _split(n, gpus, p, problem.present))


def stops_everything(present: tuple[Slot, ...], slots: tuple[Slot, ...]) -> bool:
    """Whether one stage of the change would stop every instance: nothing would serve."""
    return any(set(stage.stop) == set(present) for stage in stages(present, slots)) and bool(
        present
    )


def kept(present: Sequence[Slot], node: int, partition: Partition) -> int:
    """Instances of a node that can stay if it is split like this."""
    have = counts([slot for slot in present if slot.node == node])
    return (have & Counter(partition)).total()


def _split(node: int, gpus: int, partition: Partition, present: Sequence[Slot]) -> tuple[Slot, ...]:
    """The node's slots. Of equally many kept instances, those that leave aligned groups free."""
    here = sorted(slot for slot in present if slot.node == node)
    need = Counter(partition)
    pools = [
        itertools.combinations(slots, min(len(slots), need[degree]))
        for degree in sorted(need)
        if (slots := [slot for slot in here if slot.tp_degree == degree])
    ]
    options = [
        _fill(node, gpus, need, [slot for pool in pick for slot in pool])
        for pick in itertools.product(*pools)
    ]
    return min(options, key=lambda slots: (sum(map(_crooked, slots)), slots))


def _fill(node: int, gpus: int, need: Mapping[int, int], keep: Sequence[Slot]) -> tuple[Slot, ...]:
    """The kept slots, and new ones on the free GPUs: large ones first, aligned if possible."""
    free = sorted(set(range(gpus)) - {gpu for slot in keep for gpu in slot.gpus})
    slots = list(keep)
    have = counts(keep)
    for degree in sorted(need, reverse=True):
        for _ in range(need[degree] - have[degree]):
            groups = [tuple(range(at, at + degree)) for at in range(0, gpus, degree)]
            aligned = [group for group in groups if set(group) <= set(free)]
            chosen = aligned[0] if aligned else tuple(free[:degree])
            free = [gpu for gpu in free if gpu not in chosen]
            slots.append(Slot(node, chosen))
    return tuple(sorted(slots))


def _crooked(slot: Slot) -> bool:
    """Whether the GPUs are not an aligned group (0 1, 2 3, 0 1 2 3, ...), as links favour."""
    first, degree = slot.gpus[0], slot.tp_degree
    return first % degree != 0 or slot.gpus != tuple(range(first, first + degree))

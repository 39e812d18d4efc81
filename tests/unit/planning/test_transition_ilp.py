"""Stage 2 keeps as many instances as any assignment of GPUs can (brute force on 8 GPUs)."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepserve.core.plan import Slot
from stepserve.planning.layouts import arrange, counts, partitions, smallest_instances
from stepserve.planning.transition_ilp import TransitionIlp
from support.planning import all_tp1, gsm8k, problem


def grouped(gpus, partition):
    """Every way to give GPUs to instances of these degrees."""
    if not partition:
        yield ()
        return
    first, *rest = partition
    for group in itertools.combinations(gpus, first):
        left = [gpu for gpu in gpus if gpu not in group]
        for others in grouped(left, rest):
            yield (group, *others)


def every_layout(nodes, degrees):
    per_node = []
    for node, gpus in enumerate(nodes):
        options = set()
        for partition in partitions(gpus, degrees):
            for groups in grouped(range(gpus), partition):
                options.add(tuple(sorted(Slot(node, group) for group in groups)))
        per_node.append(sorted(options))
    for choice in itertools.product(*per_node):
        yield tuple(slot for slots in choice for slot in slots)


NODES, DEGREES = (4, 4), (1, 2, 4)
LAYOUTS = list(every_layout(NODES, DEGREES))
BY_COUNTS = {}
for _layout in LAYOUTS:
    BY_COUNTS.setdefault(tuple(sorted(counts(_layout).items())), []).append(set(_layout))


@settings(max_examples=60)
@given(st.sampled_from(LAYOUTS), st.sampled_from(sorted(BY_COUNTS)), st.data())
def test_as_many_instances_stay_as_possible(present, wanted, data):
    lost = data.draw(st.sets(st.sampled_from(present), max_size=2))
    present = tuple(slot for slot in present if slot not in lost)
    asked = problem(gsm8k(1.0), nodes=NODES, degrees=DEGREES, present=present)
    slots = TransitionIlp().slots(asked, dict(wanted))
    assert set(slots) in BY_COUNTS[wanted]
    most = max(len(target & set(present)) for target in BY_COUNTS[wanted])
    assert len(set(slots) & set(present)) == most


def test_the_present_layout_stays_when_it_is_asked_for():
    for present in LAYOUTS[:: len(LAYOUTS) // 20]:
        asked = problem(gsm8k(1.0), nodes=NODES, present=present)
        assert TransitionIlp().slots(asked, counts(present)) == present


def test_new_instances_are_aligned_and_the_first_nodes_change():
    asked = problem(gsm8k(1.0), present=all_tp1(4))
    slots = TransitionIlp().slots(asked, {4: 2, 2: 1, 1: 6})
    new = [slot for slot in slots if slot not in all_tp1(4)]
    assert new == [Slot(0, (0, 1, 2, 3)), Slot(1, (0, 1, 2, 3)), Slot(2, (2, 3))]


def test_what_stays_leaves_room_for_an_aligned_pair():
    """One of three must stop: stopping 0 lets the new pair be (0, 1)."""
    present = (Slot(0, (0,)), Slot(0, (2,)), Slot(0, (3,)))
    asked = problem(gsm8k(1.0), nodes=(4,), present=present)
    expected = (Slot(0, (0, 1)), Slot(0, (2,)), Slot(0, (3,)))
    assert TransitionIlp().slots(asked, {1: 2, 2: 1}) == expected


def test_counts_that_no_split_has_are_refused():
    asked = problem(gsm8k(1.0), nodes=(4,))
    with pytest.raises(ValueError, match="no split"):
        TransitionIlp().slots(asked, {1: 3})


def test_partitions_of_a_node():
    assert partitions(4, (1, 2, 4)) == ((4,), (2, 2), (2, 1, 1), (1, 1, 1, 1))
    assert len(partitions(8, (1, 2, 4, 8))) == 10
    assert partitions(3, (2,)) == ()


def test_the_fallback_has_the_smallest_instances():
    asked = problem(gsm8k(1.0), nodes=(4, 3), degrees=(1, 2, 4))
    assert smallest_instances(asked) == Counter({1: 7})
    pairs = problem(gsm8k(1.0), nodes=(4, 4), degrees=(2, 4))
    assert smallest_instances(pairs) == Counter({2: 4})
    assert arrange(pairs, [(2, 2), (4,)])[-1] == Slot(1, (0, 1, 2, 3))

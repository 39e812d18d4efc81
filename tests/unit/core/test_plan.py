"""Plan problems say what is wrong with them; stages cover a change and nothing else."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepserve.core.errors import FieldError
from stepserve.core.plan import Slot, Stage, WorkloadClass, stages
from support.planning import gsm8k, problem

GOOD = problem(gsm8k(1.0))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"gpus_per_node": ()}, "gpus_per_node"),
        ({"gpus_per_node": (4, 3), "tp_degrees": (2, 4)}, "tp_degrees"),
        ({"tp_degrees": (2, 1)}, "tp_degrees"),
        ({"tp_degrees": (1, 2, 4, 8)}, "step_s[8]"),
        ({"classes": ()}, "classes"),
        ({"classes": (WorkloadClass(8000, 256, 9.5, 1.0),)}, "step_s[1]"),
        ({"thresholds": (0.5, 0.6, 0.7, 0.8, 0.9)}, "thresholds"),
        ({"thresholds": (0.9, 0.8)}, "tokens_per_step"),
        ({"tokens_per_step": (3.0, 3.9, 4.8, 5.7, 0.0)}, "tokens_per_step"),
        ({"step_s": {**GOOD.step_s, 2: ((64, 0.01), (32, 0.02))}}, "step_s[2]"),
        ({"step_s": {**GOOD.step_s, 2: ((8192, -0.1),)}}, "step_s[2]"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"present": (Slot(0, (0, 1)), Slot(0, (1,)))}, "present"),
        ({"present": (Slot(4, (0,)),)}, "present"),
        ({"present": (Slot(0, (4,)),)}, "present"),
        ({"present": (Slot(0, (0, 1, 2)),)}, "present"),
    ],
)
def test_a_problem_names_the_field_that_is_wrong(changes, field):
    with pytest.raises(FieldError) as caught:
        replace(GOOD, **changes)
    assert caught.value.field == field


@pytest.mark.parametrize(("node", "gpus"), [(-1, (0,)), (0, ()), (0, (1, 0)), (0, (0, 0))])
def test_a_slot_has_ascending_gpus_on_a_node(node, gpus):
    with pytest.raises(FieldError):
        Slot(node, gpus)


@pytest.mark.parametrize("values", [(-1, 8, 1, 1), (8, 0, 1, 1), (8, 8, 0, 1), (8, 8, 1, 0)])
def test_a_workload_class_checks_its_numbers(values):
    with pytest.raises(FieldError):
        WorkloadClass(*values)


def test_worked_stages():
    """Node 0 merges two of its four instances; node 1 splits; node 2 does not change."""
    present = (*(Slot(0, (g,)) for g in range(4)), Slot(1, (0, 1)), Slot(2, (0,)))
    target = (Slot(0, (0, 1)), Slot(0, (2,)), Slot(0, (3,)), Slot(1, (0,)), Slot(1, (1,)))
    assert stages(present, (*target, Slot(2, (0,)))) == (
        Stage((Slot(0, (0,)), Slot(0, (1,))), (Slot(0, (0, 1)),)),
        Stage((Slot(1, (0, 1)),), (Slot(1, (0,)), Slot(1, (1,)))),
    )


def test_a_chain_of_overlaps_is_one_stage():
    present = (Slot(0, (0, 1)), Slot(0, (2, 3)))
    target = (Slot(0, (0,)), Slot(0, (1, 2)), Slot(0, (3,)))
    assert stages(present, target) == (Stage(present, target),)


@st.composite
def layouts(draw):
    """Any disjoint instances on two nodes of four GPUs, not all of them in use."""
    slots = []
    for node in range(2):
        gpus = draw(st.permutations(range(4)))
        while gpus:
            size = draw(st.integers(1, len(gpus)))
            if draw(st.booleans()):
                slots.append(Slot(node, tuple(sorted(gpus[:size]))))
            gpus = gpus[size:]
    return tuple(sorted(slots))


def overlap(one, other):
    return one.node == other.node and set(one.gpus) & set(other.gpus)


@given(layouts(), layouts())
def test_stages_cover_the_change_are_disjoint_and_connected(present, target):
    plan = stages(present, target)
    stopped = [slot for stage in plan for slot in stage.stop]
    started = [slot for stage in plan for slot in stage.start]
    assert sorted(stopped) == sorted(set(present) - set(target))
    assert sorted(started) == sorted(set(target) - set(present))
    for stage in plan:
        group = {*stage.stop, *stage.start}
        for other in plan:
            if other is not stage:
                assert not any(overlap(a, b) for a in group for b in (*other.stop, *other.start))
        reached = {min(group)}
        while grown := {s for s in group - reached if any(overlap(s, r) for r in reached)}:
            reached |= grown
        assert reached == group
    assert stages(tuple(reversed(present)), tuple(reversed(target))) == plan

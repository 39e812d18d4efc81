"""Phases of requests, instances and slots: what may follow what."""

from enum import Enum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepserve.control.ledger import InstanceState, RequestState
from stepserve.control.lifecycle import (
    INSTANCE,
    REQUEST,
    SLOT,
    InstanceStep,
    LifecycleError,
    RequestPhase,
    RequestStep,
    SlotPhase,
    SlotStep,
    after,
)
from stepserve.core.instance import InstanceSpec
from stepserve.core.request import Progress
from stepserve.core.status import InstancePhase
from support.scripted_cluster import request

TABLES = {
    "request": (REQUEST, RequestPhase, RequestStep, RequestPhase.OVER),
    "instance": (INSTANCE, InstancePhase, InstanceStep, InstancePhase.STOPPING),
    "slot": (SLOT, SlotPhase, SlotStep, SlotPhase.DONE),
}


@pytest.mark.parametrize("name", TABLES)
def test_every_phase_can_be_reached_and_leads_to_the_end(name):
    table, phases, _, end = TABLES[name]
    follows = {phase: {to for (at, _), to in table.items() if at is phase} for phase in phases}
    reaches = {end}
    for _ in phases:
        reaches |= {phase for phase, to in follows.items() if to & reaches}
    assert reaches == set(phases), "no phase is a dead end"
    entered = set(table.values())
    starts = [phase for phase in phases if phase not in entered]
    assert set(phases) == entered | set(starts)
    assert not [at for at, _ in table if at is end and name != "instance"], "nothing follows it"


@pytest.mark.parametrize("name", TABLES)
def test_each_step_leads_somewhere(name):
    table, _, steps, _ = TABLES[name]
    assert {step for _, step in table} == set(steps)


@given(st.lists(st.sampled_from(list(RequestStep)), max_size=30))
def test_whatever_happens_a_request_is_in_the_phase_of_the_table_or_raises(steps):
    state = RequestState(request("r"), Progress())
    for step in steps:
        before = state.phase
        if (before, step) in REQUEST:
            state.move(step)
            assert state.phase is REQUEST[before, step]
        else:
            with pytest.raises(LifecycleError, match="r cannot"):
                state.move(step)
            assert state.phase is before, "what is refused changes nothing"


def test_an_instance_drains_before_it_stops_and_stops_once():
    instance = InstanceState(InstanceSpec("i0", 1, 8, 16, 4), 0.0, 8)
    with pytest.raises(LifecycleError, match="i0 cannot stop while it is up"):
        instance.move(InstanceStep.STOP)
    instance.move(InstanceStep.DRAIN)
    instance.move(InstanceStep.STOP)
    instance.move(InstanceStep.DRAIN)
    assert instance.phase is InstancePhase.STOPPING
    with pytest.raises(LifecycleError):
        instance.move(InstanceStep.STOP)


def test_an_error_says_what_was_tried():
    class Light(Enum):
        RED = "red"

    with pytest.raises(LifecycleError, match="the lamp cannot start while it is red"):
        after({}, Light.RED, SlotStep.START, "the lamp")

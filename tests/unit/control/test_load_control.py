"""Threshold caps: who is asked about, who is told, and where a newcomer starts (DiLaServe B6)."""

import pytest

from stepserve.control.reconfigure import _drain
from stepserve.core.events import CapsSet, InstanceUp, SegmentPlaced
from support.scripted_cluster import ScriptedCluster, sent, slot_spec
from support.told_caps import ToldCaps

ONE, TWO = slot_spec(0), slot_spec(1)


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch):
    monkeypatch.setattr(ToldCaps, "levels", {})
    monkeypatch.setattr(ToldCaps, "asked", [])


def cluster(*specs, **config):
    """Candidates of every request are 0.9, 0.7 and 0.5; caps are worked out once a second."""
    caps = {"load_control": "support.told_caps:ToldCaps", "caps_every_s": 1.0}
    return ScriptedCluster(*specs, thresholds=(0.9, 0.7, 0.5), **caps, **config)


def cap_of_a_newcomer(levels):
    """Requests arrive, get caps of these levels, and half a second later comes one more."""
    ToldCaps.levels = {f"r{index}": level for index, level in enumerate(levels)}
    world = cluster(ONE)
    for index in range(len(levels)):
        world.arrive(f"r{index}")
    world.now_s += 1.0
    world.report(ONE.id)
    world.now_s += 0.5
    ((_, placed),) = sent(world.arrive("new"), SegmentPlaced)
    return placed.cap


@pytest.mark.parametrize(
    ("levels", "cap"),
    [
        ((0, 0), 1.0),  # none
        ((0, 1), 0.7),
        ((1, 2), 0.7),  # whoever is at the floor may be infeasible: no measure
        ((0, 2), 1.0),
        ((2, 2), 0.5),  # unless everybody is there
    ],
)
def test_a_newcomer_starts_at_the_lowest_cap_above_the_floor(levels, cap):
    assert cap_of_a_newcomer(levels) == cap


def test_who_has_a_new_cap_is_told_once():
    world = cluster(ONE)
    world.arrive("a")
    world.arrive("b")
    world.now_s, ToldCaps.levels = 1.0, {"a": 1}
    ((to, told),) = sent(world.arrive("c"), CapsSet)
    assert (to, told.caps[0]) == (ONE.id, ("a", 0.7))
    assert not sent(world.report(ONE.id), CapsSet)


def test_caps_are_for_the_instances_that_stay():
    world = cluster(ONE, TWO)
    _drain(world.scheduler.ledger.instances[ONE.id], world.scheduler.ledger)
    world.now_s = 1.0
    world.arrive("a")
    assert ToldCaps.asked[-1] == (["a"], [TWO.id])


def test_infeasible_requests_that_leave_their_place_are_not_asked_about():
    world = cluster(infeasible="preempt")
    world.arrive("hopeless", e2e_s=1e-6)
    world.arrive("feasible")
    world.now_s = 1.0
    world.tell(InstanceUp(ONE))
    world.now_s = 2.0
    world.arrive("new")
    names, _ = ToldCaps.asked[-1]
    assert "hopeless" not in names
    assert {"feasible", "new"} <= set(names)

"""Carrying out a plan: drain, stop, form anew; stage by stage; whatever is lost meanwhile."""

from stepserve.control.global_scheduler import MAX_LOSSES
from stepserve.core.actions import Rebuild, SolvePlan, Stop
from stepserve.core.events import (
    InstanceLost,
    InstanceStopped,
    InstanceUp,
    PlanSolved,
    SegmentEnded,
    SegmentPlaced,
    SegmentReleased,
)
from stepserve.core.plan import ClusterPlan, Slot
from stepserve.core.request import Progress
from stepserve.core.segment import ReleasePoint, SegmentEnd
from stepserve.core.status import InstancePhase
from support.scripted_cluster import ScriptedCluster, sent, slot_spec

SPECS = [slot_spec(i) for i in range(4)]
PAIR, OTHER_PAIR = slot_spec(0, 1), slot_spec(2, 3)


def cluster():
    return ScriptedCluster(*SPECS, planner="greedy", plan_every_s=10.0)


def plan(*specs):
    return PlanSolved(ClusterPlan(tuple(s.slot for s in specs), 0.9, 0.1, "scripted"))


def of(actions, kind):
    return [a for a in actions if isinstance(a, kind)]


def test_a_plan_is_asked_for_once_a_period_on_what_arrived():
    c = cluster()
    assert not of(c.arrive("early"), SolvePlan)
    c.now_s = 10.0
    (asked,) = of(c.arrive("late"), SolvePlan)
    (row,) = asked.problem.classes
    assert (row.prompt_tokens, row.output_tokens, row.slo_s) == (256, 256, 9.0)
    assert row.rate_per_s == 1.5 * 1 / 10.0, "headroom of DiLaServe B8"
    assert asked.problem.present == tuple(s.slot for s in SPECS)
    c.now_s = 25.0
    assert not of(c.arrive("while it is solved"), SolvePlan)
    (again,) = c.tell(plan(*SPECS))
    assert isinstance(again, SolvePlan), "the same layout: nothing to do but to ask again"


def test_deadlines_that_have_passed_are_not_planned_for():
    c = cluster()
    c.arrive("early")
    for index in range(5):
        c.arrive(f"late{index}", e2e_s=-1e9)
    c.now_s = 10.0
    (asked,) = of(c.arrive("late"), SolvePlan)
    (row,) = asked.problem.classes
    assert (row.slo_s, row.rate_per_s) == (9.0, 1.5 * 1 / 10.0)


def test_a_plan_that_comes_while_another_is_carried_out_is_dropped():
    """The operator's overtakes the planner's: that was made for a layout that is going."""
    c = cluster()
    c.now_s = 20.0
    c.tell(plan(PAIR, SPECS[2], SPECS[3]))
    assert not of(c.tell(plan(*SPECS)), Rebuild)
    c.tell(InstanceStopped(SPECS[0]))
    (start,) = of(c.tell(InstanceStopped(SPECS[1])), Rebuild)
    c.tell(InstanceUp(start.spec))
    assert not c.scheduler.reconfiguration.under_way
    assert c.scheduler.reconfiguration.changes == 1


def test_stages_run_one_after_another_and_a_start_waits_for_its_gpus():
    c = cluster()
    actions = c.tell(plan(PAIR, OTHER_PAIR))
    assert [a.spec.id for a in of(actions, Stop)] == [SPECS[0].id, SPECS[1].id]
    assert not c.tell(InstanceStopped(SPECS[0]))
    (start,) = of(c.tell(InstanceStopped(SPECS[1])), Rebuild)
    assert (start.spec.slot, start.spec.tp_degree) == (Slot(0, (0, 1)), 2)
    assert start.spec.page_capacity == 2 * SPECS[0].page_capacity
    actions = c.tell(InstanceUp(start.spec))
    assert [a.spec.id for a in of(actions, Stop)] == [SPECS[2].id, SPECS[3].id]
    c.tell(InstanceStopped(SPECS[2]))
    (start,) = of(c.tell(InstanceStopped(SPECS[3])), Rebuild)
    c.tell(InstanceUp(start.spec))
    assert set(c.scheduler.ledger.instances) == {PAIR.id, OTHER_PAIR.id}


def test_a_draining_instance_takes_no_work_and_stops_when_it_is_empty():
    c = cluster()
    c.arrive("r")
    segment = c.segments()["r"]
    actions = c.tell(plan(PAIR, SPECS[2], SPECS[3]))
    ((to, release),) = sent(actions, SegmentReleased)
    assert (to, release.at) == (segment.instance, ReleasePoint.CUT)
    assert segment.instance not in [a.spec.id for a in of(actions, Stop)]
    for index in range(6):
        c.arrive(f"new{index}")
    drained = {SPECS[0].id, SPECS[1].id}
    assert not drained & {s.instance for r, s in c.segments().items() if r != "r"}
    actions = c.tell(SegmentEnded(segment, SegmentEnd.RELEASED, Progress(36, 16, 5)))
    ((to, _),) = sent(actions, SegmentPlaced)
    assert to not in drained
    assert [a.spec.id for a in of(actions, Stop)] == [segment.instance]


def test_an_instance_lost_while_it_drains_counts_as_stopped():
    c = cluster()
    c.tell(plan(PAIR, SPECS[2], SPECS[3]))
    assert not of(c.tell(InstanceLost(SPECS[0], ())), Rebuild)
    (start,) = of(c.tell(InstanceStopped(SPECS[1])), Rebuild)
    assert start.spec.slot == PAIR.slot


def test_a_new_instance_that_fails_to_come_up_is_tried_again():
    c = cluster()
    c.tell(plan(PAIR, SPECS[2], SPECS[3]))
    c.tell(InstanceStopped(SPECS[0]))
    (start,) = of(c.tell(InstanceStopped(SPECS[1])), Rebuild)
    (again,) = of(c.tell(InstanceLost(start.spec, ())), Rebuild)
    assert again.spec == start.spec
    c.tell(InstanceUp(again.spec))
    assert PAIR.id in c.scheduler.ledger.instances


def test_a_new_instance_that_never_comes_up_gives_its_gpus_back():
    c = cluster()
    c.tell(plan(PAIR, OTHER_PAIR))
    c.tell(InstanceStopped(SPECS[0]))
    (start,) = of(c.tell(InstanceStopped(SPECS[1])), Rebuild)
    asked = []
    for _ in range(MAX_LOSSES + 1):
        asked += [a.spec.id for a in of(c.tell(InstanceLost(start.spec, ())), Rebuild)]
    assert set(asked[:-2]) == {PAIR.id}
    assert set(asked[-2:]) == {SPECS[0].id, SPECS[1].id}, "what was there before"
    for spec in SPECS[:2]:
        c.tell(InstanceUp(spec))
    assert set(c.scheduler.ledger.instances) == {s.id for s in SPECS}, "and no later stage"


def test_an_instance_lost_before_its_stage_is_not_formed_again():
    c = cluster()
    c.tell(plan(PAIR, OTHER_PAIR))
    assert not of(c.tell(InstanceLost(SPECS[3], ())), Rebuild)
    c.tell(InstanceStopped(SPECS[0]))
    (start,) = of(c.tell(InstanceStopped(SPECS[1])), Rebuild)
    actions = c.tell(InstanceUp(start.spec))
    assert [a.spec.id for a in of(actions, Stop)] == [SPECS[2].id]
    assert of(c.tell(InstanceStopped(SPECS[2])), Rebuild)


def test_a_stage_whose_instances_are_all_lost_is_passed_over():
    c = cluster()
    c.tell(plan(PAIR, OTHER_PAIR))
    for spec in SPECS[2:]:
        assert not of(c.tell(InstanceLost(spec, ())), Rebuild)
    c.tell(InstanceStopped(SPECS[0]))
    (start,) = of(c.tell(InstanceStopped(SPECS[1])), Rebuild)
    (other,) = of(c.tell(InstanceUp(start.spec)), Rebuild)
    assert other.spec.slot == OTHER_PAIR.slot
    c.tell(InstanceUp(other.spec))
    assert not c.scheduler.reconfiguration.under_way


def test_a_plan_that_leaves_a_request_without_a_place_is_dropped():
    big = slot_spec(0, 1)
    c = ScriptedCluster(big, slot_spec(2), planner="greedy", plan_every_s=10.0)
    c.arrive("large", prompt=1000 * 16)
    assert not c.tell(plan(slot_spec(0), slot_spec(1), slot_spec(2)))


def test_requests_with_other_candidates_count_for_the_plan():
    c = cluster()
    c.arrive("first")
    c.now_s = 10.0
    c.arrive("floor", floor=0.6)
    c.tell(plan(*SPECS))
    c.now_s = 20.0
    (asked,) = of(c.arrive("late"), SolvePlan)
    assert len(asked.problem.tokens_per_step) == len(asked.problem.thresholds)


def test_a_cluster_seen_in_part_is_not_planned_for():
    c = ScriptedCluster(slot_spec(0), slot_spec(0, node=2), planner="greedy", plan_every_s=10.0)
    c.arrive("r")
    c.now_s = 10.0
    assert not of(c.arrive("s"), SolvePlan)


def test_a_plan_for_gpus_nobody_has_seen_is_dropped():
    c = cluster()
    assert not c.tell(plan(slot_spec(0, 1, node=7)))
    assert not any(i.phase is not InstancePhase.UP for i in c.scheduler.status().instances)

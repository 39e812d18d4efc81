"""A global scheduler that follows another: what it finds, whom it believes, what it starts."""

import pytest

from stepserve.core.actions import Finish, Rebuild
from stepserve.core.events import (
    InstanceFound,
    InstanceLost,
    InstanceReported,
    InstanceStopped,
    InstanceUp,
    OpenRequest,
    PlanSolved,
    RequestArrived,
    RequestCancelled,
    SchedulerStarted,
    SegmentEnded,
    SegmentPlaced,
    SegmentReleased,
    StateAsked,
)
from stepserve.core.forecast import StepForecast
from stepserve.core.ids import RequestId
from stepserve.core.instance import HeldSegment
from stepserve.core.plan import ClusterPlan
from stepserve.core.request import FinishReason, Progress
from stepserve.core.segment import Segment, SegmentEnd
from support.scripted_cluster import ScriptedCluster, request, sent, slot_spec

A, B, PAIR = slot_spec(0), slot_spec(1), slot_spec(0, 1)
HALFWAY = Progress(settled=44, emitted=20, steps=9)
FORECAST = StepForecast((0.9, 0.5), (9.0, 3.0), 48.0, 9)


def held(name, spec, *, epoch=3, progress=HALFWAY, leaving=False, cap=0.7):
    segment = Segment(RequestId(name), 0, 20, None, spec.id, epoch)
    return HeldSegment(request(name), segment, progress, FORECAST, cap, True, leaving)


def opened(*names, progress=None, epoch=3):
    return tuple(OpenRequest(request(name), progress, epoch) for name in names)


def started(*requests, instances=(A, B), number=1, **options):
    return SchedulerStarted(number, (A, B), requests, instances, **options)


def found(spec, *segments, number=1):
    return InstanceFound(number, spec, segments)


def of(actions, kind):
    return [action for action in actions if isinstance(action, kind)]


def test_the_first_scheduler_starts_what_a_cluster_begins_with():
    c = ScriptedCluster()
    actions = c.tell(SchedulerStarted(0, (A, B)))
    assert [(a.spec, a.after_s) for a in actions] == [(A, 0.0), (B, 0.0)]
    assert not c.scheduler.recovering


def test_requests_stay_where_they_are_found():
    c = ScriptedCluster(load_control="none")
    asked = sent(c.tell(started(*opened("a", "b"))), StateAsked)
    assert asked == [(A.id, StateAsked(1)), (B.id, StateAsked(1))]
    assert not c.tell(found(A, held("a", A)))
    assert c.scheduler.recovering
    placed = sent(c.tell(found(B)), SegmentPlaced)
    assert [(to, event.segment.epoch) for to, event in placed] == [(B.id, 4)], "b, held by nobody"
    tracked = c.scheduler.ledger.requests["a"]
    assert tracked.segment == held("a", A).segment
    assert (tracked.cap, tracked.progress) == (0.7, HALFWAY)
    assert c.scheduler.ledger.instances[A.id].resident_tokens == 68


def test_what_happens_meanwhile_is_handled_afterwards_in_order():
    c = ScriptedCluster()
    c.tell(started(*opened("a", "b")))
    assert not c.tell(RequestArrived(request("new")))
    assert not c.tell(RequestCancelled(RequestId("a"), FinishReason.CANCELLED))
    assert not c.tell(found(A, held("a", A), held("b", A)))
    ended = SegmentEnded(held("b", A).segment, SegmentEnd.FINISHED, HALFWAY)
    assert not c.tell(ended), "it was there when it was asked"
    actions = c.tell(found(B))
    assert [e.segment.request_id for _, e in sent(actions, SegmentPlaced)] == ["new"]
    assert sent(actions, SegmentReleased)[0][1].request_id == "a"
    assert [a.request_id for a in of(actions, Finish)] == ["b"]


def test_an_end_that_came_before_the_answer_counts():
    c = ScriptedCluster()
    c.tell(started(*opened("done", "failed", "moved")))
    for name, end in zip(("done", "failed", "moved"), ("FINISHED", "FAILED", "RELEASED"), strict=1):
        error = "its own fault" if end == "FAILED" else None
        c.tell(SegmentEnded(held(name, A).segment, SegmentEnd[end], HALFWAY, error))
    c.tell(InstanceReported(A.id, 0.0))
    c.tell(found(B))
    actions = c.tell(found(A))
    assert [(a.request_id, a.reason) for a in of(actions, Finish)] == [
        ("done", FinishReason.STOP),
        ("failed", FinishReason.ERROR),
    ]
    assert of(actions, Finish)[1].error == "its own fault"
    ((_, again),) = sent(actions, SegmentPlaced)
    assert (again.segment.request_id, again.progress) == ("moved", HALFWAY)


def test_a_lost_instance_is_not_waited_for():
    reached = HALFWAY._replace(emitted=30)
    c = ScriptedCluster()
    c.tell(started(*opened("a", "b", progress=HALFWAY)))
    c.tell(found(A, held("a", A)))
    assert of(c.tell(InstanceLost(A, ((RequestId("a"), reached),))), Rebuild)
    placed = sent(c.tell(found(B)), SegmentPlaced)
    assert {e.request.id: e.progress for _, e in placed} == {"a": reached, "b": HALFWAY}


def test_segments_of_nobody_are_taken_back_and_their_room_is_taken_until_then():
    c = ScriptedCluster()
    c.tell(started())
    c.tell(found(A, held("over", A)))
    actions = c.tell(found(B))
    assert [(to, e.request_id) for to, e in sent(actions, SegmentReleased)] == [(A.id, "over")]
    pages = c.scheduler.ledger.instances[A.id].pages
    assert pages.free < pages.capacity
    c.tell(SegmentEnded(held("over", A).segment, SegmentEnd.RELEASED, HALFWAY))
    assert pages.free == pages.capacity


def test_answers_to_an_earlier_scheduler_are_old_news():
    c = ScriptedCluster()
    c.tell(started(*opened("a"), number=2))
    assert not c.tell(found(A, number=1))
    assert c.scheduler.recovering
    c.tell(found(A, held("a", A), number=2))
    c.tell(found(B, number=2))
    assert c.scheduler.ledger.requests["a"].segment.instance == A.id
    assert not c.tell(found(A, number=1))


def test_one_who_was_asked_to_leave_does_and_is_placed_anew():
    c = ScriptedCluster()
    c.tell(started(*opened("a")))
    c.tell(found(A, held("a", A, leaving=True)))
    c.tell(found(B))
    assert c.scheduler.ledger.requests["a"].cutting
    actions = c.tell(SegmentEnded(held("a", A).segment, SegmentEnd.RELEASED, HALFWAY))
    assert sent(actions, SegmentPlaced)


@pytest.mark.parametrize(
    ("instances", "starting", "expected"),
    [((A,), (), [B]), ((A,), (B,), []), ((PAIR,), (), []), ((), (PAIR,), []), ((), (), [A, B])],
)
def test_instances_of_the_start_come_back_where_nothing_is(instances, starting, expected):
    c = ScriptedCluster()
    actions = c.tell(started(instances=instances, starting=starting))
    for spec in instances:
        actions += c.tell(found(spec))
    assert [a.spec for a in of(actions, Rebuild)] == expected


def test_gpus_of_instances_that_start_are_taken():
    c = ScriptedCluster(planner="greedy")
    c.tell(SchedulerStarted(0, (A, B)))
    c.tell(InstanceUp(A))
    alone = PlanSolved(ClusterPlan((PAIR.slot,), 0.9, 0.1, "scripted"))
    assert not c.tell(alone)
    c.tell(InstanceUp(B))
    assert c.tell(alone)


def test_an_instance_stopped_for_the_scheduler_before_is_formed_anew():
    c = ScriptedCluster()
    c.tell(started())
    c.tell(found(B))
    (rebuild,) = of(c.tell(InstanceStopped(A)), Rebuild)
    assert rebuild.spec == A
    assert not c.scheduler.recovering

"""A global scheduler that follows another: what it finds, whom it believes, what it starts."""

import pytest

from stepserve.control.global_scheduler import MAX_LOSSES
from stepserve.control.ledger import Ledger
from stepserve.control.lifecycle import RequestPhase
from stepserve.control.recovery import Recovery
from stepserve.core.actions import Finish, Rebuild
from stepserve.core.errors import EventError
from stepserve.core.events import (
    HandedOff,
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
    SegmentExtended,
    SegmentPlaced,
    SegmentReleased,
    StateAsked,
)
from stepserve.core.forecast import StepForecast
from stepserve.core.ids import RequestId
from stepserve.core.instance import HeldSegment
from stepserve.core.plan import ClusterPlan
from stepserve.core.request import Family, FinishReason, OnMiss, Progress, Request
from stepserve.core.segment import Segment, SegmentEnd
from stepserve.families.programs.autoregressive import AutoregressiveProgram
from support.scripted_cluster import ScriptedCluster, request, sent, slot_spec

A, B, PAIR = slot_spec(0), slot_spec(1), slot_spec(0, 1)
HALFWAY = Progress(settled=44, emitted=20, steps=9)
FORECAST = StepForecast((0.9, 0.5), (9.0, 3.0), 48.0, 9)


def held(name, spec, *, epoch=3, progress=HALFWAY, leaving=False, cap=0.7):
    segment = Segment(RequestId(name), 0, 20, None, spec.id, epoch)
    return HeldSegment(request(name), segment, progress, FORECAST, cap, True, leaving)


def opened(*names, progress=None, epoch=3):
    return tuple(OpenRequest(request(name), progress, epoch) for name in names)


def causal(name="r", *, prompt=30):
    return Request(RequestId(name), Family.AUTOREGRESSIVE, "m", prompt, 20, 0.0)


def part(spec, start, stop, epoch, *, begun, emitted=0, leaving=False):
    segment = Segment(RequestId("r"), 0, start, stop, spec.id, epoch)
    progress = Progress(start, emitted)
    forecast = StepForecast((1.0,), (20.0,), 20.0, 0)
    return HeldSegment(causal(), segment, progress, forecast, 1.0, begun, leaving)


FIRST, SECOND = part(A, 0, 12, 1, begun=True), part(B, 12, None, 2, begun=False)
WHOLE = part(A, 0, None, 1, begun=True)


@pytest.mark.parametrize(
    ("rows", "reached", "runs", "sent_to"),
    [
        ([FIRST, SECOND], 0, 1, {}),
        ([FIRST], 0, 1, {A.id: SegmentExtended}),  # its successor is lost
        ([FIRST], 3, None, {A.id: SegmentReleased}),  # ... and had begun: more is known
        ([SECOND], 0, 2, {B.id: HandedOff}),  # its predecessor is lost
        ([part(B, 12, None, 2, begun=True)], 2, 2, {}),
        # Plans that ended: what runs goes on, what waits for nobody is taken back.
        ([WHOLE, SECOND], 0, 1, {B.id: SegmentReleased}),
        (
            [part(A, 0, None, 1, begun=True), part(B, 9, None, 4, begun=True)],
            0,
            4,
            {A.id: SegmentReleased},
        ),
    ],
)
def test_what_is_found_of_a_request_that_was_cut(rows, reached, runs, sent_to):
    program = AutoregressiveProgram(8)
    ledger = Ledger(program)
    recovery = Recovery(
        SchedulerStarted(1, (), (OpenRequest(causal(), Progress(0, reached), 2),), (A, B))
    )
    for spec in (A, B):
        ledger.add_instance(spec, 0.0)
        assert not recovery.keeps(found(spec, *(r for r in rows if r.segment.instance == spec.id)))
    actions = recovery.enter(ledger, program)
    segment = ledger.requests["r"].segment
    assert (segment and segment.epoch) == runs
    assert {a.to: type(a.event) for a in actions} == sent_to


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
    assert not c.scheduler.status().recovering


def test_requests_stay_where_they_are_found():
    c = ScriptedCluster(load_control="none")
    asked = sent(c.tell(started(*opened("a", "b"))), StateAsked)
    assert asked == [(A.id, StateAsked(1)), (B.id, StateAsked(1))]
    assert not c.tell(found(A, held("a", A)))
    assert c.scheduler.status().recovering
    placed = sent(c.tell(found(B)), SegmentPlaced)
    assert [(to, event.segment.epoch) for to, event in placed] == [(B.id, 4)], "b, held by nobody"
    state = c.scheduler.ledger.requests["a"]
    assert state.segment == held("a", A).segment
    assert (state.cap, state.progress) == (0.7, HALFWAY)
    assert c.scheduler.ledger.instances[A.id].running_tokens == 68


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
    instance = c.scheduler.ledger.instances[A.id]
    assert instance.free_pages < instance.spec.page_capacity
    c.tell(SegmentEnded(held("over", A).segment, SegmentEnd.RELEASED, HALFWAY))
    assert instance.free_pages == instance.spec.page_capacity


def test_answers_to_an_earlier_scheduler_are_old_news():
    c = ScriptedCluster()
    c.tell(started(*opened("a"), number=2))
    assert not c.tell(found(A, number=1))
    assert c.scheduler.status().recovering
    c.tell(found(A, held("a", A), number=2))
    c.tell(found(B, number=2))
    assert c.scheduler.ledger.requests["a"].segment.instance == A.id
    assert not c.tell(found(A, number=1))


def test_one_who_was_asked_to_leave_does_and_is_placed_anew():
    c = ScriptedCluster()
    c.tell(started(*opened("a")))
    c.tell(found(A, held("a", A, leaving=True)))
    c.tell(found(B))
    assert c.scheduler.ledger.requests["a"].phase is RequestPhase.LEAVING
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
    assert not c.scheduler.status().recovering


def test_a_change_whose_instance_cannot_be_formed_is_given_up_by_the_next_scheduler_too():
    c = ScriptedCluster()
    c.tell(started(instances=(), starting=(PAIR,)))
    for _ in range(MAX_LOSSES):
        assert of(c.tell(InstanceLost(PAIR, ())), Rebuild)
    actions = c.tell(InstanceLost(PAIR, ()))
    assert [a.spec for a in of(actions, Rebuild)] == [A, B]


def test_accepted_requests_are_not_refused_by_the_next_scheduler():
    c = ScriptedCluster(now_s=9.99)
    late = OpenRequest(request("late", on_miss=OnMiss.REJECT), None, 0)
    c.tell(started(late))
    c.tell(found(A))
    assert sent(c.tell(found(B)), SegmentPlaced)


def test_an_event_that_waited_is_named_if_it_is_failed_on(monkeypatch):
    c = ScriptedCluster()
    c.tell(started(*opened("a")))
    cancelled = RequestCancelled(RequestId("a"), FinishReason.CANCELLED)
    c.tell(cancelled)
    c.tell(found(A))
    monkeypatch.setattr(c.scheduler, "_cancel", None)  # a mistake
    with pytest.raises(EventError) as error:
        c.tell(found(B))
    assert error.value.event == cancelled

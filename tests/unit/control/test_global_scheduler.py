"""Event sequences that random worlds would seldom hit, one by one."""

from stepserve.control.global_scheduler import MAX_LOSSES
from stepserve.core.actions import Finish, Rebuild, Reject, Send
from stepserve.core.events import (
    InstanceLost,
    InstanceReported,
    InstanceUp,
    RequestArrived,
    RequestCancelled,
    SegmentEnded,
    SegmentPlaced,
    SegmentReleased,
)
from stepserve.core.ids import InstanceId
from stepserve.core.request import CacheMode, FinishReason, OnMiss, Progress, Refusal
from stepserve.core.segment import ReleasePoint, SegmentEnd
from support.scripted_cluster import ScriptedCluster
from support.toy_world import PROFILE, make_request, make_spec


class Cluster(ScriptedCluster):
    """Arrivals with every option of a toy request."""

    profile = PROFILE

    def arrive(self, name, **options):
        return self.tell(RequestArrived(make_request(name, arrival_s=self.now_s, **options)))


def placed(actions):
    return [
        a.event.segment
        for a in actions
        if isinstance(a, Send) and isinstance(a.event, SegmentPlaced)
    ]


def ended(segment, progress=None, end=SegmentEnd.FINISHED):
    finished = Progress(settled=60, emitted=40, steps=9, finished=FinishReason.STOP)
    return SegmentEnded(segment, end, progress or finished)


def test_messages_of_an_older_epoch_change_nothing():
    """An instance that was given up comes back and says it finished the request."""
    one, two = make_spec("i0"), make_spec("i1")
    cluster = Cluster(one)
    (first,) = placed(cluster.arrive("r"))
    cluster.tell(InstanceUp(two))
    (second,) = placed(cluster.tell(InstanceLost(one, (("r", Progress(settled=30, steps=4)),))))
    assert (first.epoch, second.epoch) == (1, 2)
    assert (second.instance, second.start) == ("i1", 30)
    assert cluster.tell(ended(first)) == []
    (finish,) = cluster.tell(ended(second))
    assert finish.reason is FinishReason.STOP
    assert cluster.tell(ended(second)) == [], "answered once"


def test_a_cancelled_request_whose_instance_is_lost_is_not_placed_again():
    cluster = Cluster(make_spec("i0"), make_spec("i1"))
    (segment,) = placed(cluster.arrive("r"))
    (release,) = cluster.tell(RequestCancelled("r", FinishReason.CANCELLED))
    assert release.event == SegmentReleased("r", 1, ReleasePoint.STEP)
    spec = make_spec(segment.instance)
    actions = cluster.tell(InstanceLost(spec, (("r", Progress(settled=25)),)))
    assert [type(a) for a in actions] == [Rebuild, Finish]
    assert actions[1].reason is FinishReason.CANCELLED


def test_cancelling_the_head_of_the_queue_lets_the_next_one_in():
    """8 pages are free of 16: the head needs 12, the one behind it 7."""
    cluster = Cluster(make_spec("i0", pages=16))
    cluster.arrive("running", prompt=80, output=48)
    assert placed(cluster.arrive("head", prompt=144, output=48)) == []
    assert placed(cluster.arrive("next", prompt=64, output=48)) == []
    actions = cluster.tell(RequestCancelled("head", FinishReason.CANCELLED))
    assert isinstance(actions[0], Finish)
    assert [s.request_id for s in placed(actions)] == ["next"]


def test_a_request_that_loses_every_instance_is_given_up():
    """It may be what kills them; its neighbours must not pay for ever."""
    spec = make_spec("i0")
    cluster = Cluster(spec)
    cluster.arrive("poison")
    delays = []
    for _ in range(MAX_LOSSES):
        actions = cluster.tell(InstanceLost(spec, (("poison", Progress(settled=20)),)))
        delays.append(actions[0].after_s)
        cluster.tell(InstanceUp(spec))
    assert delays == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0]
    assert isinstance(actions[-1], Finish)
    assert "6 losses" in actions[-1].error
    assert not cluster.scheduler.ledger.requests


def test_a_batch_that_succeeds_forgives_earlier_losses():
    spec = make_spec("i0")
    cluster = Cluster(spec)
    cluster.tell(InstanceLost(spec, ()))
    cluster.tell(InstanceUp(spec))
    cluster.tell(InstanceReported(spec.id, 1.0, (64, 2, 0.01)))
    (rebuild,) = cluster.tell(InstanceLost(spec, ()))
    assert rebuild.after_s == 0.0


def test_an_instance_lost_before_it_came_up_is_rebuilt():
    cluster = Cluster()
    (rebuild,) = cluster.tell(InstanceLost(make_spec("i0"), ()))
    assert isinstance(rebuild, Rebuild)


def test_a_request_too_large_for_every_instance_does_not_block_the_queue():
    cluster = Cluster()
    cluster.arrive("huge", prompt=4000, output=48)
    cluster.arrive("small")
    actions = cluster.tell(InstanceUp(make_spec("i0", pages=16)))
    assert isinstance(actions[0], Finish)
    assert actions[0].reason is FinishReason.ERROR
    assert [s.request_id for s in placed(actions)] == ["small"]


def test_a_lost_deadline_makes_way_for_one_that_can_be_met():
    cluster = Cluster(make_spec("i0", running_requests=1))
    (segment,) = placed(cluster.arrive("running"))
    cluster.arrive("late", e2e_s=1.0)
    cluster.arrive("in time", e2e_s=9.0)
    cluster.now_s = 2.0
    send = cluster.tell(ended(segment))[1]
    assert send.event.request.id == "in time"
    (_, send) = cluster.tell(ended(send.event.segment))
    assert send.event.request.id == "late"


def test_predicted_losses_go_last_in_the_order_of_their_arrival():
    """16 to 20 steps of 3 ms or more take 0.1 s at least; sooner is out of reach already."""
    cluster = Cluster(make_spec("i0", running_requests=1), infeasible="preempt")
    (segment,) = placed(cluster.arrive("running"))
    cluster.arrive("lost", e2e_s=0.01)
    cluster.now_s = 0.001
    cluster.arrive("lost too", e2e_s=0.005)
    cluster.arrive("in time", e2e_s=9.0)
    order = []
    while len(order) < 3:
        (segment,) = placed(cluster.tell(ended(segment)))
        order.append(segment.request_id)
    assert order == ["in time", "lost", "lost too"]


def test_an_infeasible_request_is_preempted_for_one_in_time_and_comes_back():
    cluster = Cluster(make_spec("i0", running_requests=2), infeasible="preempt")
    (lost,) = placed(cluster.arrive("lost", e2e_s=1.0))
    (other,) = placed(cluster.arrive("undated"))
    cluster.now_s = 0.99
    assert cluster.report("i0") == [], "nobody waits"
    assert placed(cluster.arrive("in time", e2e_s=9.0)) == []
    (release,) = cluster.report("i0")
    assert release.event == SegmentReleased("lost", lost.epoch, ReleasePoint.CUT)
    assert cluster.report("i0") == [], "asked once"
    left = Progress(settled=36, emitted=16, steps=5)
    (segment,) = placed(cluster.tell(ended(lost, left, SegmentEnd.RELEASED)))
    assert segment.request_id == "in time"
    (back,) = placed(cluster.tell(ended(other)))
    assert (back.request_id, back.start) == ("lost", 36), "nothing is lost but the deadline"


def test_who_keeps_its_threshold_is_given_up_earlier():
    """Its deadline has to leave time for the steps at 0.9; others may take those at 0.5."""
    kept_s, lowered_s = map(least_deadline_s, (OnMiss.BEST_EFFORT, OnMiss.DEGRADE))
    assert kept_s > 1.05 * lowered_s > 0.0


def least_deadline_s(on_miss):
    """The shortest deadline of a waiting request that is thought feasible."""
    low_s, high_s = 0.0, 100.0
    while high_s - low_s > 1e-3:
        middle_s = (low_s + high_s) / 2
        cluster = Cluster(make_spec("i0", running_requests=1), infeasible="preempt")
        cluster.arrive("runs")
        cluster.arrive("waits", e2e_s=middle_s, on_miss=on_miss)
        given_up = cluster.scheduler.ledger.requests["waits"].infeasible
        low_s, high_s = (middle_s, high_s) if given_up else (low_s, middle_s)
    return high_s


def test_infeasible_requests_stay_where_preemption_is_off_or_only_infeasible_ones_wait():
    for infeasible, waits in (("lowest_threshold", 9.0), ("preempt", 0.01)):
        cluster = Cluster(make_spec("i0", running_requests=1), infeasible=infeasible)
        cluster.arrive("lost", e2e_s=1.0)
        cluster.now_s = 0.99
        cluster.arrive("waits", e2e_s=waits)
        assert not [a for a in cluster.report("i0") if isinstance(a, Send)]


def test_admission_counts_only_those_who_go_first():
    cluster = Cluster(make_spec("i0", running_requests=1))
    cluster.arrive("running")
    for index in range(30):
        cluster.arrive(f"undated{index}")
    asked = {"e2e_s": 3.0, "on_miss": OnMiss.REJECT}
    assert not any(isinstance(a, Reject) for a in cluster.arrive("urgent", **asked))
    for index in range(90):
        cluster.arrive(f"dated{index}", e2e_s=2.0)
    assert any(isinstance(a, Reject) for a in cluster.arrive("hopeless", **asked))


def refused(actions):
    (reject,) = [a for a in actions if isinstance(a, Reject)]
    return reject


def test_reasons_of_refusals():
    cluster = Cluster(make_spec("i0", running_requests=1), queue_limit=40)
    asked = {"e2e_s": 3.0, "on_miss": OnMiss.REJECT}
    alone = refused(cluster.arrive("never", **asked | {"e2e_s": 0.01}))
    assert (alone.reason, alone.retry_after_s) == (Refusal.DEADLINE, None)
    assert "alone" in alone.why
    for index in range(41):
        cluster.arrive(f"r{index}", e2e_s=2.0)
    full = refused(cluster.arrive("more"))
    assert full.reason is Refusal.QUEUE_FULL
    assert 1.0 < full.retry_after_s < 60.0
    saturated = Cluster(make_spec("i0", running_requests=1))
    for index in range(91):
        saturated.arrive(f"r{index}", e2e_s=2.0)
    late = refused(saturated.arrive("late", **asked))
    assert late.reason is Refusal.SATURATED
    assert late.retry_after_s > full.retry_after_s - 3.0


def test_who_is_dropped_before_the_deadline_is_told_when_to_come_back():
    """``fcfs_drop`` counts a share of the deadline: what is left may still be enough."""
    cluster = Cluster(make_spec("i0", running_requests=1), queue="fcfs_drop", margin=0.5)
    cluster.arrive("running")
    for index in range(30):
        cluster.arrive(f"r{index}", e2e_s=10.0)
    cluster.now_s = 5.5
    actions = cluster.report("i0")
    rejects = [a for a in actions if isinstance(a, Reject)]
    assert len(rejects) == 30
    assert {a.reason for a in rejects} == {Refusal.SATURATED}
    assert all(0.1 <= a.retry_after_s <= 60.0 for a in rejects)


def test_a_place_in_the_queue_is_promised_when_its_last_one_is_done():
    cluster = Cluster(make_spec("i0", running_requests=1), queue_limit=40)
    waits = []
    for slots in (1, 4):
        cluster = Cluster(make_spec("i0", running_requests=slots), queue_limit=40)
        for index in range(40 + slots):
            assert not any(isinstance(a, Reject) for a in cluster.arrive(f"r{index}"))
        waits.append(refused(cluster.arrive("more")).retry_after_s)
    assert waits[0] > waits[1]


def test_a_placed_segment_carries_a_fresh_forecast_after_a_loss():
    spec = make_spec("i0")
    cluster = Cluster(spec)
    cluster.arrive("r", cache=CacheMode.NONE)
    cluster.tell(InstanceLost(spec, (("r", Progress(settled=38, steps=18)),)))
    (send,) = cluster.tell(InstanceUp(spec))
    assert isinstance(send.event, SegmentPlaced)
    assert send.event.forecast.at_steps == 18
    assert send.to == InstanceId("i0")

"""Hand-overs, one course of events each: no failure, and every row of the failure table.

Source: DynaServe 3.6, DynaServe 3.7, DynaServe 3.9.
"""

import pytest

from stepserve.control.handover import Inbound, Outbound
from stepserve.control.ledger import ClaimKind
from stepserve.core.actions import PushChunk, Report, StartTimer, Tell
from stepserve.core.config import ControlConfig
from stepserve.core.events import (
    BatchDone,
    ChunkLanded,
    HandedOff,
    HandoverAcknowledged,
    HandoverPrepared,
    HandoverStalled,
    InstanceReported,
    SegmentEnded,
    SegmentExtended,
    SegmentPlaced,
    SegmentReleased,
    TimerExpired,
)
from stepserve.core.ids import InstanceId
from stepserve.core.instance import InstanceSpec
from stepserve.core.request import FinishReason, Progress
from stepserve.core.segment import HandoverStage, Segment, SegmentEnd
from stepserve.core.step import StepOutcome
from stepserve.families.assemble import assemble_local
from stepserve.families.autoregressive import AUTOREGRESSIVE
from stepserve.families.programs.autoregressive import AutoregressiveProgram
from support.ar_requests import ar_request, ar_running, forecast_of
from support.handover_cluster import PAGE, HandoverCluster, KnownSeconds

CANCELLED = FinishReason.CANCELLED
LEAVING = ClaimKind.LEAVING


def placed(cut=10, **options):
    """A request of 8 and 8 tokens, from a to b."""
    cluster = HandoverCluster("a", "b")
    truth = cluster.arrive("r", cuts=(cut,), **options)
    return cluster, truth


def at_stop(cut=10, **options):
    """Its first segment is at the cut and has said so; nothing of that has arrived."""
    cluster, truth = placed(cut, **options)
    cluster.until(lambda: said(cluster, HandedOff))
    return cluster, truth


def said(cluster, kind):
    """Messages of a kind that are under way."""
    return [w for queue in cluster.links.values() for _, w in queue if isinstance(w, kind)]


def ends(cluster):
    return [(e.segment.instance, e.end) for _, e in cluster.heard(SegmentEnded)]


def rest(cluster):
    cluster.come_to_rest()
    cluster.check_rest()


# -- the sunny day


@pytest.mark.parametrize("cut", range(1, 15))
def test_wherever_it_is_cut_every_input_is_executed_and_every_token_told_once(cut):
    cluster, truth = placed(cut)
    rest(cluster)
    assert not truth.disturbed
    assert truth.executed == 8 + 8 - 1
    assert truth.handed == 1
    (_, handed), *more = cluster.heard(HandedOff)
    assert not more
    assert handed.progress.settled == cut
    assert handed.progress.emitted == max(0, cut - 8 + 1), "the token at the cut is the first's"
    assert ends(cluster) == [("a", SegmentEnd.HANDED_OFF), ("b", SegmentEnd.FINISHED)]


@pytest.mark.parametrize("cut", [15, 16, 99])
def test_a_cut_that_is_not_reached_hands_nothing_over(cut):
    cluster, truth = placed(cut)
    rest(cluster)
    assert truth.handed == 0
    assert ends(cluster)[0] == ("a", SegmentEnd.FINISHED)


def test_room_is_made_before_there_is_anything_to_be_handed_over():
    cluster, _ = placed()
    cluster.deliver_next(("predict",))
    sent = [what for queue in cluster.links.values() for _, what in queue]
    assert [(e.segment.instance, e.source) for e in sent] == [("b", "a"), ("a", None)]
    beta, alpha = sent
    assert (alpha.segment.stop, beta.segment.start, beta.segment.stop) == (10, 10, None)
    assert (alpha.segment.epoch, beta.segment.epoch) == (1, 2)
    assert (alpha.predicted_s, beta.predicted_s, beta.predicted_tbt_s) == (0.0, 1.0, 0.05)


def test_the_first_segment_reserves_up_to_its_stop_and_the_second_everything():
    cluster, _ = placed(cut=9)
    cluster.deliver()
    a, b = (cluster.local(name).pages for name in "ab")
    assert a.capacity - a.free == 3, "9 tokens in pages of 4"
    assert b.capacity - b.free == 4, "8 and 8 tokens"


def test_loads_tell_what_is_left_of_each_segment():
    cluster, _ = placed()
    cluster.deliver()
    ledger = cluster.scheduler.ledger
    a, b = (ledger.load(ledger.instances[InstanceId(name)]) for name in "ab")
    assert a.work == ((8, 0, 2.0),), "the prompt, then two decodes"
    assert b.work == ((0, 10, 5.0),), "the last token is never executed"
    cluster.until(lambda: cluster.truths["r"].emitted == 2)
    cluster.deliver()
    assert ledger.load(ledger.instances[InstanceId("a")]).work == ((0, 9, 1.0),)


def test_keys_and_values_are_pushed_in_whole_pages_while_the_first_computes():
    cluster, _ = placed(cut=14)
    rest(cluster)
    chunks = [(e.start, e.stop) for _, e in cluster.heard(ChunkLanded)]
    assert chunks == [(0, 4), (4, 8), (8, 12), (12, 14)]


def test_serially_they_are_pushed_at_the_cut():
    cluster = HandoverCluster("a", "b", push_pages=0)
    cluster.arrive("r", cuts=(14,))
    rest(cluster)
    assert [(e.start, e.stop) for _, e in cluster.heard(ChunkLanded)] == [(0, 14)]


def test_an_announced_hand_over_waits_for_the_chunks_that_it_overtook():
    cluster, _ = at_stop()
    cluster.deliver(chunks=False)
    assert "r" in cluster.local("b").inbound
    assert not cluster.heard(HandoverAcknowledged)
    cluster.deliver()
    assert cluster.local("b").running_requests["r"].progress.settled == 10
    assert not cluster.local("a").pages
    rest(cluster)
    assert not cluster.truths["r"].disturbed


def test_an_output_longer_than_foreseen_is_handed_over_as_planned():
    cluster, truth = placed(cut=10, limit=20, ends=20)
    rest(cluster)
    assert (truth.handed, truth.emitted) == (1, 20)


def test_three_segments_hand_over_twice():
    cluster = HandoverCluster("a", "b", "c")
    truth = cluster.arrive("r", cuts=(5, 11))
    rest(cluster)
    assert truth.executed == 15
    assert truth.handed == 2
    names = [name for name, _ in ends(cluster)]
    assert names == ["a", "b", "c"]


def test_a_report_of_the_third_segment_says_that_the_first_two_are_over():
    cluster = HandoverCluster("a", "b", "c")
    truth = cluster.arrive("r", cuts=(5, 11))
    late = SegmentEnded, InstanceReported
    while "r" not in cluster.local("c").running_requests:
        cluster.deliver_but(late)
        for name in "ab":
            if cluster.machines[InstanceId(name)].batch:
                cluster.run_batch(name)
    for link in cluster.waiting:
        if link[:2] == ("report", "c"):
            cluster.deliver_next(link)
    assert cluster.where("r") == "c"
    instances = cluster.scheduler.ledger.instances
    assert [bool(instances[InstanceId(name)].held(LEAVING)) for name in "abc"] == [
        True,
        True,
        False,
    ]
    rest(cluster)
    assert truth.executed == 15


def test_a_successor_that_ends_before_its_start_was_heard_of():
    cluster = HandoverCluster("a", "b", report_every_s=3600.0)
    cluster.arrive("s", order=("b", "a"))
    cluster.until(lambda: "s" not in cluster.scheduler.ledger.requests)  # b has reported
    truth = cluster.arrive("r", cuts=(10,))
    while truth.ended is None:
        cluster.deliver_but(SegmentEnded)
        for name, machine in cluster.machines.items():
            if machine.batch:
                cluster.run_batch(name)
    from_a, from_b = (next(x for x in cluster.waiting if x[:2] == ("report", n)) for n in "ab")
    assert cluster.links[from_a][0][1].end is SegmentEnd.HANDED_OFF
    assert cluster.where("r") == "a"
    cluster.deliver_next(from_b)
    assert truth.answer.reason is FinishReason.LENGTH
    ledger = cluster.scheduler.ledger
    assert ledger.instances[InstanceId("a")].held(LEAVING), "a has not said yet that it let go"
    cluster.deliver_next(from_a)
    assert not ledger.instances[InstanceId("a")].held(LEAVING)
    rest(cluster)


# -- the first segment ends early


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_an_output_that_ends_before_or_at_the_cut_ends_there(tokens):
    cluster, truth = placed(cut=10, ends=tokens)  # at the cut 3 tokens are told
    rest(cluster)
    assert truth.answer.reason is FinishReason.STOP
    assert ends(cluster) == [("a", SegmentEnd.FINISHED), ("b", SegmentEnd.RELEASED)]
    assert not cluster.heard(HandedOff)


# -- clients leave


@pytest.mark.parametrize("messages", range(14))
def test_a_client_that_leaves_at_any_stage_leaves_nothing_behind(messages):
    cluster, truth = placed()
    for _ in range(messages):
        links = [link for link in cluster.waiting if link[0] != "chunk"]
        if links:
            cluster.deliver_next(links[0])
        else:
            cluster.run_batch("a")
    cluster.cancel("r")
    cluster.deliver()
    cluster.check()
    if cluster.machines[InstanceId("a")].batch:
        cluster.run_batch("a")
    cluster.deliver()
    assert truth.answer.reason is CANCELLED
    for name in "ab":
        assert not cluster.local(name).pages
    rest(cluster)


def test_a_client_that_leaves_before_the_acknowledgement_frees_both_sides_at_once():
    cluster, truth = at_stop()
    cluster.cancel("r")
    cluster.deliver()
    assert truth.answer.reason is CANCELLED
    assert not cluster.local("a").pages
    assert not cluster.local("b").pages
    assert not cluster.heard(TimerExpired)
    rest(cluster)


# -- instances are lost


def test_the_first_lost_before_the_cut_leaves_what_has_landed_to_the_second():
    cluster, truth = placed(cut=14)
    cluster.until(lambda: truth.emitted == 2)
    cluster.deliver()
    cluster.lose("a")
    cluster.deliver()
    assert cluster.where("r") == "b"
    (running,) = cluster.local("b").running_requests.values()
    assert running.progress == Progress(8, 2, running.progress.steps), "two pages landed"
    rest(cluster)
    assert truth.executed == 15 + 1, "one decoded input of the first is executed anew"


def inbound_of_12():
    segment = Segment("r", 1, 12, None, InstanceId("b"), 2)
    request = ar_request("r", prompt=8)
    return Inbound(SegmentPlaced(segment, request, Progress(), forecast_of(8), source="a"))


def test_keys_and_values_of_a_token_that_nobody_was_told_of_are_computed_anew():
    inbound = inbound_of_12()
    inbound.hear(ChunkLanded("r", 2, 0, 12))
    inbound.hear(HandedOff("r", 2, Progress(0, 2), wait=False))
    assert inbound.begins.settled == 9, "9 of the 10 known inputs, so that the last one samples"


@pytest.mark.parametrize(("wait", "begins"), [(True, None), (False, 4)])
def test_what_has_not_landed_is_waited_for_only_if_it_may_come(wait, begins):
    inbound = inbound_of_12()
    inbound.hear(ChunkLanded("r", 2, 0, 4))
    inbound.hear(HandedOff("r", 2, Progress(12, 5), wait))
    assert (inbound.begins and inbound.begins.settled) == begins


def test_the_first_lost_after_the_cut_changes_nothing():
    cluster, truth = at_stop()
    cluster.deliver_but((SegmentEnded, InstanceReported))  # b has begun
    assert cluster.where("r") == "a"
    cluster.lose("a")
    cluster.deliver_next(("lost", "a"))
    assert cluster.where("r") == "b"
    cluster.deliver()
    assert [e.wait for _, e in cluster.heard(HandedOff)] == [True, False]
    assert cluster.where("r") == "b"
    rest(cluster)
    assert truth.executed == 15


def test_the_second_lost_before_the_cut_leaves_the_request_where_it_is():
    cluster, truth = placed()
    cluster.until(lambda: truth.emitted == 1)
    cluster.deliver()
    cluster.lose("b")
    cluster.deliver()
    assert len(cluster.heard(SegmentExtended)) == 1
    assert cluster.where("r") == "a"
    a = cluster.local("a").pages
    assert a.capacity - a.free == 4
    rest(cluster)
    assert ends(cluster) == [("a", SegmentEnd.FINISHED)]
    assert truth.executed == 15


def test_the_second_lost_with_the_hand_over_under_way_lets_the_first_go_on():
    cluster, truth = at_stop()
    cluster.lose("b")
    cluster.deliver()
    (running,) = cluster.local("a").running_requests.values()
    assert running.progress.settled == 10
    assert running.segment.stop is None
    rest(cluster)
    assert truth.executed == 15, "nothing is lost"


def test_without_room_to_go_on_the_request_is_placed_anew():
    cluster = HandoverCluster("a", "b", pages=5)
    first = cluster.arrive("r", cuts=(9,), limit=8)  # 3 pages on a, 4 on b
    cluster.arrive("s", prompt=2, limit=6, order=("a",))  # the other 2 pages of a
    cluster.deliver()
    cluster.lose("b")
    cluster.deliver()
    cluster.until(lambda: ("a", SegmentEnd.RELEASED) in ends(cluster))
    assert not cluster.heard(SegmentExtended)
    rest(cluster)
    assert first.answer.reason is FinishReason.LENGTH


@pytest.mark.parametrize(("others", "goes_on"), [(0, "b"), (8, "a")])
def test_the_third_lost_before_the_cut_leaves_the_rest_to_the_second_or_the_first(others, goes_on):
    cluster = HandoverCluster("a", "b", "c", pages=5)
    truth = cluster.arrive("r", prompt=8, limit=8, cuts=(5, 9))  # 2, 3 and 4 pages
    if others:
        cluster.arrive("s", prompt=2, limit=others - 2, order=("b",))  # the other 2 of b
    cluster.deliver()
    cluster.lose("c")
    cluster.deliver()
    (who, extended), *more = cluster.heard(SegmentExtended)
    assert (who, more) == (goes_on, [])
    assert extended.segment.stop is None
    rest(cluster)
    assert truth.executed == 15
    assert truth.handed == (goes_on == "b")


def test_the_second_lost_after_the_cut_is_a_loss_like_any_other():
    cluster, truth = at_stop()
    cluster.until(lambda: truth.emitted == 5)
    cluster.deliver()
    cluster.lose("b")
    cluster.deliver()
    assert cluster.where("r") == "a"
    (running,) = cluster.local("a").running_requests.values()
    assert running.progress[:2] == (0, 5), "all is computed anew, nothing told again"
    rest(cluster)
    assert truth.emitted == 8


def test_a_loss_of_the_second_that_overtakes_the_news_of_the_cut():
    cluster, truth = at_stop()
    late = SegmentEnded, HandoverAcknowledged, InstanceReported
    cluster.deliver_but(late)
    while truth.emitted < 5:
        cluster.run_batch("b")
        cluster.deliver_but(late)
    assert cluster.where("r") == "a"
    cluster.lose("b")
    cluster.deliver_next(("lost", "b"))  # tokens 4 and 5 can only be b's
    assert not said(cluster, SegmentExtended)
    assert cluster.where("r") is None
    rest(cluster)
    assert truth.emitted == 8


def test_a_loss_of_the_first_that_overtakes_the_news_of_the_end():
    cluster, truth = placed(ends=2)
    cluster.deliver()
    while truth.ended is None:
        cluster.run_batch("a")
    cluster.lose("a")
    cluster.deliver_next(("lost", "a"))
    assert truth.answer.reason is FinishReason.STOP
    rest(cluster)
    assert ends(cluster)[-1] == ("b", SegmentEnd.RELEASED)
    assert not cluster.heard(HandedOff)


# -- time passes


def test_no_room_made_in_time_leaves_the_request_where_it_is():
    cluster, truth = placed()
    cluster.deliver_but(HandoverPrepared)
    a = cluster.machines[InstanceId("a")]
    assert [t.stage for t in a.timers] == [HandoverStage.PREPARE]
    cluster.fire(a)
    cluster.deliver_but(HandoverPrepared)
    assert [who for who, _ in cluster.heard(HandoverStalled)] == ["global"]
    assert not cluster.local("b").pages
    assert cluster.local("a").running_requests["r"].segment.stop is None
    cluster.deliver()  # the late answer
    rest(cluster)
    assert truth.handed == 0
    assert truth.executed == 15


def test_at_its_stop_a_segment_waits_for_room_and_then_goes_on():
    cluster, truth = placed()
    cluster.deliver_but(HandoverPrepared)
    while cluster.machines[InstanceId("a")].batch:
        cluster.run_batch("a")
        cluster.deliver_but(HandoverPrepared)
    assert not cluster.local("a").running_requests
    cluster.deliver()
    assert cluster.where("r") == "b"
    rest(cluster)
    assert (truth.handed, truth.executed) == (1, 15)


def test_without_an_acknowledgement_the_first_frees_its_pages():
    cluster, _ = at_stop()
    cluster.deliver_but(HandoverAcknowledged)
    a = cluster.machines[InstanceId("a")]
    cluster.fire(a, [t.stage for t in a.timers].index(HandoverStage.ACKNOWLEDGE))
    assert not a.local.pages
    cluster.deliver_but(HandoverAcknowledged)
    assert cluster.where("r") == "b"
    rest(cluster)


def test_what_has_not_landed_in_time_is_computed_anew():
    cluster, truth = placed(cut=14)
    cluster.until(lambda: said(cluster, HandedOff), chunks=False)
    cluster.deliver(chunks=False)
    link = next(x for x in cluster.waiting if x[0] == "chunk")
    cluster.deliver_next(link)  # one page of 14 tokens
    b = cluster.machines[InstanceId("b")]
    assert [t.stage for t in b.timers] == [HandoverStage.LANDING]
    cluster.fire(b)
    assert b.local.running_requests["r"].progress[:2] == (4, 7)
    rest(cluster)
    assert truth.executed == 15 + 10


def test_after_a_damaged_chunk_nothing_more_is_waited_for():
    cluster, truth = placed(cut=14)
    cluster.until(lambda: said(cluster, HandedOff), chunks=False)
    link = next(x for x in cluster.waiting if x[0] == "chunk")
    cluster.deliver_next(link)
    cluster.damage_next(link)
    cluster.deliver(chunks=False)
    assert cluster.local("b").running_requests["r"].progress[:2] == (4, 7)
    assert not cluster.machines[InstanceId("b")].timers
    rest(cluster)
    assert truth.executed == 15 + 10


def test_chunks_after_a_damaged_one_are_of_no_use():
    cluster, truth = placed(cut=14)
    cluster.until(lambda: said(cluster, HandedOff), chunks=False)
    link = next(x for x in cluster.waiting if x[0] == "chunk")
    cluster.damage_next(link)
    cluster.deliver()
    assert cluster.local("b").running_requests["r"].progress[:2] == (0, 7)
    rest(cluster)
    assert truth.executed == 15 + 14


# -- instances change


def test_an_instance_that_drains_gives_the_first_segment_back():
    cluster, truth = placed(order=("a", "b"))
    cluster.until(lambda: truth.emitted == 1)
    cluster.drain("a")
    rest(cluster)
    assert ends(cluster)[0] == ("a", SegmentEnd.RELEASED)
    assert truth.emitted == 8


def test_what_was_handed_over_stays_so_while_the_first_drains():
    cluster, truth = at_stop()
    cluster.drain("a")
    rest(cluster)
    assert ends(cluster) == [("a", SegmentEnd.HANDED_OFF), ("b", SegmentEnd.FINISHED)]
    assert truth.executed == 15


def test_an_instance_that_drains_is_stopped_once_what_it_expected_has_come_and_gone():
    cluster, truth = placed()
    cluster.until(lambda: truth.emitted == 1)
    cluster.drain("b")
    cluster.deliver()
    assert InstanceId("b") in cluster.machines, "it holds pages"
    rest(cluster)
    assert ends(cluster)[:2] == [("a", SegmentEnd.HANDED_OFF), ("b", SegmentEnd.RELEASED)]
    assert truth.emitted == 8


def test_a_segment_that_never_began_does_not_undo_what_is_known():
    cluster, truth = at_stop()
    a = cluster.machines[InstanceId("a")]
    cluster.fire(a, [t.stage for t in a.timers].index(HandoverStage.ACKNOWLEDGE))
    cluster.deliver_but(HandedOff, chunks=False)
    assert cluster.where("r") == "b"
    cluster.drain("b")
    cluster.deliver_but(HandedOff, chunks=False)
    assert ends(cluster)[-1] == ("b", SegmentEnd.RELEASED)
    assert cluster.local("a").running_requests["r"].progress[:2] == (0, 3)
    rest(cluster)
    assert truth.emitted == 8


# -- messages of another plan


def test_stale_messages_of_a_hand_over_are_ignored():
    cluster, _ = placed()
    cluster.deliver()
    a, b = (cluster.machines[InstanceId(name)] for name in "ab")
    stale = [
        (a, HandoverAcknowledged("r", 9)),
        (a, HandoverAcknowledged("r", 2)),  # of this one, but nothing was handed over
        (a, TimerExpired("r", 9, HandoverStage.PREPARE)),
        (a, SegmentExtended("r", 9, Segment("r", 0, 0, None, InstanceId("a"), 8))),
        (b, ChunkLanded("r", 9, 0, 4)),
        (b, HandedOff("r", 9, Progress(10, 3))),
        (b, SegmentReleased("r", 9, None)),
        (b, HandedOff("other", 2, Progress(10, 3))),
    ]
    for machine, event in stale:
        assert machine.local.handle(0.0, event) == []
    # Room on an instance that may yet be the successor of what has not come: kept for a while.
    (reminder,) = a.local.handle(0.0, HandoverPrepared("r", 9, InstanceId("c")))
    assert a.local.handle(0.5, reminder.event) == []
    rest(cluster)
    assert not cluster.truths["r"].disturbed


def test_a_request_is_not_placed_where_its_last_segment_has_not_let_go():
    cluster, _ = at_stop()
    cluster.deliver_but(HandoverAcknowledged)
    cluster.run_batch("b")
    cluster.deliver_but(HandoverAcknowledged)
    assert cluster.where("r") == "b"
    a = cluster.scheduler.ledger.instances[InstanceId("a")]
    assert a.held(LEAVING)
    older = Segment("r", 0, 0, None, InstanceId("a"), 0)  # of a life of a before this one
    cluster.tell_global(SegmentEnded(older, SegmentEnd.RELEASED, Progress()))
    assert a.held(LEAVING)
    cluster.lose("b")
    cluster.deliver_but(HandoverAcknowledged)
    assert cluster.scheduler.status().queued == 1, "a has room, but may hold it still"
    cluster.deliver()
    assert cluster.where("r") == "a"
    rest(cluster)


# -- one side alone


def outbound(push_pages=2):
    return Outbound(Segment("r", 0, 0, 30, InstanceId("a"), 1), PAGE, push_pages)


def test_nothing_is_pushed_before_room_was_made():
    side = outbound()
    side.running = running_at(20)
    assert side.push() == []
    (chunk,) = side.hear(HandoverPrepared("r", 2, InstanceId("b")))
    assert chunk[:5] == ("b", "r", 2, 0, 20)
    side.running.progress = Progress(27, 0)
    assert side.push() == [], "less than two whole pages"
    side.running.progress = Progress(29, 0)
    assert side.push()[0][3:5] == (20, 28)
    side.running.progress = Progress(30, 1)
    chunk, told, timer = side.push()
    assert isinstance(chunk, PushChunk)
    assert chunk[3:5] == (28, 30)
    assert isinstance(told, Tell)
    assert told.event == HandedOff("r", 2, Progress(30, 1))
    assert isinstance(timer, StartTimer)
    assert timer.after_s == 5.0


def test_a_stalled_hand_over_does_not_hear_the_late_answer():
    side = outbound()
    side.running = running_at(30)
    (report,) = side.hear(TimerExpired("r", 2, HandoverStage.PREPARE))
    assert report == Report(HandoverStalled("r", 2), report.why)
    assert side.hear(HandoverPrepared("r", 2, InstanceId("b"))) == []
    assert not side.ends(HandoverAcknowledged("r", 2))


def running_at(settled):
    program = AutoregressiveProgram(8)
    return ar_running(program, ar_request("r", prompt=40), Progress(settled), stop=30)


@pytest.mark.parametrize(("pages", "chunks"), [(8, 1), (0, 0)])
def test_the_configuration_says_when_keys_and_values_are_pushed(pages, chunks):
    config = ControlConfig(push_pages=pages)
    spec = InstanceSpec(InstanceId("a"), 1, 100, 4, 8)
    local = assemble_local(AUTOREGRESSIVE, config, spec, KnownSeconds())
    request = ar_request("r", prompt=80)
    segment = Segment(request.id, 0, 0, 60, spec.id, 1)
    local.handle(0.0, SegmentPlaced(segment, request, Progress(), forecast_of(8)))
    local.handle(0.0, HandoverPrepared(request.id, 2, InstanceId("b")))
    local.running_requests["r"].progress = Progress(36)
    actions = local.handle(0.0, BatchDone(0, (StepOutcome(request.id, 4, 0),), 0.1))
    assert sum(isinstance(action, PushChunk) for action in actions) == chunks

"""Moving a running request at its next cut: when it is worth it, and what it reserves."""

from hypothesis import given
from hypothesis import strategies as st

from stepserve.core.events import (
    InstanceLost,
    InstanceUp,
    SegmentEnded,
    SegmentPlaced,
    SegmentReleased,
)
from stepserve.core.request import FinishReason, Progress
from stepserve.core.segment import ReleasePoint, SegmentEnd
from support.scripted_cluster import ScriptedCluster, sent, slot_spec

ONE, TWO = slot_spec(0), slot_spec(1)


def crowded(requests=4, **config):
    """Requests on one instance, and a second, empty one that came up later."""
    cluster = ScriptedCluster(ONE, **config)
    for index in range(requests):
        cluster.arrive(f"r{index}")
    cluster.tell(InstanceUp(TWO))
    return cluster


def pages_free(cluster, spec):
    return cluster.scheduler.ledger.instances[spec.id].free_pages


def test_a_request_of_a_crowded_instance_is_asked_to_go_on_at_its_cut():
    cluster = crowded()
    ((to, event),) = sent(cluster.report(ONE.id, settled=30), SegmentReleased)
    assert (to, event.at) == (ONE.id, ReleasePoint.CUT)
    state = cluster.scheduler.ledger.requests[event.request_id]
    assert state.migration_target == TWO.id
    before = pages_free(cluster, TWO)
    assert before < TWO.page_capacity, "room is reserved ahead"
    ended = SegmentEnded(state.segment, SegmentEnd.RELEASED, Progress(36, 16, 9))
    ((to, placed),) = sent(cluster.tell(ended), SegmentPlaced)
    assert (to, placed.segment.index, placed.segment.start) == (TWO.id, 1, 36)
    assert pages_free(cluster, TWO) == before, "the reservation became the placement"


def test_those_already_asked_do_not_count_as_load():
    """Three of six go; then both hold three, whether or not anybody has left yet."""
    cluster = crowded(6)
    asked = [sent(cluster.report(ONE.id, settled=30), SegmentReleased) for _ in range(5)]
    assert [len(rows) for rows in asked] == [1, 1, 1, 0, 0]


def test_who_has_finished_is_not_asked_to_move():
    """Its instance is about to say so: room reserved elsewhere would be for nobody."""
    cluster = crowded()
    requests = cluster.scheduler.ledger.requests
    first = min(requests)
    told = cluster.report(ONE.id, settled=30, finished=(first,))
    assert [event.request_id for _, event in sent(told, SegmentReleased)] == [
        min(set(requests) - {first})
    ]


def test_balanced_instances_and_no_policy_ask_nobody():
    assert not sent(crowded(migration="none").report(ONE.id), SegmentReleased)
    cluster = ScriptedCluster(ONE, TWO)
    for index in range(4):
        cluster.arrive(f"r{index}")
    assert not sent(cluster.report(ONE.id), SegmentReleased)


def test_the_ablation_asks_at_any_step():
    ((_, event),) = sent(crowded(migration="any_step").report(ONE.id), SegmentReleased)
    assert event.at is ReleasePoint.STEP


def test_one_that_finishes_before_its_cut_leaves_no_reservation():
    cluster = crowded()
    ((_, event),) = sent(cluster.report(ONE.id), SegmentReleased)
    state = cluster.scheduler.ledger.requests[event.request_id]
    done = Progress(68, 48, 20, FinishReason.LENGTH)
    cluster.tell(SegmentEnded(state.segment, SegmentEnd.FINISHED, done))
    assert pages_free(cluster, TWO) == TWO.page_capacity


def test_one_whose_target_is_lost_is_placed_anew():
    cluster = crowded()
    ((_, event),) = sent(cluster.report(ONE.id), SegmentReleased)
    state = cluster.scheduler.ledger.requests[event.request_id]
    cluster.tell(InstanceLost(TWO, ()))
    ended = SegmentEnded(state.segment, SegmentEnd.RELEASED, Progress(36, 16, 9))
    ((to, placed),) = sent(cluster.tell(ended), SegmentPlaced)
    assert (to, placed.progress.settled) == (ONE.id, 36)


@given(st.lists(st.integers(0, 1), min_size=2, max_size=10))
def test_nobody_is_asked_back(reports):
    """Anti-ping-pong: whatever the order of reports, nobody moves twice under equal load."""
    cluster = crowded()
    moved = []
    for which in reports:
        spec = (ONE, TWO)[which]
        for _, event in sent(cluster.report(spec.id), SegmentReleased):
            moved.append(event.request_id)
            state = cluster.scheduler.ledger.requests[event.request_id]
            cluster.tell(SegmentEnded(state.segment, SegmentEnd.RELEASED, state.progress))
    assert len(moved) == len(set(moved))

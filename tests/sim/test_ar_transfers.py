"""What is carried out between instances, with a list in place of schedulers."""

import heapq
import itertools
from types import SimpleNamespace

import pytest

from stepserve.core.actions import FreeState, PushChunk, StartTimer, Tell
from stepserve.core.events import ChunkLanded, HandedOff, TimerExpired
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.request import Progress
from stepserve.core.segment import HandoverStage
from stepserve.sim.ar_record import ArRecord
from stepserve.sim.delays import Delays
from stepserve.sim.faults import FaultConfig, Faults
from stepserve.sim.links import Links
from stepserve.sim.transfers import Transfers
from support.toy_ar import make_token_request

R, A, B = RequestId("r0"), InstanceId("a"), InstanceId("b")


class Desk:
    """A driver: a clock, a heap, and a list of what was delivered when."""

    def __init__(self, damaged=lambda: False, **faults):
        self.now_s, self.heap, self.count = 0.0, [], itertools.count()
        self.delays, self.faults = Delays(message_s=0.1), Faults(FaultConfig(**faults), 0)
        self.instances, self.heard, self.written = {}, [], []
        self.records = {R: ArRecord(make_token_request(), 0)}
        self.transfers = Transfers(self, 1.0, Links(100.0, 0.05), damaged)
        self.transfers.attach(self)
        for name in (A, B):
            self.come_up(name)

    def come_up(self, name):
        self.instances[name] = SimpleNamespace(spec=SimpleNamespace(id=name), alive=True)

    def lose(self, name):
        self.instances.pop(name).alive = False
        self.transfers.lost(name)

    def at(self, when_s, priority, call, a, b=None):
        heapq.heappush(self.heap, (when_s, priority, next(self.count), call, a, b))

    def tell_local(self, instance, event):
        if instance.alive:
            self.heard.append((round(self.now_s, 6), instance.spec.id, event))

    def export_kv(self, instance, request_id, start, stop):
        assert stop <= 1000, "not computed"

    def import_kv(self, instance, request_id, start, stop):
        self.written.append((instance, start, stop))

    def do(self, name, *actions):
        for action in actions:
            self.transfers.carry(self.instances[name], action)

    def run(self, until_s=100.0):
        while self.heap and self.heap[0][0] <= until_s:
            self.now_s, _, _, call, a, b = heapq.heappop(self.heap)
            call(a, b)
        self.now_s = until_s


def push(start, stop, to=B):
    return PushChunk(to, R, 2, start, stop, "")


def landed(start, stop, intact=True):
    return ChunkLanded(R, 2, start, stop, intact)


def test_chunks_land_in_order_after_their_bytes_and_the_way():
    desk = Desk()
    desk.do(A, push(0, 100), push(100, 150))
    desk.run()
    assert desk.heard == [(1.05, B, landed(0, 100)), (1.55, B, landed(100, 150))]
    assert desk.written == [(B, 0, 100), (B, 100, 150)]
    assert (desk.transfers.chunks, desk.transfers.bytes_moved) == (2, 150.0)


def test_a_chunk_that_becomes_slower_lands_once():
    desk = Desk()
    desk.do(A, push(0, 100))
    desk.run(0.5)
    desk.come_up(InstanceId("c"))
    desk.do(A, push(0, 100, to=InstanceId("c")))
    desk.run()
    assert [row[:2] for row in desk.heard] == [(1.55, B), (2.05, "c")]


def test_messages_pass_beside_chunks():
    desk = Desk()
    handed = HandedOff(R, 2, Progress(100, 1))
    desk.do(A, push(0, 100), Tell(B, handed, ""))
    desk.run()
    assert [row[2] for row in desk.heard] == [handed, landed(0, 100)]
    assert desk.records[R].handovers[0].sent_s == 0.0


def test_a_damaged_chunk_is_told_and_not_written():
    desk = Desk(damaged=lambda: True)
    desk.do(A, push(0, 100))
    desk.run()
    assert desk.heard == [(1.05, B, landed(0, 100, intact=False))]
    assert desk.written == []


def test_what_was_not_computed_is_not_sent():
    with pytest.raises(AssertionError, match="not computed"):
        Desk().do(A, push(0, 1001))


def test_chunks_die_with_their_sender_and_its_messages_arrive():
    desk = Desk()
    desk.do(A, push(0, 50), push(50, 100), Tell(B, HandedOff(R, 2, Progress(100, 1)), ""))
    desk.run(0.05)
    desk.lose(A)
    desk.run()
    assert [type(event) for _, _, event in desk.heard] == [HandedOff]
    assert desk.transfers.vanished == 2


def test_nothing_reaches_the_next_incarnation_of_a_lost_instance():
    desk = Desk()
    desk.do(A, push(0, 100), Tell(B, HandedOff(R, 2, Progress(100, 1)), ""))
    desk.do(B, StartTimer(0.5, TimerExpired(R, 2, HandoverStage.LANDING), ""))
    desk.run(0.02)
    desk.lose(B)
    desk.come_up(B)
    desk.run()
    assert desk.heard == []


def test_an_instance_that_is_gone_is_sent_nothing():
    desk = Desk()
    desk.lose(B)
    desk.do(A, push(0, 100), Tell(B, HandedOff(R, 2, Progress(100, 1)), ""))
    desk.run()
    assert desk.heard == []
    assert desk.transfers.chunks == 0


def test_messages_of_a_pair_keep_their_order_when_they_are_held_up():
    desk = Desk(late_share=0.5, late_s=3.0, jitter_s=0.5)
    told = [HandedOff(R, epoch, Progress()) for epoch in range(30)]
    for event in told:
        desk.do(A, Tell(B, event, ""))
    desk.run()
    assert [event for _, _, event in desk.heard] == told
    assert desk.heard[-1][0] > 3.0


def test_timers_go_off_where_they_were_set():
    desk, timer = Desk(), TimerExpired(R, 2, HandoverStage.PREPARE)
    desk.do(B, StartTimer(0.5, timer, ""))
    desk.run()
    assert desk.heard == [(0.5, B, timer)]


def test_no_other_action_comes_this_way():
    with pytest.raises(AssertionError, match="nobody carries out"):
        Desk().do(A, FreeState(R, ""))

"""The invariants of a cluster (ARCHITECTURE.md), checked against a simulated world's insides.

What a step may do (a token is settled once, in order; cached steps need keys and values; cuts
come before recompute steps) is checked by the rows that run it; that every request gets one
answer, by the world.
"""

import itertools

from stepserve.control.ledger import ClaimKind
from stepserve.control.lifecycle import RequestPhase
from stepserve.core.actions import Reject
from stepserve.core.status import InstancePhase


def check_phase(state, queued):
    """A request's phase says where it is: between two events it is in exactly one place."""
    phase, placed = state.phase, state.segment is not None
    assert (phase in (RequestPhase.RUNNING, RequestPhase.LEAVING)) == placed
    assert (phase is RequestPhase.QUEUED) == queued
    assert (phase is RequestPhase.PREDICTING) == (not placed and state.forecast is None)
    assert phase is not RequestPhase.UNPLACED


class Invariants:
    """``check`` after every event, ``check_rest`` when nothing more can happen."""

    def __init__(self, world, executors):
        self.world, self.executors = world, executors
        self.now_s = 0.0

    def check(self):
        world = self.world
        assert world.now_s >= self.now_s, "no time goes backward"
        self.now_s = world.now_s
        self.check_ledger()
        self.check_instances()

    def check_ledger(self):
        scheduler = self.world.supervisor.scheduler
        ledger = scheduler.ledger
        queued = [key[2] for _, key in scheduler._queue.ranks()]
        assert len(queued) == len(scheduler._queue)
        for rows in scheduler._queue._rows.values():
            assert rows
            assert rows == sorted(rows)
        assert len(queued) == len(set(queued))
        placed, expected = {}, {}
        for name, instance in ledger.instances.items():
            runs = instance.held(ClaimKind.RUNNING)
            assert not placed.keys() & set(runs), "claimed in one place"
            placed.update(dict.fromkeys(runs, name))
            for request_id in instance.held(ClaimKind.PLANNED, ClaimKind.MIGRATION):
                expected.setdefault(request_id, set()).add(name)
            claims = instance.claims.values()
            pages = sum(claim.pages for claim in claims)
            assert instance.free_pages == instance.spec.page_capacity - pages >= 0
            assert instance.running_tokens == sum(claim.tokens for claim in claims)
            assert len(claims) <= instance.spec.max_running_requests
            stopping = instance.phase is InstancePhase.STOPPING
            assert not (stopping and claims), "stopped while it holds something"
        assert ledger.admitted == len(placed)
        ranks = sorted(instance.rank[:2] for instance in ledger.instances.values())
        assert [rank[:2] for rank in ledger._ranks] == ranks, "kept in order of load"
        for name, state in ledger.requests.items():
            segment = state.segment
            assert placed.get(name) == (None if segment is None else segment.instance)
            planned = {s.instance for s in state.planned}
            assert expected.get(name, set()) == planned | ({state.migration_target} - {None})
            check_phase(state, name in queued)
            assert segment is not None or not (state.migration_target or state.planned)
            chain = [segment, *state.planned]
            for one, after in itertools.pairwise(chain):
                assert (one.stop, one.epoch + 1) == (after.start, after.epoch), "segments tile"
        assert {*queued, *placed, *expected} <= ledger.requests.keys()
        if not scheduler.status().recovering:
            assert ledger.requests.keys() == self.world.unanswered.keys()

    def check_instances(self):
        seen = set()
        for name, instance in self.world.instances.items():
            local = instance.local
            assert local.pages.free + sum(local.pages._held.values()) == local.pages.capacity
            at_stop = {r for r, o in local.outbound.items() if o.running is not None}
            assert {*local.running_requests, *local.inbound, *at_stop} == set(local.pages._held)
            assert not local.running_requests.keys() & local.inbound.keys()
            assert set(local.pages._held) == set(self.executors.held.get(name, ()))
            assert len(local.pages) <= instance.spec.max_running_requests
            self.check_promises(name, local)
            assert not seen & local.running_requests.keys(), "a request runs in one place"
            seen |= local.running_requests.keys()
            assert (local._batch is None) == (not local.running_requests), "nobody waits in vain"
        gpus = [g for i in self.world.instances.values() for g in _gpus(i.spec.slot)]
        assert len(gpus) == len(set(gpus)), "a GPU belongs to one instance"

    def check_promises(self, name, local):
        """What an instance holds was promised to it: the two ledgers of pages cannot collide."""
        instance = self.world.supervisor.scheduler.ledger.instances.get(name)
        if instance is not None and not self.world.supervisor.scheduler.status().recovering:
            for request_id, pages in local.pages._held.items():
                assert pages <= instance.claims[request_id].pages

    def check_rest(self):
        world, scheduler = self.world, self.world.supervisor.scheduler
        assert not world.unanswered
        assert not scheduler.ledger.requests
        assert not scheduler._queue
        assert not scheduler.reconfiguration.under_way
        assert set(scheduler.ledger.instances) == set(world.instances)
        for instance in scheduler.ledger.instances.values():
            assert not instance.claims
            assert not instance.running_tokens
            assert instance.phase is InstancePhase.UP
        for instance in world.instances.values():
            assert not instance.local.running_requests
            assert not instance.local.inbound
            assert not instance.local.outbound
            assert instance.local._batch is None
        for record in world.records.values():
            assert record.answer is not None
            if isinstance(record.answer, Reject):
                assert not record.tokens, "a rejected request cost nothing"


def _gpus(slot):
    return [] if slot is None else [(slot.node, gpu) for gpu in slot.gpus]

"""Hand-overs under any order of events: hypothesis drives the real schedulers (DynaServe 3.9).

Every message may be late, every timer early, every chunk damaged; instances are lost, drained and
rebuilt, the global scheduler is replaced, clients leave, outputs end where they like.
``HandoverCluster`` checks each step.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stepserve.core.events import (
    HandedOff,
    HandoverAcknowledged,
    HandoverPrepared,
    HandoverStalled,
    SegmentEnded,
    SegmentExtended,
    SegmentReleased,
    TimerExpired,
)
from support.handover_cluster import GLOBAL, HandoverCluster

AGAIN = (
    HandedOff,
    HandoverAcknowledged,
    HandoverPrepared,
    HandoverStalled,
    SegmentEnded,
    SegmentExtended,
    SegmentReleased,
    TimerExpired,
)


class Handovers(RuleBasedStateMachine):
    @initialize(
        pages=st.integers(5, 12),
        push_pages=st.integers(0, 2),
        report_every_s=st.sampled_from([0.0, 3600.0]),
        faults=st.integers(0, 4),
    )
    def begin(self, pages, push_pages, report_every_s, faults):
        options = {"push_pages": push_pages, "report_every_s": report_every_s}
        self.cluster = HandoverCluster("a", "b", "c", pages=pages, **options)
        self.faults = faults  # still to come; with more, hardly a hand-over gets far

    def choose(self, data, of):
        return of[data.draw(st.integers(0, len(of) - 1))]

    @precondition(lambda self: len(self.cluster.scheduler.ledger.requests) < 4)
    @rule(
        prompt=st.integers(1, 12),
        limit=st.integers(1, 8),
        ends=st.integers(1, 8),
        cuts=st.sets(st.integers(1, 18), min_size=1, max_size=2),
        order=st.permutations(["a", "b", "c"]),
    )
    def arrive(self, prompt, limit, ends, cuts, order):
        name = f"r{len(self.cluster.truths)}"
        ends, cuts = min(ends, limit), sorted(cuts)
        self.cluster.arrive(name, prompt=prompt, limit=limit, ends=ends, cuts=cuts, order=order)

    @precondition(lambda self: self.cluster.waiting)
    @rule(data=st.data())
    def deliver(self, data):
        self.cluster.deliver_next(self.choose(data, self.cluster.waiting))

    @precondition(lambda self: self.cluster.waiting)
    @rule(chunks=st.booleans())
    def deliver_all(self, chunks):
        self.cluster.deliver(chunks=chunks)

    @precondition(lambda self: self.busy())
    @rule(names=st.lists(st.sampled_from("abc"), min_size=3, max_size=9), chunks=st.booleans())
    def work(self, names, chunks):
        """Some batches, with all messages in between."""
        for name in names:
            self.cluster.deliver(chunks=chunks)
            if name in self.busy():
                self.cluster.run_batch(name)
            self.cluster.check()

    @precondition(lambda self: self.busy())
    @rule(data=st.data())
    def run_batch(self, data):
        self.cluster.run_batch(self.choose(data, self.busy()))

    def busy(self):
        return [name for name, m in self.cluster.machines.items() if m.batch is not None]

    @precondition(lambda self: self.faults and self.chunks())
    @rule(data=st.data())
    def damage_chunk(self, data):
        self.faults -= 1
        self.cluster.damage_next(self.choose(data, self.chunks()))

    def chunks(self):
        return [link for link in self.cluster.waiting if link[0] == "chunk"]

    @precondition(lambda self: self.faults and self.timers())
    @rule(data=st.data())
    def fire_timer(self, data):
        self.faults -= 1
        machine = self.choose(data, self.timers())
        self.cluster.fire(machine, data.draw(st.integers(0, len(machine.timers) - 1)))

    def timers(self):
        return [machine for machine in self.cluster.machines.values() if machine.timers]

    @precondition(lambda self: self.faults and self.cluster.scheduler.ledger.requests)
    @rule(data=st.data())
    def cancel(self, data):
        self.faults -= 1
        self.cluster.cancel(self.choose(data, list(self.cluster.scheduler.ledger.requests)))

    @precondition(lambda self: self.faults and self.cluster.machines)
    @rule(data=st.data())
    def lose(self, data):
        self.faults -= 1
        self.cluster.lose(self.choose(data, list(self.cluster.machines)))

    @precondition(lambda self: self.faults)
    @rule()
    def restart(self):
        self.faults -= 1
        self.cluster.restart()

    @precondition(lambda self: self.cluster.rebuilds)
    @rule()
    def rebuild(self):
        self.cluster.rebuild()

    @precondition(lambda self: self.faults and self.cluster.scheduler.ledger.instances)
    @rule(data=st.data())
    def drain(self, data):
        self.faults -= 1
        self.cluster.drain(self.choose(data, list(self.cluster.scheduler.ledger.instances)))

    @precondition(lambda self: self.old())
    @rule(data=st.data())
    def deliver_again(self, data):
        to, event = self.choose(data, self.old())
        if to is GLOBAL:
            self.cluster.tell_global(event)
        else:
            self.cluster.tell_local(to, event)

    def old(self):
        return [(to, event) for to, event in self.cluster.log if isinstance(event, AGAIN)]

    @invariant()
    def sound(self):
        if hasattr(self, "cluster"):
            self.cluster.check()

    def teardown(self):
        if hasattr(self, "cluster"):
            self.cluster.come_to_rest()
            self.cluster.check_rest()


TestHandovers = Handovers.TestCase
TestHandovers.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)

"""The real schedulers under a driver that delivers what it is told to, when it is told to.

Messages wait in one queue per pair of ends, chunks in queues of their own, batches until they are
ended, timers until they are fired. The driver knows the truth: how long outputs get, what was
told to clients, and of which inputs an instance has keys and values. It refuses steps, copies and
beginnings that do not fit what is there.
"""

import itertools
from collections import deque
from dataclasses import dataclass, field

from stepserve.control.global_scheduler import GlobalScheduler
from stepserve.control.ledger import ClaimKind
from stepserve.control.lifecycle import RequestPhase
from stepserve.control.load_control import LoadControl
from stepserve.control.local_scheduler import LocalScheduler
from stepserve.control.reconfigure import _drain
from stepserve.core.actions import (
    Finish,
    FreeState,
    LoadState,
    Predict,
    PushChunk,
    Rebuild,
    Report,
    RunBatch,
    Send,
    StartTimer,
    Stop,
    Tell,
)
from stepserve.core.config import ControlConfig
from stepserve.core.events import (
    BatchDone,
    ChunkLanded,
    HandoverStalled,
    InstanceLost,
    InstanceStopped,
    InstanceUp,
    OpenRequest,
    Predicted,
    RequestArrived,
    RequestCancelled,
    SchedulerStarted,
    SegmentEnded,
    SegmentPlaced,
)
from stepserve.core.forecast import StepForecast
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.instance import InstanceSpec
from stepserve.core.protocols import Placement
from stepserve.core.request import Family, FinishReason, Progress, Request
from stepserve.core.running import StepPace
from stepserve.core.segment import Segment
from stepserve.core.status import InstancePhase
from stepserve.core.step import StepKind, StepOutcome
from stepserve.families.programs.autoregressive import AutoregressiveProgram
from stepserve.policies.threshold.fixed import FixedThreshold
from support.invariants import check_phase
from support.parts import make_policy

GLOBAL = "global"
PAGE = 4


class Everybody:
    """All running requests; prefills in small chunks."""

    def pace(self, running_requests, spec):
        return StepPace(0.1, 0.1)

    def compose(self, candidates, spec, now_s):
        program = AutoregressiveProgram(PAGE)
        return tuple(program.shorten(step, 5) or step for _, step in candidates)


class KnownSeconds:
    def step_time_s(self, tokens, rows, spec, mix=None):
        return 0.01

    def observe(self, tokens, rows, spec, seconds, mix=None):
        pass


@dataclass
class Truth:
    """A request as nobody but the driver knows it; and how it is to be cut."""

    request: Request
    output_tokens: int
    cuts: tuple[int, ...]
    order: tuple[str, ...]  # of instances, in preference
    emitted: int = 0  # told to the client
    executed: int = 0  # inputs, on any instance
    handed: int = 0
    ended: FinishReason | None = None
    answer: Finish | None = None
    epoch: int = 0  # the latest that was sent
    cancelled: bool = False
    disturbed: bool = False  # something happened after which work may be done twice

    @property
    def reached(self):
        known = self.request.prompt_tokens + self.emitted
        return Progress(known, self.emitted, self.executed, self.ended)


class AsTold:
    """The cuts and instances that the test chose, as far as there is room."""

    reads_work = True

    def __init__(self, truths):
        self.truths = truths

    def place(self, request, progress, forecast, view):
        truth = self.truths[request.id]
        names = [name for name in truth.order if name in view.loads]
        names += [name for name in sorted(view.loads) if name not in names]
        stops = [s for s in truth.cuts if s > progress.settled][: len(names) - 1]
        starts = [progress.settled, *stops]
        rows = zip(starts, [*stops, None], names, strict=False)
        segments = tuple(Segment(request.id, i, a, b, n, 0) for i, (a, b, n) in enumerate(rows))
        return Placement(segments, tuple(float(i) for i, _ in enumerate(segments)), 0.05, "as told")


@dataclass
class Row:
    """What an executor holds of one request."""

    held: int = 0  # inputs with keys and values
    known: int = 0  # output tokens
    started: bool = False  # nothing may land any more


@dataclass(eq=False)
class Machine:
    """One incarnation of an instance."""

    number: int
    spec: InstanceSpec
    local: LocalScheduler
    rows: dict[RequestId, Row] = field(default_factory=dict)
    batch: object = None
    timers: list = field(default_factory=list)
    alive: bool = True
    retired: bool = False  # told to stop: it takes nothing in any more


class HandoverCluster:
    def __init__(self, *names, pages=12, push_pages=1, report_every_s=0.0):
        self.truths: dict[RequestId, Truth] = {}
        self.now_s = 0.0
        self.built = self.restarts = 0
        self.push_pages, self.report_every_s = push_pages, report_every_s
        program, cost = AutoregressiveProgram(8), KnownSeconds()
        config = ControlConfig()
        load_control = LoadControl(None, program, cost, 1.0)
        self.make_scheduler = lambda: GlobalScheduler(
            config, program, AsTold(self.truths), None, load_control, cost
        )
        self.scheduler = self.make_scheduler()
        self.program, self.cost = program, cost
        self.machines: dict[InstanceId, Machine] = {}
        self.known: dict[InstanceId, Machine] = {}  # as the global scheduler knows them
        self.links: dict[tuple, deque] = {}
        self.rebuilds: list[InstanceSpec] = []
        self.log: list[tuple] = []  # (to, event) of all that was delivered
        for name in names:
            self.come_up(InstanceSpec(InstanceId(name), 1, pages, PAGE, 8))
        self.deliver()

    # -- machines

    def come_up(self, spec):
        local = LocalScheduler(
            spec,
            self.program,
            Everybody(),
            make_policy(FixedThreshold),
            None,
            self.cost,
            4,
            self.report_every_s,
            self.push_pages,
        )
        self.built += 1
        machine = self.machines[spec.id] = Machine(self.built, spec, local)
        self.post(("up", spec.id), GLOBAL, (InstanceUp(spec), machine))

    def lose(self, name):
        machine = self.machines.pop(InstanceId(name))
        machine.alive = False
        self.post(("lost", name), GLOBAL, machine)

    def restart(self):
        """A new global scheduler knows what clients were told, and where instances are."""
        self.scheduler = self.make_scheduler()
        self.restarts += 1
        open_requests, cancelled = [], []
        for name, truth in self.truths.items():
            if truth.answer is None:
                open_requests.append(OpenRequest(truth.request, truth.reached, truth.epoch))
                cancelled += [name] if truth.cancelled else []
        specs = tuple(machine.spec for machine in self.known.values())
        self.tell_global(SchedulerStarted(self.restarts, (), tuple(open_requests), specs))
        for name in cancelled:
            self.cancel(name)

    def rebuild(self):
        self.come_up(self.rebuilds.pop(0))

    def drain(self, name):
        instance = self.scheduler.ledger.instances[InstanceId(name)]
        for request_id in instance.held(ClaimKind.RUNNING, ClaimKind.PLANNED):
            self.truths[request_id].disturbed = True
        self.carry_out_global(_drain(instance, self.scheduler.ledger))

    # -- queues

    def post(self, link, to, what):
        self.links.setdefault(link, deque()).append((to, what))

    @property
    def waiting(self):
        return sorted((link for link, queue in self.links.items() if queue), key=str)

    def deliver_next(self, link):
        to, what = self.links[link].popleft()
        kind = link[0]
        if kind == "lost":
            machine = what
            for truth in self.truths.values():
                truth.disturbed |= truth.answer is None
            told = tuple((n, t.reached) for n, t in self.truths.items() if t.answer is None)
            if self.known.get(machine.spec.id) is machine:
                del self.known[machine.spec.id]
            self.tell_global(InstanceLost(machine.spec, told))
        elif kind == "up":
            event, machine = what
            if machine.alive:
                self.known[event.spec.id] = machine
                self.tell_global(event)
        elif kind == "stop":
            self.stop(what)
        elif to is GLOBAL:
            self.tell_global(what)
        elif kind == "chunk":
            self.land(to, what)
        else:
            self.tell_local(to, what)

    def stop(self, machine):
        if machine.alive:
            assert not machine.rows, "an instance that holds something is not stopped"
            del self.machines[machine.spec.id], self.known[machine.spec.id]
            machine.alive = False
            self.tell_global(InstanceStopped(machine.spec))  # which forms it anew

    def deliver(self, *, chunks=True):
        """Everything that is under way, and what follows from it; no batch ends."""
        while links := [x for x in self.waiting if chunks or x[0] != "chunk"]:
            self.deliver_next(links[0])

    def land(self, machine, push, *, intact=True):
        if not machine.alive:
            return
        row = machine.rows.get(push.request_id)
        if intact and row is not None and not row.started and push.start <= row.held:
            row.held = max(row.held, push.stop)
        if not intact:
            self.truths[push.request_id].disturbed = True
        request_id, epoch, start, stop = push.request_id, push.epoch, push.start, push.stop
        self.tell_local(machine, ChunkLanded(request_id, epoch, start, stop, intact))

    def damage_next(self, link):
        machine, push = self.links[link].popleft()
        self.land(machine, push, intact=False)

    def fire(self, machine, index=0):
        event = machine.timers.pop(index)
        if self.tell_local(machine, event):  # somebody waited for it
            self.truths[event.request_id].disturbed = True

    def run_batch(self, name):
        """End the running batch of an instance."""
        machine = self.machines[InstanceId(name)]
        batch, machine.batch = machine.batch, None
        outcomes = tuple(self.run_step(machine, step) for step in batch.steps)
        self.now_s += 0.01
        self.tell_local(machine, BatchDone(batch.id, outcomes, 0.01))

    def run_step(self, machine, step):
        row, truth = machine.rows[step.request_id], self.truths[step.request_id]
        known = truth.request.prompt_tokens + row.known
        assert step.context_tokens - step.query_tokens == row.held, "a step begins where KV ends"
        assert step.context_tokens <= known, "only known tokens are executed"
        assert step.kind is StepKind.PREFILL or step.context_tokens == known
        row.held, row.started = step.context_tokens, True
        truth.executed += step.query_tokens
        if row.held == known:
            assert row.known == truth.emitted, "each token is told once, in order"
            row.known += 1
            truth.emitted += 1
            if truth.emitted == truth.output_tokens:
                limit = truth.output_tokens == truth.request.max_output_tokens
                truth.ended = FinishReason.LENGTH if limit else FinishReason.STOP
        return StepOutcome(step.request_id, step.query_tokens, row.known, truth.ended)

    # -- schedulers

    def tell_global(self, event):
        self.log.append((GLOBAL, event))
        self.carry_out_global(self.scheduler.handle(self.now_s, event))
        if isinstance(event, SegmentEnded | InstanceLost | HandoverStalled):
            ledger = self.scheduler.ledger
            for instance in ledger.instances.values():
                if instance.phase is not InstancePhase.UP:
                    self.carry_out_global(_drain(instance, ledger))

    def carry_out_global(self, actions):
        for action in actions:
            match action:
                case Send(to, event):
                    machine = self.known[to]  # the global scheduler sends to what it knows
                    if isinstance(event, SegmentPlaced):
                        truth = self.truths[event.request.id]
                        truth.epoch = max(truth.epoch, event.segment.epoch)
                    self.post(("send", to, machine.number), machine, event)
                case Predict():
                    self.post(("predict",), GLOBAL, self.predicted(action))
                case Finish(request_id):
                    truth = self.truths[request_id]
                    assert truth.answer is None, "one answer each"
                    truth.answer = action
                case Rebuild(spec):
                    self.rebuilds.append(spec)
                case Stop(spec):
                    self.known[spec.id].retired = True
                    self.post(("stop", spec.id), GLOBAL, self.known[spec.id])
                case _:
                    raise AssertionError(action)

    def predicted(self, action):
        expected = float(action.request.max_output_tokens)
        forecast = StepForecast(action.thresholds, (expected,), expected, action.progress.steps)
        return Predicted(action.request.id, forecast)

    def tell_local(self, machine, event):
        if not machine.alive or machine.retired:
            return []
        self.log.append((machine, event))
        name = machine.spec.id
        actions = machine.local.handle(self.now_s, event)
        for action in actions:
            match action:
                case RunBatch(batch):
                    assert machine.batch is None
                    machine.batch = batch
                case Report(told):
                    self.post(("report", name, machine.number), GLOBAL, told)
                case Predict():
                    self.post(("forecast", name), machine, self.predicted(action))
                case LoadState():
                    self.load(machine, action)
                case FreeState(request_id):
                    del machine.rows[request_id]
                case Tell(to, told):
                    if to in self.machines:
                        self.post(("tell", name, to), self.machines[to], told)
                case PushChunk(to, request_id, _, start, stop):
                    row = machine.rows[request_id]
                    assert 0 <= start < stop <= row.held, "only what is computed is pushed"
                    if to in self.machines:
                        self.post(("chunk", name, to), self.machines[to], action)
                case StartTimer(_, timer):
                    machine.timers.append(timer)
        return actions

    def load(self, machine, action):
        request_id, progress = action.request.id, action.progress
        truth, row = self.truths[request_id], machine.rows.get(request_id)
        if row is None:
            assert progress.settled == 0, "nothing has landed before there was room"
            machine.rows[request_id] = Row(known=progress.emitted)
            return
        truth.handed += 1
        assert not row.started
        assert progress.settled <= row.held, "keys and values have landed up to there"
        row.held, row.known, row.started = progress.settled, progress.emitted, True
        if truth.answer is None and not truth.cancelled:
            assert row.known == truth.emitted, "the successor knows what the client knows"

    # -- clients

    def arrive(self, name, *, prompt=8, limit=8, ends=None, cuts=(), order=("a", "b", "c")):
        request_id = RequestId(name)
        request = Request(request_id, Family.AUTOREGRESSIVE, "m", prompt, limit, self.now_s)
        self.truths[request_id] = Truth(request, ends or limit, tuple(cuts), tuple(order))
        self.tell_global(RequestArrived(request))
        return self.truths[request_id]

    def cancel(self, name):
        self.truths[RequestId(name)].cancelled = True
        self.tell_global(RequestCancelled(RequestId(name), FinishReason.CANCELLED))

    def come_to_rest(self):
        """Let everything happen that can, timers last."""
        for _ in range(5000):
            if self.waiting:
                self.deliver_next(self.waiting[0])
            elif busy := [n for n, m in self.machines.items() if m.batch is not None]:
                self.run_batch(busy[0])
            elif due := [m for m in self.machines.values() if m.timers]:
                self.fire(due[0])
            elif self.rebuilds:
                self.rebuild()
            else:
                return
            self.check()
        raise AssertionError("does not come to rest")

    # -- invariants

    def check(self):
        if not self.scheduler.status().recovering:
            self.check_books()
        self.check_machines()

    def check_books(self):
        ledger = self.scheduler.ledger
        for truth in self.truths.values():
            assert (truth.request.id in ledger.requests) == (truth.answer is None)
        for name, instance in ledger.instances.items():
            claims = instance.claims.values()
            pages = sum(claim.pages for claim in claims)
            assert instance.free_pages == instance.spec.page_capacity - pages >= 0
            assert instance.running_tokens == sum(claim.tokens for claim in claims)
            local = self.known[name].local
            for request_id, pages in local.pages._held.items():
                assert instance.claims[request_id].pages >= pages, "room was promised"
            planned = {s.instance for t in ledger.requests.values() for s in t.planned}
            assert not instance.held(ClaimKind.PLANNED) or name in planned
        placed = [t for t in ledger.requests.values() if t.segment is not None]
        assert ledger.admitted == len(placed)
        for state in ledger.requests.values():
            name = state.request.id
            chain = [s for s in (state.segment, *state.planned) if s is not None]
            for segment in chain:
                instance = ledger.instances[segment.instance]
                kind = ClaimKind.RUNNING if segment is state.segment else ClaimKind.PLANNED
                claim = instance.claims[name]
                assert (claim.kind, claim.epoch) == (kind, segment.epoch)
            assert not state.planned or state.segment is not None
            for one, after in itertools.pairwise(chain):
                assert one.stop == after.start, "segments tile the axis"
                assert one.epoch + 1 == after.epoch
            leaving = state.phase is RequestPhase.LEAVING
            assert not chain or chain[-1].stop is None or state.cancelled or leaving
            queued = any(key[2] == name for _, key in self.scheduler._queue.ranks())
            check_phase(state, queued)

    def check_machines(self):
        running = [r for m in self.machines.values() for r in m.local.running_requests]
        assert len(running) == len(set(running)), "a request runs in one place"
        for machine in self.machines.values():
            local = machine.local
            assert local.pages.free + sum(local.pages._held.values()) == local.pages.capacity
            paused = {r for r, o in local.outbound.items() if o.running is not None}
            assert set(local.pages._held) == {*local.running_requests, *local.inbound, *paused}
            assert set(local.pages._held) == set(machine.rows)
            assert not local.running_requests.keys() & local.inbound.keys()
            assert local.outbound.keys() <= local.pages._held.keys()
            assert (machine.batch is None) == (not local.running_requests), "nobody waits in vain"

    def check_rest(self):
        """Everybody has an answer, and nothing is left of anybody."""
        ledger = self.scheduler.ledger
        assert not ledger.requests
        assert not self.scheduler._queue
        for instance in ledger.instances.values():
            assert not instance.claims
            assert instance.running_tokens == 0
        for machine in self.machines.values():
            local = machine.local
            held = {*local.running_requests, *local.inbound, *local.outbound, *local.pages._held}
            assert not held
            assert not machine.timers
        for truth in self.truths.values():
            assert truth.answer is not None
            if truth.answer.reason is not FinishReason.CANCELLED:
                assert truth.answer.reason is truth.ended
                assert truth.emitted == truth.output_tokens
            if not truth.disturbed:
                inputs = truth.request.prompt_tokens + truth.output_tokens - 1
                assert truth.answer.reason is FinishReason.CANCELLED or truth.executed == inputs

    # -- for scripts

    def heard(self, kind):
        """(who, event) of all events of a kind that were delivered."""
        rows = [(GLOBAL if to is GLOBAL else to.spec.id, e) for to, e in self.log]
        return [row for row in rows if isinstance(row[1], kind)]

    def until(self, condition, *, chunks=True):
        """Deliver messages and end batches until something is true."""
        for _ in range(200):
            if condition():
                return
            links = [link for link in self.waiting if chunks or link[0] != "chunk"]
            if links:
                self.deliver_next(links[0])
            else:
                self.run_batch(next(n for n, m in self.machines.items() if m.batch is not None))
            self.check()
        raise AssertionError("that does not happen")

    def local(self, name):
        return self.machines[InstanceId(name)].local

    def where(self, name):
        """The instance that the global scheduler believes to run a request."""
        segment = self.scheduler.ledger.requests[RequestId(name)].segment
        return None if segment is None else segment.instance

    def deliver_but(self, kind, *, chunks=True):
        """All messages except those that begin with an event of a kind."""
        while True:
            links = [link for link in self.waiting if chunks or link[0] != "chunk"]
            links = [link for link in links if not isinstance(self.links[link][0][1], kind)]
            if not links:
                return
            self.deliver_next(links[0])

"""A cluster in virtual time: carries out what the schedulers ask, and tells them what happened.

The schedulers are the ones that serve (``families/assemble``); this file only knows how long
things take. Every message is delivered after a delay, in order per link. A batch takes what
the true cost model says and does what ``Executors`` says.

Events are ordered by (time, priority, sequence): at equal times batches end first, then
answers of machines and solvers come, then messages, then clients act; within a priority in
the order of their making. So one seed is one run.

Deviations from a live cluster: tokens reach the frontend when their batch ends (the way of a
message later, in truth); the control loop handles an event in no time (its measured
microseconds are reported instead); the KV of a lost or moved request costs what its next
recompute step costs.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

from stepserve.control.global_scheduler import GlobalScheduler
from stepserve.control.local_scheduler import LocalScheduler
from stepserve.control.supervisor import Supervisor
from stepserve.core.actions import (
    Finish,
    FreeState,
    LoadState,
    Predict,
    Rebuild,
    Reject,
    Report,
    RunBatch,
    Send,
    SolvePlan,
    Stop,
)
from stepserve.core.errors import StepserveError
from stepserve.core.events import (
    BatchDone,
    GlobalEvent,
    HandoverStalled,
    InstanceLost,
    InstanceStopped,
    InstanceUp,
    LocalEvent,
    PlanSolved,
    Predicted,
    RequestArrived,
    RequestCancelled,
    SegmentEnded,
    SegmentPlaced,
)
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.instance import InstanceSpec
from stepserve.core.plan import ClusterPlan, Planner
from stepserve.core.protocols import CostModel, StepPredictor
from stepserve.core.request import FinishReason, Request
from stepserve.core.segment import SegmentEnd
from stepserve.core.step import Batch

from .delays import Delays
from .executors import Executors
from .faults import FaultConfig, Faults
from .instance import (
    ANSWER,
    BATCH_ENDS,
    CLIENT,
    MESSAGE,
    Instance,
    Learn,
    OnHandled,
    Timed,
    untimed,
)
from .record import RequestRecord
from .transfers import Transfers

Event = tuple[float, int, int, Callable[[Any, Any], None], Any, Any]


class World:
    """Global and local schedulers, clients, machines and faults."""

    def __init__(
        self,
        make_global: Callable[[], GlobalScheduler],
        make_local: Callable[[InstanceSpec], LocalScheduler],
        *,
        executors: Executors,
        record: Callable[[Request, int], RequestRecord],
        truth: CostModel,
        predictor: StepPredictor,
        planner: Planner | None = None,
        delays: Delays | None = None,
        faults: Faults | None = None,
        transfers: Transfers | None = None,
        learn: Sequence[Learn] = (),
        timed: Timed = untimed,
        on_handled: OnHandled | None = None,
    ) -> None:
        """``record`` makes that of a request. ``truth``: true seconds of a batch. ``transfers``:
        where requests move with their keys and values. ``learn``: told of every executed step.
        ``timed`` wraps the parts that are called, for those who measure them.
        """
        self.now_s = 0.0
        self.records: dict[RequestId, RequestRecord] = {}
        self.instances: dict[InstanceId, Instance] = {}
        self.delays = delays or Delays()
        self.faults = faults or Faults(FaultConfig(), 0)
        self.after_event: Callable[[], None] | None = None
        self.layouts: list[tuple[float, InstanceSpec, bool]] = []  # came up, or went
        self.unanswered: dict[RequestId, RequestRecord] = {}
        self.busy_s: dict[InstanceId, float] = defaultdict(float)
        self.batches = 0
        self.events = 0
        self.losses = 0
        self._timed, self._heard = timed, on_handled
        self.supervisor = Supervisor(make_global)
        self._global = self._watched("global", self.supervisor.handle, None, 0)
        self._make_local = make_local
        self._make_record = record
        self._executors = executors
        self._run_steps = timed("outcomes", executors.run)
        self._true_s = truth.step_time_s
        self._predict = timed("predictor", predictor.remaining_steps)
        self._planner = planner
        self.transfers = transfers
        if transfers is not None:
            transfers.attach(self)
        self._learn = tuple(learn)
        self._slow: dict[InstanceId, float] = {}
        self._incarnations: dict[InstanceId, int] = {}
        self._heap: list[Event] = []
        self._sequence = 0
        self._arrivals: Sequence[Request] = ()

    # -- the run

    def start(self, specs: Sequence[InstanceSpec], requests: Sequence[Request]) -> None:
        """Bring the instances up and let the requests, in order of arrival, come."""
        self._slow = self.faults.slowdowns([spec.id for spec in specs])
        self.supervisor.start(specs, starting=specs)
        for spec in specs:
            self._come_up(spec)
        self._arrivals = requests
        self._restart_later()
        if requests:
            self.at(requests[0].arrival_s, CLIENT, self._arrive, 0)

    def at(
        self, when_s: float, priority: int, call: Callable[[Any, Any], None], a: Any, b: Any = None
    ) -> None:
        """Have ``call(a, b)`` happen at a time that has not passed."""
        self._sequence += 1
        heappush(self._heap, (when_s, priority, self._sequence, call, a, b))

    def run(self, limit: int | None = None) -> None:
        """Until nothing more happens. Raises StepserveError after ``limit`` events, if given."""
        heap, after_event = self._heap, self.after_event
        while heap:
            self.events += 1
            if limit is not None and self.events > limit:
                raise StepserveError(f"the world does not come to rest in {limit} events")
            self.now_s, _, _, call, a, b = heappop(heap)
            call(a, b)
            if after_event is not None:
                after_event()

    @property
    def over(self) -> bool:
        """Whether every request has come and has its answer."""
        return not self.unanswered and len(self.records) == len(self._arrivals)

    def _watched(
        self, part: str, handle: Callable[..., Any], spec: InstanceSpec | None, incarnation: int
    ) -> Callable[..., Any]:
        handle, on_handled = self._timed(part, handle), self._heard
        if on_handled is None:
            return handle

        def told(now_s: float, event: Any) -> Any:
            actions = handle(now_s, event)
            on_handled(spec, incarnation, now_s, event, actions)
            return actions

        return told

    # -- clients

    def _arrive(self, index: int, _: None) -> None:
        request = self._arrivals[index]
        if index + 1 < len(self._arrivals):
            self.at(self._arrivals[index + 1].arrival_s, CLIENT, self._arrive, index + 1)
        record = self._make_record(request, index)
        self.records[request.id] = self.unanswered[request.id] = record
        self._executors.arrive(index, request)
        self._tell_global(RequestArrived(request))

    def cancel_at(self, when_s: float, request_id: RequestId) -> None:
        """The client of a request leaves."""
        self.at(when_s, CLIENT, self._cancel, request_id, FinishReason.CANCELLED)

    def _cancel(self, request_id: RequestId, reason: FinishReason) -> None:
        self._tell_global(RequestCancelled(request_id, reason))

    def _answer(self, action: Finish | Reject) -> None:
        record = self.records[action.request_id]
        assert record.answer is None, f"a second answer: {action} after {record.answer}"
        record.answer, record.answered_s = action, self.now_s
        del self.unanswered[action.request_id]
        self._executors.end(action.request_id)

    # -- machines

    def _come_up(self, spec: InstanceSpec, _: None = None) -> None:
        assert spec.id not in self.instances, "two instances of one name"
        incarnation = self._incarnations[spec.id] = self._incarnations.get(spec.id, -1) + 1
        local = self._make_local(spec)
        handle = self._watched("local", local.handle, spec, incarnation)
        instance = Instance(spec, local, handle, self._slow.get(spec.id, 1.0))
        self.instances[spec.id] = instance
        self.layouts.append((self.now_s, spec, True))
        life_s = self.faults.life_s()
        if life_s != float("inf"):
            self.at(self.now_s + life_s, ANSWER, self._fail, instance)
        instance.from_s = self.now_s + self.delays.message_s
        self.at(instance.from_s, MESSAGE, self._announce, instance)

    def _announce(self, instance: Instance, _: None) -> None:
        """Nobody is told of an instance that is lost already."""
        if instance.alive:
            self._tell_global(InstanceUp(instance.spec))

    def _fail(self, instance: Instance, _: None) -> None:
        """An instance that lives long enough is lost, unless the run is over."""
        if instance.alive and not self.over:
            self.lose(instance.spec.id)

    def lose(self, instance_id: InstanceId) -> None:
        """An instance is lost, or believed to be; nothing happens if there is none."""
        instance = self.instances.get(instance_id)
        if instance is None:
            return
        self._remove(instance)
        self._executors.lost(instance_id)
        if self.transfers is not None:
            self.transfers.lost(instance_id)
        self.losses += 1
        for name, running in instance.local.running_requests.items():
            self.records[name].left(running.progress)
        if self.faults.false_alarm():
            self._report_loss(instance.spec)
        else:
            when_s = max(self.now_s, instance.from_s) + self.delays.detect_s
            self.at(when_s, ANSWER, self._report_loss, instance.spec)

    def _report_loss(self, spec: InstanceSpec, _: None = None) -> None:
        """Tell what reached the frontend, also of requests whose last news is under way."""
        reached = [(r.request.id, r.reached()) for r in self.unanswered.values()]
        told = tuple((name, progress) for name, progress in reached if progress is not None)
        self._tell_global(InstanceLost(spec, told))

    def _remove(self, instance: Instance) -> None:
        instance.alive = False
        del self.instances[instance.spec.id]
        self.layouts.append((self.now_s, instance.spec, False))

    def _stopped(self, spec: InstanceSpec, _: None) -> None:
        instance = self.instances.get(spec.id)
        if instance is None:
            return  # lost meanwhile
        assert not instance.local.running_requests, "only an instance that holds nothing is stopped"
        self._remove(instance)
        self._tell_global(InstanceStopped(spec))

    # -- the global scheduler

    def _restart_later(self) -> None:
        after_s = self.faults.restart_s()
        if after_s != float("inf"):
            self.at(self.now_s + after_s, CLIENT, self._restart, None)

    def _restart(self, _: None, __: None) -> None:
        """A new scheduler takes over, unless the run is over."""
        if self.over:
            return
        supervisor = self.supervisor
        events = supervisor.restart(lambda name: self.unanswered[name].reached())
        self._global = self._watched("global", supervisor.handle, None, supervisor.restarts)
        for event in events:
            self._tell_global(event)
        self._restart_later()

    def _tell_global(self, event: GlobalEvent, _: None = None) -> None:
        note = self.supervisor.note
        for action in self._global(self.now_s, event):
            note(action)
            match action:
                case Send(to, sent):
                    instance = self.instances.get(to)
                    if instance is not None:
                        when_s = self.now_s + self.delays.message_s
                        if self.faults.messages_vary:
                            when_s = max(instance.to_s, when_s + self.faults.held_up_s())
                            instance.to_s = when_s
                        self.at(when_s, MESSAGE, self.tell_local, instance, sent)
                    if type(sent) is SegmentPlaced:
                        record = self.records[sent.request.id]
                        record.placed(self.now_s, sent)
                case Predict(request, progress, thresholds):
                    forecast = self._predict(request, progress, thresholds)
                    when_s = self.now_s + self.delays.predict_s
                    self.at(when_s, MESSAGE, self._tell_global, Predicted(request.id, forecast))
                case Finish() | Reject():
                    self._answer(action)
                case Rebuild(spec, after_s):
                    when_s = self.now_s + after_s + self.delays.rebuild_s
                    self.at(when_s, ANSWER, self._come_up, spec)
                case Stop(spec):
                    if spec.id in self.instances:  # not lost meanwhile
                        self.instances[spec.id].retired = True
                    self.at(self.now_s + self.delays.stop_s, ANSWER, self._stopped, spec)
                case SolvePlan(problem):
                    assert self._planner is not None, "only a configured planner is asked"
                    plan = self._planner.plan(problem)
                    when_s = self.now_s + self.delays.plan_s
                    self.at(when_s, ANSWER, self._plan_solved, plan, self.supervisor.scheduler)

    def _plan_solved(self, plan: ClusterPlan, asker: GlobalScheduler) -> None:
        if asker is self.supervisor.scheduler:  # a new one asks anew
            self._tell_global(PlanSolved(plan))

    # -- instances

    def tell_local(self, instance: Instance, event: LocalEvent) -> None:
        """Deliver an event, unless the instance is gone, and carry out what is asked for then."""
        if not instance.alive or instance.retired:
            return
        for action in instance.handle(self.now_s, event):  # isinstance: faster than match here
            if isinstance(action, RunBatch):
                self._run_batch(instance, action)
            elif isinstance(action, Report):
                self._message(instance, action.event)
            elif isinstance(action, Predict):
                request = action.request
                forecast = self._predict(request, action.progress, action.thresholds)
                when_s = self.now_s + self.delays.predict_s
                answer = Predicted(request.id, forecast)
                self.at(when_s, MESSAGE, self.tell_local, instance, answer)
            elif isinstance(action, LoadState):
                self._executors.load(instance.spec.id, action.request, action.progress)
            elif isinstance(action, FreeState):
                self._executors.free(instance.spec.id, action.request_id)
            else:
                assert self.transfers is not None, "requests move with their KV only over links"
                self.transfers.carry(instance, action)

    def _run_batch(self, instance: Instance, run: RunBatch) -> None:
        batch, tokens, _, _, mix = run
        seconds = self._true_s(tokens, len(batch.steps), instance.spec, mix) * instance.slow
        if self.faults.steps_vary:
            seconds *= self.faults.noise()
        stalled_s = seconds + max(0.0, self.delays.warm_up_s - self.now_s)
        self.at(self.now_s + stalled_s, BATCH_ENDS, self._batch_ends, instance, (batch, seconds))

    def _message(self, instance: Instance, event: GlobalEvent) -> None:
        """From an instance to the global scheduler; it arrives even if the instance is lost."""
        if type(event) is SegmentEnded:
            record = self.records[event.segment.request_id]
            record.left(event.progress)
            record.releases += event.end is SegmentEnd.RELEASED
        elif type(event) is HandoverStalled:
            assert self.transfers is not None, "requests are handed over only over links"
            self.transfers.stalled += 1
        when_s = self.now_s + self.delays.message_s
        if self.faults.messages_vary:
            when_s = max(instance.from_s, when_s + self.faults.held_up_s())
            instance.from_s = when_s
        self.at(when_s, MESSAGE, self._tell_global, event)

    def _batch_ends(self, instance: Instance, run: tuple[Batch, float]) -> None:
        if not instance.alive:
            return
        batch, seconds = run
        if not self.faults.rows_fail:
            outcomes = self._run_steps(instance.spec.id, batch)
        else:
            healthy, failed = self.faults.split(batch)
            told = {o.request_id: o for o in (*self._run_steps(instance.spec.id, healthy), *failed)}
            outcomes = tuple(told[step.request_id] for step in batch.steps)
        self.batches += 1
        self.busy_s[instance.spec.id] += seconds
        records = self.records
        for step, outcome in zip(batch.steps, outcomes, strict=True):
            records[step.request_id].take(step, outcome, self.now_s)
        for learn in self._learn:
            for step, outcome in zip(batch.steps, outcomes, strict=True):
                row = instance.local.running_requests[step.request_id]
                learn(row.request, row.progress, outcome, step)
        self.tell_local(instance, BatchDone(batch.id, outcomes, seconds))

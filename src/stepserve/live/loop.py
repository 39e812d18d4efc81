"""The control loop: the global scheduler, driven by events on the asyncio thread.

Every event is handled where and when it is posted, so they have one total order. The loop
owns the live records; instances hold copies of what they need. A scheduler that raises is replaced
by a new one, which asks the instances what they hold (``control.recovery``).
"""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from stepserve.control.global_scheduler import GlobalScheduler
from stepserve.control.supervisor import Supervisor
from stepserve.core.actions import (
    Finish,
    GlobalAction,
    Predict,
    Rebuild,
    Reject,
    Send,
    SolvePlan,
    Stop,
)
from stepserve.core.errors import EventError, StepserveError
from stepserve.core.events import (
    GlobalEvent,
    HandedOff,
    HandoverStalled,
    InstanceLost,
    InstanceUp,
    PlanSolved,
    Predicted,
    RequestArrived,
    RequestCancelled,
    SegmentEnded,
    SegmentPlaced,
    TimerExpired,
)
from stepserve.core.frontend import RequestEnded, RequestRejected
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.instance import InstanceSpec
from stepserve.core.payload import Payload
from stepserve.core.plan import ClusterPlan, Planner, PlanProblem
from stepserve.core.protocols import StepPredictor
from stepserve.core.request import FinishReason, Request
from stepserve.core.segment import SegmentEnd
from stepserve.core.status import ClusterStatus

from .messages import Delivery, InstanceOutput, Present, Submit
from .record import LiveRecord, Updates
from .recording import Handled, Listener
from .transport import Transport

logger = logging.getLogger(__name__)

T = TypeVar("T")

FAILURES, FAILURES_WITHIN_S = 5, 60.0
"""After more failed schedulers than that within so many seconds the server is broken."""


class ControlLoop:
    """Carries out the global scheduler's actions and feeds it events.

    All methods run on the asyncio thread, except ``sink``.
    """

    def __init__(
        self,
        make_scheduler: Callable[[], GlobalScheduler],
        predictor: StepPredictor,
        now_s: Callable[[], float],
        planner: Planner | None = None,
        listeners: Sequence[Listener] = (),
    ) -> None:
        self.supervisor = Supervisor(make_scheduler)
        self._failed_s: deque[float] = deque(maxlen=FAILURES)
        self.records: dict[RequestId, LiveRecord] = {}
        self.now_s = now_s
        self._predictor = predictor
        self._planner = planner
        self._listeners = listeners
        self._events: deque[GlobalEvent] = deque()
        self._busy = False
        self._held: list[InstanceOutput] | None = None  # until another's cluster is taken over
        self.ever_up = False
        self.losses = 0
        self.migrations = 0
        self.lost_ids: set[InstanceId] = set()
        self.broken = False
        self._transport: Transport | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(self, transport: Transport, loop: asyncio.AbstractEventLoop) -> None:
        """Connect the transport that hosts the instances, and the asyncio loop to run on."""
        self._transport = transport
        self._loop = loop

    def start(self, specs: Sequence[InstanceSpec]) -> None:
        """Start the instances that the cluster begins with."""
        self.post(self.supervisor.start(specs))

    def wait_for_take_over(self) -> None:
        """Let outputs of instances wait until ``take_over``."""
        self._held = []

    def take_over(
        self,
        number: int,
        layout: Sequence[InstanceSpec],
        found: Sequence[tuple[Submit, Updates]],
        present: Sequence[Present],
    ) -> None:
        """Go on with the cluster of a scheduler that died with its process.

        ``number``: how many schedulers there were. ``found``: what gateways have. ``present``:
        what instances say of themselves; those that are not up yet will announce themselves.
        """
        for one, updates in found:
            record = LiveRecord(one.request, one.payload, updates)
            record.emitted, record.forwards = len(one.emitted), one.forwards
            record.settled = {token.offset: token for token in one.emitted}
            self.records[one.request.id] = record
        for step in [step for instance in present for step in instance.steps]:
            known = self.records.get(step.step.request_id)
            if known is not None:
                known.recall(step, self.now_s())
        up = [one.spec for one in present if one.up]
        starting = [one.spec for one in present if not one.up]
        open_ = [(record.request, record.progress()) for record in self.records.values()]
        self.ever_up = bool(up)
        self.post(self.supervisor.take_over(number, layout, open_, up, starting))
        for one, _ in found:
            if one.cancelled is not None:
                self.cancel(one.request.id, one.cancelled)
        held, self._held = self._held, None
        for output in held or ():
            self._take(output)

    def status(self) -> ClusterStatus:
        """What the global scheduler knows."""
        return self.supervisor.scheduler.status()

    def restart(self) -> None:
        """Give the cluster a new global scheduler; accepted requests go on."""
        self._replace_scheduler()
        self._handle_waiting()

    def sink(self, output: InstanceOutput) -> None:
        """Take an instance's output, from any thread."""
        self._soon(self._take, output)

    def _soon(self, call: Callable[[T], None], argument: T) -> None:
        """Have something done on the asyncio thread, from any thread."""
        assert self._loop is not None, "attach before starting instances"
        try:
            self._loop.call_soon_threadsafe(call, argument)
        except RuntimeError:  # the loop is closed: the server is gone, nobody waits for this
            logger.debug("dropped at shutdown: %s", argument)

    def submit(self, request: Request, payload: Payload, updates: Updates) -> None:
        """Take a request in; its updates end with an end or a rejection.

        Raises StepserveError for an id that is in use.
        """
        if request.id in self.records:
            raise StepserveError(f"request id {request.id} is in use")
        self.records[request.id] = LiveRecord(request, payload, updates)
        try:
            self.post(RequestArrived(request))
        except Exception:
            self.records.pop(request.id, None)  # nobody will read it
            self.supervisor.forget(request.id)
            raise

    def cancel(self, request_id: RequestId, reason: FinishReason) -> None:
        """Stop a request within one step. Unknown and finished ones are ignored."""
        record = self.records.get(request_id)
        if record is not None:
            self.post(RequestCancelled(request_id, reason))

    def post(self, event: GlobalEvent) -> None:
        """Handle an event, and the events that its actions cause, in order."""
        self._events.append(event)
        self._handle_waiting()

    def _handle_waiting(self) -> None:
        """Handle the events that wait, unless somebody is at it.

        The request that a scheduler fails on ends with an error; a new scheduler goes on with
        all others.
        """
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                event = self._events.popleft()
                try:
                    self._handle(event)
                except Exception as error:
                    if isinstance(error, EventError):
                        event = error.event
                    if not self._may_go_on():
                        self.broken = True  # whoever posted hears of it; so does /health
                        raise
                    logger.exception("the scheduler failed on %s: a new one takes over", event)
                    self._failed_s.append(self.now_s())
                    self._give_up(event)
                    self._replace_scheduler()
        finally:
            self._busy = False

    def _may_go_on(self) -> bool:
        recent, now_s = self._failed_s, self.now_s()
        return len(recent) < FAILURES or now_s - recent[0] > FAILURES_WITHIN_S

    def _give_up(self, event: GlobalEvent) -> None:
        """End the request that an event was about: it may be what the scheduler fails on."""
        match event:
            case RequestArrived(request):
                request_id = request.id
            case SegmentEnded(segment):
                request_id = segment.request_id
            case Predicted(request_id) | RequestCancelled(request_id) | HandoverStalled(request_id):
                pass
            case _:
                return
        self.supervisor.forget(request_id)
        record = self.records.pop(request_id, None)
        if record is not None:
            report = record.report(self.now_s(), FinishReason.ERROR)
            error = "the scheduler failed on this request"
            record.updates.put_nowait(RequestEnded(FinishReason.ERROR, report, error))

    def _replace_scheduler(self) -> None:
        """A new one, and what it has to know: all that is open, and where instances are."""
        started, *cancels = self.supervisor.restart(lambda name: self.records[name].progress())
        self._events.appendleft(started)
        self._events.extend(cancels)

    def find_lost(self) -> None:
        """Ask the transport for lost instances and let the scheduler deal with them."""
        assert self._transport is not None, "attach before looking for lost instances"
        for spec in self._transport.lost():
            logger.warning("instance %s is lost", spec.id)
            self.losses += 1
            self.lost_ids.add(spec.id)
            reached = tuple((name, record.progress()) for name, record in self.records.items())
            self.post(InstanceLost(spec, reached))

    def _take(self, output: InstanceOutput) -> None:
        if self._held is not None:
            self._held.append(output)
            return
        try:
            self._account(output)
        except Exception:  # a bug here would leave requests waiting for ever: say so to /health
            logger.exception("output of %s could not be handled", output.instance)
            self.broken = True

    def _account(self, output: InstanceOutput) -> None:
        assert self._transport is not None, "outputs come from the transport"
        if not self._transport.current(output):
            return
        now_s = self.now_s()
        for step in output.steps:
            record = self.records.get(step.step.request_id)
            if record is not None:
                record.take(step, now_s)
        for event in output.events:
            self.ever_up |= isinstance(event, InstanceUp)
            if isinstance(event, SegmentEnded):
                self._note_release(event)
            self.post(event)
        for to, delivery in output.peers:
            self._pass_on(to, delivery)
        assert self._loop is not None, "attached together"
        origin = InstanceOutput(output.instance, output.incarnation)  # without what it carried
        for after_s, expired in output.later:
            self._loop.call_later(after_s, self._remind, origin, expired)

    def _pass_on(self, to: InstanceId, delivery: Delivery) -> None:
        """From one instance to another; a hand-over brings the tokens that reached us along."""
        assert self._transport is not None, "instances announce themselves first"
        if isinstance(delivery.event, HandedOff):
            record = self.records.get(delivery.event.request_id)
            if record is None:
                return  # it is over
            delivery = Delivery(delivery.event, record.payload, record.token_ids())
        self._transport.deliver(to, delivery)

    def _remind(self, origin: InstanceOutput, event: TimerExpired) -> None:
        assert self._transport is not None, "outputs come from the transport"
        if self._transport.current(origin):
            self._transport.deliver(origin.instance, Delivery(event))

    def _note_release(self, event: SegmentEnded) -> None:
        record = self.records.get(event.segment.request_id)
        if record is not None and self.supervisor.scheduler.runs(event.segment):
            record.released = event.end is SegmentEnd.RELEASED

    def _handle(self, event: GlobalEvent) -> None:
        now_s, started_s = self.now_s(), time.perf_counter()
        actions: list[GlobalAction] = []
        try:
            actions = self.supervisor.handle(now_s, event)
        finally:  # also what it failed on is noted
            seconds = time.perf_counter() - started_s
            handled = Handled(None, self.supervisor.restarts, now_s, event, tuple(actions), seconds)
            for listen in self._listeners:
                listen(handled)
        for action in actions:
            logger.debug("%s", action)
            self.supervisor.note(action)
            self._carry_out(action)

    def _carry_out(self, action: GlobalAction) -> None:
        match action:
            case Send():
                self._send(action)
            case Predict():
                forecast = self._predictor.remaining_steps(
                    action.request, action.progress, action.thresholds
                )
                self._events.append(Predicted(action.request.id, forecast))
            case Rebuild():
                assert self._transport is not None, "lost instances come from the transport"
                assert self._loop is not None, "attached together"
                self._loop.call_later(action.after_s, self._transport.start, action.spec)
            case Stop():
                assert self._transport is not None, "instances announce themselves first"
                self._transport.stop(action.spec)
            case SolvePlan():
                logger.info("planning: %s", action.why)
                work = action.problem, self.supervisor.scheduler
                solve = threading.Thread(target=self._solve, args=work, daemon=True)
                solve.start()
            case Reject():
                record = self.records.pop(action.request_id)
                refused = RequestRejected(action.retry_after_s, action.why, action.reason)
                record.updates.put_nowait(refused)
            case Finish():
                record = self.records.pop(action.request_id)
                report = record.report(self.now_s(), action.reason)
                ended = RequestEnded(action.reason, report, action.error)
                record.updates.put_nowait(ended)

    def _solve(self, problem: PlanProblem, asker: GlobalScheduler) -> None:
        """Ask the planner, on a thread of its own. Without an answer, all stays as it is."""
        plan = ClusterPlan(problem.present, problem.thresholds[-1], -math.inf, "kept: no answer")
        try:
            if self._planner is not None:
                plan = self._planner.plan(problem)
        except Exception:
            logger.exception("no plan for %s", problem)
        logger.info("planned: %s, %s", [slot.tp_degree for slot in plan.slots], plan.why)
        self._soon(self._take_plan, (plan, asker))

    def _take_plan(self, solved: tuple[ClusterPlan, GlobalScheduler]) -> None:
        plan, asker = solved
        if asker is not self.supervisor.scheduler:
            return  # a new one asks anew
        try:
            self.post(PlanSolved(plan))
        except Exception:
            logger.exception("the plan could not be handled")

    def _send(self, action: Send) -> None:
        assert self._transport is not None, "instances announce themselves first"
        event = action.event
        if isinstance(event, SegmentPlaced):
            record = self.records[event.request.id]
            if event.source is None:
                self.migrations += record.released
                record.place(event.segment.epoch)
            self._transport.deliver(action.to, Delivery(event, record.payload, record.token_ids()))
        else:
            self._pass_on(action.to, Delivery(event))

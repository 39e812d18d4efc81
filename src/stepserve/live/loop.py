"""The control loop: the global scheduler, driven by events on the asyncio thread.

Every event is handled where and when it is posted, so they have one total order. The loop
owns the live records; instances hold copies of what they need.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from stepserve.control.global_scheduler import GlobalScheduler
from stepserve.core.actions import Finish, GlobalAction, Predict, Rebuild, Reject, Send
from stepserve.core.errors import StepserveError
from stepserve.core.events import (
    GlobalEvent,
    InstanceLost,
    InstanceUp,
    Predicted,
    RequestArrived,
    RequestCancelled,
    SegmentPlaced,
)
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.payload import Payload
from stepserve.core.protocols import RequestEnded, RequestRejected, StepPredictor
from stepserve.core.request import FinishReason, Progress, Request

from .messages import Delivery, InstanceOutput
from .record import LiveRecord
from .recording import Recorder
from .transport import Transport

logger = logging.getLogger(__name__)


class ControlLoop:
    """Carries out the global scheduler's actions and feeds it events.

    All methods run on the asyncio thread, except ``sink``.
    """

    def __init__(
        self,
        scheduler: GlobalScheduler,
        predictor: StepPredictor,
        now_s: Callable[[], float],
        recorder: Recorder | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.records: dict[RequestId, LiveRecord] = {}
        self.now_s = now_s
        self._predictor = predictor
        self._recorder = recorder
        self._events: deque[GlobalEvent] = deque()
        self._busy = False
        self.ever_up = False
        self.losses = 0
        self.lost_ids: set[InstanceId] = set()
        self.broken = False
        self._transport: Transport | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(self, transport: Transport, loop: asyncio.AbstractEventLoop) -> None:
        """Connect the transport that hosts the instances, and the asyncio loop to run on."""
        self._transport = transport
        self._loop = loop

    def sink(self, output: InstanceOutput) -> None:
        """Take an instance's output, from any thread."""
        assert self._loop is not None, "attach before starting instances"
        try:
            self._loop.call_soon_threadsafe(self._take, output)
        except RuntimeError:  # the loop is closed: the server is gone, nobody waits for this
            logger.debug("output of %s dropped at shutdown", output.instance)

    def submit(self, request: Request, payload: Payload) -> LiveRecord:
        """Take a request in; its record's updates end with an end or a rejection.

        Raises StepserveError for an id that is in use.
        """
        if request.id in self.records:
            raise StepserveError(f"request id {request.id} is in use")
        record = LiveRecord(request, payload)
        self.records[request.id] = record
        self.post(RequestArrived(request))
        return record

    def cancel(self, request_id: RequestId, reason: FinishReason) -> None:
        """Stop a request within one step. Unknown and finished ones are ignored."""
        if request_id in self.records:
            self.post(RequestCancelled(request_id, reason))

    def post(self, event: GlobalEvent) -> None:
        """Handle an event, and the events that its actions cause, in order."""
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                self._handle(self._events.popleft())
        except Exception:
            self.broken = True  # whoever posted hears of it; so does /health
            raise
        finally:
            self._busy = False

    def find_lost(self) -> None:
        """Ask the transport for lost instances and let the scheduler deal with them."""
        assert self._transport is not None, "attach before looking for lost instances"
        for spec in self._transport.lost():
            logger.warning("instance %s is lost", spec.id)
            self.losses += 1
            self.lost_ids.add(spec.id)
            self.post(InstanceLost(spec, self._reached(spec.id)))

    def _reached(self, instance: InstanceId) -> tuple[tuple[RequestId, Progress], ...]:
        placed = self.scheduler.ledger.instances.get(instance)
        ids = () if placed is None else tuple(placed.placed)
        return tuple((request_id, self.records[request_id].progress()) for request_id in ids)

    def _take(self, output: InstanceOutput) -> None:
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
            self.post(event)

    def _handle(self, event: GlobalEvent) -> None:
        now_s = self.now_s()
        actions = self.scheduler.handle(now_s, event)
        if self._recorder is not None:
            self._recorder.note(None, 0, now_s, event, actions)
        for action in actions:
            logger.debug("%s", action)
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
            case Reject():
                record = self.records.pop(action.request_id)
                record.updates.put_nowait(RequestRejected(action.retry_after_s, action.why))
            case Finish():
                record = self.records.pop(action.request_id)
                report = record.report(self.now_s(), action.reason)
                ended = RequestEnded(action.reason, report, action.error)
                record.updates.put_nowait(ended)

    def _send(self, action: Send) -> None:
        assert self._transport is not None, "instances announce themselves first"
        event = action.event
        if isinstance(event, SegmentPlaced):
            record = self.records[event.request.id]
            record.epoch = event.segment.epoch
            settled = {token.offset: token.token_id for token in record.settled.values()}
            delivery = Delivery(event, record.payload, settled)
        else:
            delivery = Delivery(event)
        self._transport.deliver(action.to, delivery)

"""One instance: its local scheduler and its executor, taking turns.

No threads and no queues here: a transport calls ``receive`` and ``run_batch`` from wherever
it hosts the instance (a thread, an actor).
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence

from stepserve.control.local_scheduler import LocalScheduler
from stepserve.core.actions import (
    FreeState,
    LoadState,
    LocalAction,
    Predict,
    PushChunk,
    Report,
    RunBatch,
    StartTimer,
    Tell,
)
from stepserve.core.events import (
    BatchDone,
    ChunkLanded,
    GlobalEvent,
    HandedOff,
    LocalEvent,
    Predicted,
    SegmentPlaced,
    TimerExpired,
)
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.payload import KvChunk
from stepserve.core.protocols import BatchResult, Executor, KvPages, StepPredictor
from stepserve.core.request import FinishReason
from stepserve.core.step import Batch, StepOutcome

from .messages import Delivery, InstanceOutput, StepRecord
from .recording import Handled, Listener

logger = logging.getLogger(__name__)


class Instance:
    """Carries out what the local scheduler asks, and tells it what came of it."""

    def __init__(
        self,
        scheduler: LocalScheduler,
        executor: Executor,
        predictor: StepPredictor,
        now_s: Callable[[], float],
        incarnation: int,
        listeners: Sequence[Listener] = (),
    ) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._predictor = predictor
        self._now_s = now_s
        self._incarnation = incarnation
        self._listeners = listeners
        self._batch: Batch | None = None
        self._composed_s = 0.0
        self._epochs: dict[RequestId, int] = {}
        self._handed: dict[RequestId, Delivery] = {}  # tokens of what is about to begin here
        self._refused: dict[RequestId, str] = {}  # what the executor would not hold, and why
        self._steps: list[StepRecord] = []
        self._events: list[GlobalEvent] = []
        self._peers: list[tuple[InstanceId, Delivery]] = []
        self._later: list[tuple[float, TimerExpired]] = []

    @property
    def has_batch(self) -> bool:
        """Whether a batch waits to be run."""
        return self._batch is not None

    def receive(self, delivery: Delivery) -> InstanceOutput:
        """Take a delivered event; returns what is to be told to the control loop."""
        event = delivery.event
        if isinstance(event, ChunkLanded):
            assert delivery.chunk is not None, "the copy comes along"
            event = dataclasses.replace(event, intact=self._import(delivery.chunk))
        elif isinstance(event, HandedOff) and self._holds(event):
            self._handed[event.request_id] = delivery
        self._handle(event, delivery)
        return self._flush()

    def _import(self, chunk: KvChunk) -> bool:
        """Whether keys and values that were pushed here are good, and are kept."""
        return self._holds(chunk) and self._kv().import_kv(chunk)

    def _holds(self, of: KvChunk | HandedOff) -> bool:
        """Whether the hand-over is still of interest; if not, the scheduler ignores it as well."""
        return self._epochs.get(of.request_id) == of.epoch

    def _kv(self) -> KvPages:
        executor = self._executor
        assert isinstance(executor, KvPages), "hand-overs are placed on executors that can"
        return executor

    def run_batch(self) -> InstanceOutput:
        """Run the waiting batch and settle it; the next batch may then be waiting.

        A batch's seconds count from when it was composed: deadlines pay for the host's
        overhead, so the step-time table must know of it (DiLaServe D5).
        """
        batch = self._batch
        assert batch is not None, "run_batch without a batch"
        self._batch = None
        started_s = self._now_s()
        result = self._executor.run(batch)
        outcomes = tuple(self._explained(outcome) for outcome in result.outcomes)
        self._record_steps(batch, outcomes, result, started_s)
        seconds = self._now_s() - self._composed_s
        self._handle(BatchDone(batch.id, outcomes, seconds), None)
        return self._flush()

    def close(self) -> None:
        """End the processes of the executor, if it has any."""
        self._executor.close()

    def _explained(self, outcome: StepOutcome) -> StepOutcome:
        """A request that could not be loaded fails with the reason of that."""
        refusal = self._refused.get(outcome.request_id)
        if refusal is None:
            return outcome
        return outcome._replace(error=refusal, finished=FinishReason.ERROR)

    def _record_steps(
        self,
        batch: Batch,
        outcomes: tuple[StepOutcome, ...],
        result: BatchResult,
        started_s: float,
    ) -> None:
        running_requests = self.scheduler.running_requests
        for step, outcome in zip(batch.steps, outcomes, strict=True):
            request_id = step.request_id
            running = running_requests[request_id]
            self._predictor.learn(running.request, running.progress, outcome, step)
            tokens = result.settled.get(request_id, ())
            epoch = self._epochs[request_id]
            self._steps.append(StepRecord(step, outcome, tokens, epoch, started_s))

    def _handle(self, event: LocalEvent, delivery: Delivery | None) -> None:
        now_s = self._now_s()
        started_s = time.perf_counter()
        actions = self.scheduler.handle(now_s, event)
        seconds = time.perf_counter() - started_s
        spec = self.scheduler.spec
        handled = Handled(spec, self._incarnation, now_s, event, tuple(actions), seconds)
        for listen in self._listeners:
            listen(handled)
        for action in actions:
            logger.debug("%s: %s", self.scheduler.spec.id, action)
            self._carry_out(action, delivery)

    def _carry_out(self, action: LocalAction, delivery: Delivery | None) -> None:
        match action:
            case LoadState():
                delivery = self._handed.pop(action.request.id, delivery)
                assert delivery is not None, "state is loaded when a segment is delivered"
                self._load(action, delivery)
            case RunBatch():
                self._batch = action.batch
                self._composed_s = self._now_s()
            case FreeState():
                self._executor.remove(action.request_id)
                self._epochs.pop(action.request_id, None)
                self._handed.pop(action.request_id, None)
                self._refused.pop(action.request_id, None)
            case Predict():
                forecast = self._predictor.remaining_steps(
                    action.request, action.progress, action.thresholds
                )
                self._handle(Predicted(action.request.id, forecast), None)
            case Report():
                self._events.append(action.event)
            case Tell():
                self._peers.append((action.to, Delivery(action.event)))
            case PushChunk(to, request_id, epoch, start, stop):
                chunk = self._kv().export_kv(request_id, epoch, start, stop)
                landed = ChunkLanded(request_id, epoch, start, stop)
                self._peers.append((to, Delivery(landed, chunk=chunk)))
            case StartTimer():
                self._later.append((action.after_s, action.event))

    def _load(self, action: LoadState, delivery: Delivery) -> None:
        """A request that cannot be loaded fails by itself, at its first step."""
        if isinstance(delivery.event, SegmentPlaced):
            self._epochs[action.request.id] = delivery.event.segment.epoch
        assert delivery.payload is not None, "a segment that begins brings its payload"
        try:
            self._executor.add(action.request, delivery.payload, action.progress, delivery.settled)
            self._refused.pop(action.request.id, None)
        except Exception as error:  # one request that cannot be held harms nobody else
            logger.exception("request %s cannot be held", action.request.id)
            self._refused[action.request.id] = str(error)

    def _flush(self) -> InstanceOutput:
        output = InstanceOutput(
            self.scheduler.spec.id,
            self._incarnation,
            tuple(self._steps),
            tuple(self._events),
            tuple(self._peers),
            tuple(self._later),
        )
        for said in (self._steps, self._events, self._peers, self._later):
            said.clear()
        return output

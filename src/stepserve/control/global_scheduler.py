"""The cluster's scheduler: admission, the queue, placement, and what to do when things end.

A pure function of (state, time, event), like the local one. A request is in exactly one
place: waiting for its forecast, in the queue, or placed under its current epoch.
"""

import bisect

from stepserve.core.actions import Finish, GlobalAction, Predict, Rebuild, Reject, Send
from stepserve.core.config import ControlConfig
from stepserve.core.events import (
    GlobalEvent,
    InstanceLost,
    InstanceReported,
    InstanceUp,
    Predicted,
    RequestArrived,
    RequestCancelled,
    SegmentEnded,
    SegmentPlaced,
    SegmentReleased,
)
from stepserve.core.ids import RequestId
from stepserve.core.protocols import CostModel, PlacementPolicy, StepProgram
from stepserve.core.request import FinishReason, OnMiss, Request
from stepserve.core.segment import Segment, SegmentEnd

from .admission import completion_s
from .ledger import Ledger, Tracked

PATIENCE_S = 60.0
"""Due time, after arrival, of a request without a deadline: the bound of its starvation."""


class GlobalScheduler:
    """Queues by due time, places by policy, and never loses a request it accepted."""

    def __init__(
        self,
        config: ControlConfig,
        program: StepProgram,
        placement: PlacementPolicy,
        cost: CostModel,
    ) -> None:
        self._config = config
        self._program = program
        self._placement = placement
        self._cost = cost
        self.ledger = Ledger(program)
        self._queue: list[tuple[float, float, RequestId]] = []  # (due, arrival, id), sorted

    @property
    def queued(self) -> int:
        """Requests that wait for room."""
        return len(self._queue)

    def handle(self, now_s: float, event: GlobalEvent) -> list[GlobalAction]:
        """Take one event into account and return what is to be done, in order."""
        match event:
            case RequestArrived():
                return self._arrive(event.request)
            case Predicted():
                return self._admit(now_s, event)
            case RequestCancelled():
                return self._cancel(event)
            case SegmentEnded():
                return self._end(event) + self._place_queued(now_s)
            case InstanceUp():
                self.ledger.add_instance(event.spec, now_s)
                return self._place_queued(now_s)
            case InstanceReported():
                return self._hear(event)
            case InstanceLost():
                return self._lose(event) + self._place_queued(now_s)

    def _arrive(self, request: Request) -> list[GlobalAction]:
        if request.id in self.ledger.requests:
            return []
        if len(self._queue) >= self._config.queue_limit:
            return [Reject(request.id, 1.0, f"queue is full ({len(self._queue)} waiting)")]
        if not self.ledger.can_ever_hold(request):
            error = "prompt and max_tokens need more KV pages than an instance has"
            return [Finish(request.id, FinishReason.ERROR, error, "can never be placed")]
        progress = self._program.start(request)
        self.ledger.requests[request.id] = Tracked(request, progress)
        return [Predict(request, progress, self._candidates(request), "arrived")]

    def _candidates(self, request: Request) -> tuple[float, ...]:
        """The thresholds a request may run at, highest first."""
        bounds = request.diffusion.thresholds
        between = [t for t in self._config.thresholds if bounds.floor < t < bounds.preferred]
        ends = {bounds.preferred, bounds.floor}
        return tuple(sorted(ends.union(between), reverse=True))

    def _admit(self, now_s: float, event: Predicted) -> list[GlobalAction]:
        tracked = self.ledger.requests.get(event.request_id)
        if tracked is None or tracked.forecast is not None:
            return []
        tracked.forecast = event.forecast
        request = tracked.request
        if request.slo.on_miss is OnMiss.REJECT and request.deadline_s is not None:
            left_s = request.deadline_s - now_s
            need_s = completion_s(
                request,
                tracked.progress,
                event.forecast,
                self.ledger.loads(),
                len(self._queue),
                self._program,
                self._cost,
            )
            if need_s > left_s:
                del self.ledger.requests[request.id]
                why = f"predicted {need_s:.3f} s, deadline in {left_s:.3f} s"
                return [Reject(request.id, max(1.0, min(60.0, need_s - left_s)), why)]
        self._enqueue(tracked)
        return self._place_queued(now_s)

    def _enqueue(self, tracked: Tracked) -> None:
        request = tracked.request
        due_s = request.deadline_s or request.arrival_s + PATIENCE_S
        bisect.insort(self._queue, (due_s, request.arrival_s, request.id))

    def _place_queued(self, now_s: float) -> list[GlobalAction]:
        """Place from the head of the queue until its head fits nowhere."""
        actions: list[GlobalAction] = []
        while self._queue:
            tracked = self.ledger.requests[self._queue[0][2]]
            view = self.ledger.view(tracked.request, now_s)
            if not view.loads:
                break
            self._queue.pop(0)
            for segment in self._placement.place(tracked.request, tracked.progress, view):
                actions.append(self._send_segment(tracked, self.ledger.assign(tracked, segment)))
        return actions

    def _send_segment(self, tracked: Tracked, segment: Segment) -> GlobalAction:
        forecast = tracked.forecast
        assert forecast is not None, "queued requests have a forecast"
        placed = SegmentPlaced(segment, tracked.request, tracked.progress, forecast)
        instance = self.ledger.instances[segment.instance]
        why = f"epoch {segment.epoch}, {len(instance.placed)} residents there"
        return Send(segment.instance, placed, why)

    def _cancel(self, event: RequestCancelled) -> list[GlobalAction]:
        tracked = self.ledger.requests.get(event.request_id)
        if tracked is None or tracked.cancelled is not None:
            return []
        if tracked.segment is not None:
            tracked.cancelled = event.reason
            release = SegmentReleased(event.request_id, tracked.epoch)
            return [Send(tracked.segment.instance, release, "cancelled")]
        self._queue = [row for row in self._queue if row[2] != event.request_id]
        return [self._finish(tracked, event.reason, None, "cancelled before it was placed")]

    def _end(self, event: SegmentEnded) -> list[GlobalAction]:
        tracked = self.ledger.requests.get(event.segment.request_id)
        if tracked is None or tracked.segment != event.segment:
            return []  # an older epoch
        self.ledger.unassign(tracked)
        tracked.progress = event.progress
        if event.end is SegmentEnd.FAILED:
            return [self._finish(tracked, FinishReason.ERROR, event.error, "step failed")]
        if event.end is SegmentEnd.FINISHED:
            reason = event.progress.finished or FinishReason.STOP
            return [self._finish(tracked, reason, None, f"{event.progress.steps} steps")]
        return self._resume(tracked)

    def _resume(self, tracked: Tracked) -> list[GlobalAction]:
        """A request that lost its place: gone if it was cancelled, else back to the queue."""
        if tracked.cancelled is not None:
            return [self._finish(tracked, tracked.cancelled, None, "released as asked")]
        self._enqueue(tracked)
        return []

    def _finish(
        self, tracked: Tracked, reason: FinishReason, error: str | None, why: str
    ) -> GlobalAction:
        del self.ledger.requests[tracked.request.id]
        return Finish(tracked.request.id, reason, error, why)

    def _hear(self, event: InstanceReported) -> list[GlobalAction]:
        instance = self.ledger.instances.get(event.report.instance)
        if instance is not None:
            instance.report = event.report
            if event.report.measured is not None:
                batch, seconds = event.report.measured
                self._cost.observe(batch.steps, instance.spec, seconds)
        return []

    def _lose(self, event: InstanceLost) -> list[GlobalAction]:
        """Re-queue what was there, from what reached the frontend, and ask for a rebuild."""
        instance = self.ledger.instances.pop(event.instance, None)
        if instance is None:
            return []
        reached = dict(event.progress)
        actions: list[GlobalAction] = [Rebuild(instance.spec, "instance lost")]
        for request_id in instance.placed:
            tracked = self.ledger.requests[request_id]
            tracked.segment = None
            tracked.progress = reached.get(request_id, tracked.progress)
            actions += self._resume(tracked)
        return actions

"""The scheduler of one instance: which running requests step next, at which threshold.

A pure function of (state, time, event): it reads no clock, does no I/O, draws no random
number. At most one batch runs at a time; whenever none runs and a request can step, one is
composed.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from stepserve.core.actions import (
    FreeState,
    LoadState,
    LocalAction,
    Predict,
    Report,
    RunBatch,
    StartTimer,
    Tell,
)
from stepserve.core.events import (
    BatchDone,
    CapsSet,
    HandoverAcknowledged,
    HandoverPrepared,
    InstanceFound,
    InstanceReported,
    LocalEvent,
    Predicted,
    SegmentEnded,
    SegmentExtended,
    SegmentPlaced,
    SegmentReleased,
    StateAsked,
    TimerExpired,
)
from stepserve.core.ids import RequestId
from stepserve.core.instance import HeldSegment, InstanceSpec, RunningReport
from stepserve.core.protocols import (
    BatchingPolicy,
    CostModel,
    RefreshPolicy,
    StepProgram,
    ThresholdPolicy,
)
from stepserve.core.request import Progress
from stepserve.core.running import RunningRequest
from stepserve.core.segment import HandoverStage, ReleasePoint, Segment, SegmentEnd
from stepserve.core.step import Batch, Mix, Step

from .handover import PREPARE_S, HandoverEvent, Inbound, Outbound
from .pages import PageLedger, pages_for, segment_tokens


class LocalScheduler:
    """Holds the running requests of one instance and composes its batches."""

    def __init__(
        self,
        spec: InstanceSpec,
        program: StepProgram,
        batching: BatchingPolicy,
        threshold: ThresholdPolicy,
        refresh: RefreshPolicy | None,
        cost: CostModel,
        predict_every_tokens: int,
        report_every_s: float,
        push_pages: int,
    ) -> None:
        self.spec = spec
        self._program = program
        self._batching = batching
        self._threshold = threshold
        self._refresh = refresh
        self._cost = cost
        self._predict_every_tokens = predict_every_tokens
        self._report_every_s = report_every_s
        self._next_report_s = -math.inf
        self._push_pages = push_pages
        self.running_requests: dict[RequestId, RunningRequest] = {}
        self.inbound: dict[RequestId, Inbound] = {}  # not running here yet
        self._early: dict[RequestId, HandoverPrepared] = {}
        self.outbound: dict[RequestId, Outbound] = {}  # at their stop, they run no more
        self.pages = PageLedger(spec.page_capacity)
        self._batch: Batch | None = None
        self._batch_tokens, self._predicted_s = 0, 0.0  # of the running batch
        self._batch_mix = program.mix(())
        self._chunked = program.chunked
        self._measured: tuple[tuple[int, int, float] | None, Mix | None] = None, None
        self._next_batch_id = 0

    def handle(self, now_s: float, event: LocalEvent) -> list[LocalAction]:
        """Take one event into account and return what is to be done, in order."""
        match event:  # the most frequent first
            case BatchDone():
                actions = self._settle(now_s, event)
            case Predicted():
                actions = self._take_forecast(event)
            case SegmentPlaced():
                actions = self._join(now_s, event)
            case SegmentReleased():
                actions = self._release(event)
            case CapsSet():
                actions = self._take_caps(event)
            case StateAsked():
                actions = [Report(InstanceFound(event.scheduler, self.spec, self._held()), "asked")]
                for outbound in self.outbound.values():
                    actions += outbound.stalled()
            case _:
                actions = self._hand_over(now_s, event)
        if self._batch is None and self.running_requests:
            actions += self._start_batch(now_s)
        return actions

    def _join(self, now_s: float, event: SegmentPlaced) -> list[LocalAction]:
        request, segment = event.request, event.segment
        tokens = segment_tokens(self._program.kv_tokens(request), segment.stop)
        pages = pages_for(tokens, self.spec.page_tokens)
        self.pages.reserve(request.id, pages)
        actions: list[LocalAction] = []
        if segment.stop is not None:
            outbound = Outbound(segment, self.spec.page_tokens, self._push_pages)
            self.outbound[request.id] = outbound
            early = self._early.pop(request.id, None)
            if early is not None and early.epoch == outbound.epoch:
                outbound.hear(early)
            actions.append(outbound.timer(PREPARE_S, HandoverStage.PREPARE))
        why = f"epoch {segment.epoch}, {pages} pages, {self.pages.free} left"
        if event.source is None:
            return self._seat(now_s, event, event.progress, why) + actions
        self.inbound[request.id] = Inbound(event)
        prepared = HandoverPrepared(request.id, segment.epoch, self.spec.id)
        load = LoadState(request, event.progress, why)
        return [load, Tell(event.source, prepared, why), *actions]

    def _seat(
        self, now_s: float, event: SegmentPlaced, progress: Progress, why: str
    ) -> list[LocalAction]:
        """A placed request begins to run here."""
        request, program = event.request, self._program
        self.running_requests[request.id] = running = RunningRequest(
            request=request,
            segment=event.segment,
            progress=progress,
            forecast=event.forecast,
            heavy_tokens=program.heavy_tokens(request),
            light_tokens=program.light_tokens(request),
            heavy_left=program.heavy_left(request, progress, event.forecast.output_tokens),
            forecast_settled=progress.settled,
            cap=event.cap,
            joined_s=now_s,
            last_token_s=now_s,
        )
        if event.segment.stop is not None:
            self.outbound[request.id].running = running
        return [LoadState(request, progress, why)]

    def _hand_over(self, now_s: float, event: HandoverEvent) -> list[LocalAction]:
        """Events of either side of a hand-over. Its epoch is that of the successor's segment."""
        request_id = event.request_id
        inbound, outbound = self.inbound.get(request_id), self.outbound.get(request_id)
        if inbound is not None and inbound.placed.segment.epoch == event.epoch:
            return inbound.hear(event) + self._begin(now_s, inbound)
        if outbound is None or outbound.epoch != event.epoch:
            return self._overtook(event)
        if isinstance(event, SegmentExtended):
            return self._extend(outbound, event.segment)
        if outbound.ends(event):
            assert outbound.running is not None, "it has come to its stop"
            progress = outbound.running.progress
            return self._end(outbound.segment, progress, SegmentEnd.HANDED_OFF, None)
        return outbound.hear(event)

    def _overtook(self, event: HandoverEvent) -> list[LocalAction]:
        """A successor may be ready before the segment it follows is here: known for a while."""
        request_id, epoch = event.request_id, event.epoch
        if isinstance(event, HandoverPrepared):
            self._early[request_id] = event
            expired = TimerExpired(request_id, epoch, HandoverStage.PREPARE)
            return [StartTimer(PREPARE_S, expired, "prepared for what is not here")]
        early = self._early.get(request_id)
        if early is not None and early.epoch == epoch and isinstance(event, TimerExpired):
            del self._early[request_id]
        return []

    def _begin(self, now_s: float, inbound: Inbound) -> list[LocalAction]:
        """Run what was handed over, if all that it waits for has come."""
        progress, event = inbound.begins, inbound.placed
        if progress is None:
            return []
        segment, source = event.segment, event.source
        assert source is not None, "an inbound segment has one"
        del self.inbound[event.request.id]
        why = f"epoch {segment.epoch}, goes on at {progress.settled}"
        acknowledged = HandoverAcknowledged(event.request.id, segment.epoch)
        return [*self._seat(now_s, event, progress, why), Tell(source, acknowledged, why)]

    def _extend(self, outbound: Outbound, segment: Segment) -> list[LocalAction]:
        """Go on beyond the stop, where that has been reached, too."""
        request_id, running = segment.request_id, outbound.running
        del self.outbound[request_id]
        if running is None:
            inbound = self.inbound[request_id]
            inbound.placed = event = replace(inbound.placed, segment=segment)
            request = event.request
        else:
            running.segment, request = segment, running.request
            self.running_requests[request_id] = running
        pages = pages_for(self._program.kv_tokens(request), self.spec.page_tokens)
        held = self.pages.resize(request_id, pages)
        assert held, "the global scheduler has reserved them"
        return []

    def _release(self, event: SegmentReleased) -> list[LocalAction]:
        request_id, epoch = event.request_id, event.epoch
        inbound, outbound = self.inbound.get(request_id), self.outbound.get(request_id)
        if inbound is not None and inbound.placed.segment.epoch == epoch:
            segment = inbound.placed.segment
            return self._end(segment, inbound.progress, SegmentEnd.RELEASED, None)
        running = self.running_requests.get(request_id)
        if running is None and outbound is not None:
            running = outbound.running  # at its stop
        if running is None or running.segment.epoch != epoch:
            return []
        if running.release is not ReleasePoint.STEP:  # nothing is sooner than that
            running.release = event.at
        if self._runs(request_id) or not self._may_leave(running):
            return []
        end = SegmentEnd.RELEASED
        if outbound is not None and outbound.waits_for is HandoverStage.ACKNOWLEDGE:
            end = SegmentEnd.HANDED_OFF  # the successor may have begun
        return self._end(running.segment, running.progress, end, None)

    def _may_leave(self, running: RunningRequest) -> bool:
        if running.release is ReleasePoint.CUT:
            stateless = not running.has_state  # its next step rebuilds the state anyway
            return stateless or self._program.tokens_to_cut(running.request, running.progress) == 0
        return running.release is ReleasePoint.STEP

    def _take_forecast(self, event: Predicted) -> list[LocalAction]:
        running = self.running_requests.get(event.request_id)
        if running is not None and event.forecast.at_steps >= running.forecast.at_steps:
            running.forecast = event.forecast
            self._count_heavy(running)
        return []

    def _take_caps(self, event: CapsSet) -> list[LocalAction]:
        for request_id, cap in event.caps:
            running = self.running_requests.get(request_id)
            if running is not None:
                running.cap = cap
        return []

    def _settle(self, now_s: float, event: BatchDone) -> list[LocalAction]:
        batch = self._batch
        if batch is None or batch.id != event.batch_id:
            return []
        self._batch = None
        tokens, rows, seconds = self._batch_tokens, len(batch.steps), event.seconds
        mix = self._batch_mix
        self._measured = (tokens, rows, seconds), mix
        if seconds != self._predicted_s:  # else it teaches nothing
            self._cost.observe(tokens, rows, self.spec, seconds, mix)
        actions: list[LocalAction] = []
        running_requests, outbound, advance = (
            self.running_requests,
            self.outbound,
            self._program.advance,
        )
        if self._chunked:
            for step in batch.steps:
                running_requests[step.request_id].last_token_s = now_s
        predict_every_tokens = self._predict_every_tokens
        for step, outcome in zip(batch.steps, event.outcomes, strict=True):
            running = running_requests[step.request_id]
            progress = advance(running.request, running.progress, outcome)
            running.progress = progress
            running.has_state = True
            if step.kind.heavy:
                self._count_heavy(running)
            if (
                progress.settled - running.forecast_settled >= predict_every_tokens
                or progress.finished is not None
                or running.release is not None
                or (outbound and step.request_id in outbound)
            ):
                actions += self._after_step(running, outcome.error)
        if not running_requests:
            actions.append(self._report(now_s, now_s, "idle"))
        return actions

    def _report(self, now_s: float, ends_s: float, why: str) -> LocalAction:
        """One message a batch: what the last one took, until when the next one runs."""
        running_requests = self._running_reports(now_s) if now_s >= self._next_report_s else ()
        (measured, mix), self._measured = self._measured, (None, None)
        return Report(InstanceReported(self.spec.id, ends_s, measured, running_requests, mix), why)

    def _running_reports(self, now_s: float) -> tuple[RunningReport, ...]:
        """What became of everybody, every now and then."""
        self._next_report_s = now_s + self._report_every_s
        return tuple(
            RunningReport(request_id, r.segment.epoch, r.progress, r.forecast)
            for request_id, r in self.running_requests.items()
        )

    def _held(self) -> tuple[HeldSegment, ...]:
        """What runs, what has come to its stop, and what waits to be handed over."""
        paused = [o.running for o in self.outbound.values() if o.running is not None]
        begun = {r.request.id: r for r in (*self.running_requests.values(), *paused)}.values()
        return tuple(
            HeldSegment(r.request, r.segment, r.progress, r.forecast, r.cap, True, bool(r.release))
            for r in begun
        ) + tuple(
            HeldSegment(p.request, p.segment, i.progress, p.forecast, p.cap, False, False)
            for i in self.inbound.values()
            for p in (i.placed,)
        )

    def _after_step(self, running: RunningRequest, error: str | None) -> list[LocalAction]:
        """What follows for a request that goes on for now, ends, or may need a new forecast."""
        request, progress = running.request, running.progress
        segment = running.segment
        actions: list[LocalAction] = []
        if error is not None:
            return self._end(segment, progress, SegmentEnd.FAILED, error)
        if progress.finished is not None:  # also at the stop: there is nothing to hand over
            return self._end(segment, progress, SegmentEnd.FINISHED, None)
        if running.release is not None and self._may_leave(running):
            return self._end(segment, progress, SegmentEnd.RELEASED, None)
        if segment.stop is not None:
            actions = self.outbound[request.id].push()
            if progress.settled >= segment.stop:
                del self.running_requests[request.id]
                return actions
        if progress.settled - running.forecast_settled >= self._predict_every_tokens:
            running.forecast_settled = progress.settled
            thresholds = running.forecast.thresholds
            actions.append(Predict(request, progress, thresholds, "forecast is old"))
        return actions

    def _count_heavy(self, running: RunningRequest) -> None:
        output_tokens = running.forecast.output_tokens
        running.heavy_left = self._program.heavy_left(
            running.request, running.progress, output_tokens
        )

    def _end(
        self, segment: Segment, progress: Progress, end: SegmentEnd, error: str | None
    ) -> list[LocalAction]:
        request_id = segment.request_id
        self.pages.release(request_id)
        self.running_requests.pop(request_id, None)
        self.inbound.pop(request_id, None)
        self.outbound.pop(request_id, None)
        ended = SegmentEnded(segment, end, progress, error)
        return [FreeState(request_id, end.value), Report(ended, end.value)]

    def _start_batch(self, now_s: float) -> list[LocalAction]:
        running_requests, spec = list(self.running_requests.values()), self.spec
        pace = self._batching.pace(running_requests, spec)
        next_step, pick = self._program.next_step, self._threshold.pick
        due = [
            next_step(r.request, r.progress, r.has_state, pick(r, pace, now_s))
            for r in running_requests
        ]
        if self._chunked:
            due = [self._up_to_stop(r, step) for r, step in zip(running_requests, due, strict=True)]
        if len(due) == 1 and not self._chunked:  # nothing to be chosen
            steps = tuple(due)
            running_requests[0].skipped = 0
        else:
            steps = self._batching.compose(
                list(zip(running_requests, due, strict=True)), spec, now_s
            )
            self._count_skips(running_requests, steps)
        if self._refresh is not None:
            steps = self._refresh.upgrade(self.running_requests, steps, pace, spec, now_s)
        tokens = sum([step.query_tokens for step in steps])
        self._batch_mix = mix = self._program.mix(steps)
        seconds = self._cost.step_time_s(tokens, len(steps), spec, mix)
        self._batch = batch = Batch(self._next_batch_id, steps)
        self._batch_tokens, self._predicted_s = tokens, seconds
        self._next_batch_id += 1
        run = RunBatch(batch, tokens, len(running_requests), seconds, mix)
        return [run, self._report(now_s, now_s + seconds, "a batch begins")]

    def _up_to_stop(self, running: RunningRequest, step: Step) -> Step:
        """A prefill ends where the segment does; the rest is the next segment's."""
        stop = running.segment.stop
        if stop is None or stop >= step.context_tokens:
            return step
        start = step.context_tokens - step.query_tokens
        return self._program.shorten(step, stop - start) or step

    def _count_skips(
        self, running_requests: Sequence[RunningRequest], steps: Sequence[Step]
    ) -> None:
        """For how many batches in a row everybody has been left out."""
        if len(steps) == len(running_requests):
            for running in running_requests:
                running.skipped = 0
        else:
            chosen = {step.request_id for step in steps}
            for running in running_requests:
                running.skipped = 0 if running.request.id in chosen else running.skipped + 1

    def _runs(self, request_id: RequestId) -> bool:
        batch = self._batch
        return batch is not None and any(step.request_id == request_id for step in batch.steps)

"""One request as the live world sees it: its token values, its updates, its report."""

from dataclasses import dataclass, field
from typing import Protocol

from stepserve.core.frontend import RequestReport, TokensEmitted, Update
from stepserve.core.payload import Payload, SettledToken
from stepserve.core.request import Confidence, FinishReason, Progress, Request
from stepserve.core.step import StepKind
from stepserve.metrics.latency import AnswerTrace, TextEvent, tpot_s, ttft_s
from stepserve.metrics.slo import meets, missed

from .messages import StepRecord


class Updates(Protocol):
    """Takes a request's updates, in order: a queue, or the way to another process."""

    def put_nowait(self, update: Update, /) -> None:
        """Take the next update."""
        ...


@dataclass(slots=True)
class LiveRecord:
    """Collects what instances settle; the copy that survives the loss of one.

    ``epoch`` is that of the first segment of its latest placement; steps of older ones are not
    accepted. ``migrations`` counts placements that
    followed a release: moves on purpose, not those forced by a loss.
    """

    request: Request
    payload: Payload
    updates: Updates
    settled: dict[int, SettledToken] = field(default_factory=dict)
    confidence: Confidence | None = None
    emitted: int = 0
    epoch: int = 0
    finished: FinishReason | None = None  # as its last step said
    released: bool = False  # let go, and not placed again yet
    migrations: int = 0
    handovers: int = 0  # to a segment that was planned with the one before
    forwards: int = 0
    forced: int = 0
    refreshes: int = 0
    threshold_sum: float = 0.0
    threshold_min: float | None = None
    first_step_s: float | None = None
    latest: tuple[int, float] | None = None  # epoch of the latest step, and when it was heard of
    paused_s: float = 0.0
    text_events: list[TextEvent] = field(default_factory=list)

    def take(self, record: StepRecord, now_s: float) -> None:
        """Account for one executed step and pass its emitted tokens on. Older epochs are void."""
        if record.epoch < self.epoch:
            return
        outcome, threshold = record.outcome, record.step.threshold
        self.forwards += 1
        self.forced += outcome.forced
        self.refreshes += record.step.kind is StepKind.RECOMPUTE
        self.confidence = outcome.confidence or self.confidence
        self.finished = outcome.finished
        if threshold is not None:
            self.threshold_sum += threshold
            self.threshold_min = min(threshold, self.threshold_min or threshold)
        if self.first_step_s is None:
            self.first_step_s = record.started_s
        if self.latest is not None and record.epoch > self.latest[0]:
            self.paused_s += max(0.0, record.started_s - self.latest[1])
            self.handovers += record.epoch > self.epoch
        self.latest = record.epoch, now_s
        self._settle(record, now_s)

    def recall(self, record: StepRecord, now_s: float) -> None:
        """Take a step that an instance repeats: who heard of it, if anybody, is gone.

        What a gateway knows is counted already: only what goes beyond it is passed on.
        """
        self.confidence = record.outcome.confidence or self.confidence
        self.finished = record.outcome.finished
        self.forwards += record.outcome.emitted > self.emitted
        self._settle(record, now_s)

    def _settle(self, record: StepRecord, now_s: float) -> None:
        outcome = record.outcome
        self.settled.update((token.offset, token) for token in record.tokens)
        if outcome.emitted > self.emitted:
            tokens = tuple(self.settled[i] for i in range(self.emitted, outcome.emitted))
            self.emitted = outcome.emitted
            self.text_events.append(TextEvent(now_s, len(tokens)))
            self.updates.put_nowait(TokensEmitted(tokens, self.forwards, now_s))

    def place(self, epoch: int) -> None:
        """It is placed, for the first time or anew."""
        self.epoch = epoch
        self.migrations += self.released
        self.released = False

    def token_ids(self) -> dict[int, int]:
        """Output tokens that are final, by offset."""
        return {token.offset: token.token_id for token in self.settled.values()}

    def progress(self) -> Progress:
        """Progress as far as it reached the frontend: where a lost request goes on."""
        return Progress(
            settled=self.request.prompt_tokens + len(self.settled),
            emitted=self.emitted,
            steps=self.forwards,
            finished=self.finished,
            confidence=self.confidence,
        )

    def report(self, now_s: float, reason: FinishReason) -> RequestReport:
        """The request's report, ending now for that reason."""
        request = self.request
        options = request.diffusion
        deadline_s = request.deadline_s
        slack_s = None if deadline_s is None else deadline_s - now_s
        trace = AnswerTrace(
            request.arrival_s,
            tuple(self.text_events),
            now_s,
            self.first_step_s,
            ok=reason is not FinishReason.ERROR,
        )
        slo = request.slo
        first_step_s = now_s if self.first_step_s is None else self.first_step_s
        lowest = self.threshold_min
        return RequestReport(
            forwards=self.forwards,
            blocks=-(-self.emitted // options.block_tokens),
            forced=self.forced,
            refreshes=self.refreshes,
            threshold_min=lowest,
            threshold_mean=self.threshold_sum / self.forwards if self.forwards else None,
            migrations=self.migrations,
            handovers=self.handovers,
            paused_s=self.paused_s,
            queue_s=first_step_s - request.arrival_s,
            ttft_s=ttft_s(trace),
            tpot_s=tpot_s(trace),
            e2e_s=now_s - request.arrival_s,
            slack_s=slack_s,
            slo_met=meets(slo, trace) if slo.targets_s else None,
            missed=missed(slo, trace),
            degraded=lowest is not None and lowest < options.thresholds.preferred,
        )

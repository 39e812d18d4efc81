"""What a simulated world remembers of each request."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from stepserve.core.actions import Finish, Reject
from stepserve.core.events import HandedOff, HandoverAcknowledged, SegmentPlaced
from stepserve.core.request import FinishReason, Progress, RefreshScope, Request
from stepserve.core.step import Step, StepKind, StepOutcome

from .quality import StageUse

ENDED = (FinishReason.STOP, FinishReason.LENGTH)
_RECOMPUTE = StepKind.RECOMPUTE


@dataclass(slots=True)
class RequestRecord(ABC):
    """What the records of both families have, and what a world tells them.

    ``tokens`` counts settled output tokens; ``epoch`` is the latest that was sent.
    ``releases``: times the request, or a segment of it that was still to come, was let go
    (migrations, drains, cuts that came to nothing).
    """

    request: Request
    index: int
    answer: Finish | Reject | None = None
    answered_s: float = 0.0
    tokens: int = 0
    releases: int = 0
    epoch: int = 0

    @property
    def whole(self) -> bool:
        """Whether the request got its whole answer."""
        return isinstance(self.answer, Finish) and self.answer.reason in ENDED

    @property
    def latency_s(self) -> float:
        """Seconds from arrival to the answer."""
        return self.answered_s - self.request.arrival_s

    @property
    def in_time(self) -> bool:
        """Whether the whole answer came by the deadline; without one, whether it came."""
        return self.whole and not self.request.slo.missed(e2e=self.latency_s)

    @property
    def met(self) -> bool:
        """Whether every target of the request was kept."""
        return self.in_time

    @property
    def step_count(self) -> int:
        """Steps that were run of it."""
        progress = self.reached()
        return progress.steps if progress else 0

    def missed(self, now_s: float, patience_s: float) -> bool:
        """Whether it is certain by now that the request does not count as served."""
        if self.answer is not None:
            return not self.in_time
        return bool(self.request.slo.missed(e2e=now_s - self.request.arrival_s))

    def late_gaps(self, seen: int) -> int:
        """Gaps above their target between tokens, from the ``seen``-th token on."""
        return 0

    @abstractmethod
    def take(self, step: Step, outcome: StepOutcome, now_s: float) -> None:
        """A step of the request ended; its tokens reach the frontend."""

    @abstractmethod
    def left(self, progress: Progress) -> None:
        """An instance does not hold the request any more, and had come so far."""

    @abstractmethod
    def reached(self) -> Progress | None:
        """How far the request has come as the frontend knows; ``None`` if it never left."""

    def placed(self, now_s: float, event: SegmentPlaced) -> None:  # noqa: B027
        """A segment was sent to an instance."""

    def handed_off(self, now_s: float, event: HandedOff) -> None:  # noqa: B027
        """An instance told the next one that its segment is done."""

    def acknowledged(self, now_s: float, event: HandoverAcknowledged) -> None:  # noqa: B027
        """The next instance has all it needs."""


@dataclass(slots=True)
class DiffusionRecord(RequestRecord):
    """What became of one diffusion request.

    ``progress`` is what reached the frontend when the request last left an instance.
    ``use`` tells the thresholds that tokens were settled at.
    ``cheap_openings``: blocks after the first that its options let begin without a refresh of
    everything; ``skipped``: those that did.
    """

    use: StageUse = field(init=False)
    progress: Progress | None = None
    refreshes: int = 0
    cheap_openings: int = 0
    skipped: int = 0

    def __post_init__(self) -> None:
        """Nothing is settled yet."""
        self.use = StageUse(self.request.max_output_tokens)

    def take(self, step: Step, outcome: StepOutcome, now_s: float) -> None:
        """See ``RequestRecord.take``."""
        _, kind, _, _, threshold = step
        settled = outcome.settled
        if self.tokens and not self.tokens % self.request.diffusion.block_tokens:
            self.open_block(step)
        self.use.settle(self.tokens, settled, threshold or 1.0)
        self.tokens += settled
        if kind is _RECOMPUTE:
            self.refreshes += 1

    def open_block(self, step: Step) -> None:
        """``step`` opens a block after the first: were keys and values left as they are?"""
        options = self.request.diffusion
        block = self.tokens // options.block_tokens
        output_only = options.refresh_scope is RefreshScope.OUTPUT
        if output_only or block % options.refresh_blocks:
            self.cheap_openings += 1
            self.skipped += step.query_tokens < step.context_tokens

    def left(self, progress: Progress) -> None:
        """See ``RequestRecord.left``."""
        self.progress = progress

    def reached(self) -> Progress | None:
        """See ``RequestRecord.reached``."""
        return self.progress

"""What a simulated world remembers of an autoregressive request: its tokens and hand-overs."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from stepserve.core.events import HandedOff, HandoverAcknowledged, SegmentPlaced
from stepserve.core.ids import InstanceId
from stepserve.core.request import FinishReason, Progress
from stepserve.core.step import Step, StepOutcome

from .record import RequestRecord


class PlacedSegment(NamedTuple):
    """A segment as it was sent out, and what its placement expected of it (``SegmentPlaced``)."""

    at_s: float
    instance: InstanceId
    epoch: int
    start: int
    stop: int | None
    predicted_s: float | None
    predicted_tbt_s: float | None


@dataclass(slots=True)
class Handover:
    """One segment going over into the next, whose epoch this is.

    ``sent_s``: the predecessor's last step ended; ``ready_s``: the successor has all it needs,
    ``None`` if it never said so. ``tokens``: of the output, emitted before.
    """

    epoch: int
    sent_s: float
    tokens: int
    ready_s: float | None = None

    @property
    def exposed_s(self) -> float | None:
        """Seconds that the request waited for its keys and values (DynaServe 3.7)."""
        return None if self.ready_s is None else self.ready_s - self.sent_s


@dataclass(slots=True)
class ArRecord(RequestRecord):
    """What became of one autoregressive request, at the frontend.

    ``times_s[i]``: when output token i came. Tokens made after the answer went nowhere.
    """

    times_s: "array[float]" = field(default_factory=lambda: array("d"))
    steps: int = 0
    finished: FinishReason | None = None
    segments: list[PlacedSegment] = field(default_factory=list)
    handovers: list[Handover] = field(default_factory=list)

    def take(self, step: Step, outcome: StepOutcome, now_s: float) -> None:
        """A step ended: its token, if it made one, is the next one in order."""
        if self.answer is not None:
            return
        self.steps += 1
        self.finished = outcome.finished or self.finished
        if outcome.emitted > self.tokens:
            assert outcome.emitted == self.tokens + 1, "every token comes once, and in order"
            self.tokens = outcome.emitted
            self.times_s.append(now_s)

    def left(self, progress: Progress) -> None:
        """An instance does not know better than the frontend: another may be further already."""

    def reached(self) -> Progress | None:
        """What reached the frontend."""
        settled = self.request.prompt_tokens + self.tokens
        return Progress(settled, self.tokens, self.steps, self.finished)

    def placed(self, now_s: float, event: SegmentPlaced) -> None:
        """A segment is sent out."""
        segment = event.segment
        self.segments.append(
            PlacedSegment(
                now_s,
                segment.instance,
                segment.epoch,
                segment.start,
                segment.stop,
                event.predicted_s,
                event.predicted_tbt_s,
            )
        )

    def handed_off(self, now_s: float, event: HandedOff) -> None:
        """A segment is computed, and says so to the next."""
        self.handovers.append(Handover(event.epoch, now_s, self.tokens))

    def acknowledged(self, now_s: float, event: HandoverAcknowledged) -> None:
        """The next segment can begin."""
        for handover in self.handovers:
            if handover.epoch == event.epoch and handover.ready_s is None:
                handover.ready_s = now_s

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token; ``None`` without any."""
        return self.times_s[0] - self.request.arrival_s if self.times_s else None

    @property
    def met(self) -> bool:
        """See ``RequestRecord.met``: gaps and the first token count, too."""
        longest_s = max(self.gaps_s(), default=None)
        return self.in_time and not self.request.slo.missed(ttft=self.ttft_s, tbt=longest_s)

    def served(self, patience_s: float) -> bool:
        """Whether the whole answer came, beginning within ``patience_s``."""
        return self.whole and (self.ttft_s or 0.0) <= patience_s

    def missed(self, now_s: float, patience_s: float) -> bool:
        """See ``RequestRecord.missed``."""
        first_s = self.times_s[0] if self.times_s else now_s
        waited = first_s - self.request.arrival_s > patience_s
        return waited or (self.answer is not None and not self.whole)

    def late_gaps(self, seen: int) -> int:
        """See ``RequestRecord.late_gaps``."""
        limit_s, fresh = self.request.slo.tbt_s, self.times_s[max(0, seen - 1) :]
        return 0 if limit_s is None else sum(b - a > limit_s for a, b in pairwise(fresh))

    def gaps_s(self) -> Iterator[float]:
        """Seconds between every two tokens, hand-overs included."""
        times_s = self.times_s
        return (times_s[i] - times_s[i - 1] for i in range(1, len(times_s)))

    def handover_gaps_s(self) -> list[float]:
        """Of those, the ones that a hand-over fell into."""
        times_s = self.times_s
        cuts = (h.tokens for h in self.handovers)
        return [times_s[n] - times_s[n - 1] for n in cuts if 0 < n < len(times_s)]

    def predicted_and_measured_s(self) -> list[tuple[float, float]]:
        """Seconds of each segment of the last plan, if all went as planned; else nothing.

        The first is measured from its placement, one that takes over from the end of the one
        before (the transfer counts to it, as in T2 of DynaServe 3.5), to its own end.
        """
        if not self.segments or self.finished is None or not self.times_s:
            return []
        start_s = self.segments[-1].at_s
        plan = sorted((s for s in self.segments if s.at_s == start_s), key=lambda s: s.epoch)
        ends_s = {handover.epoch - 1: handover.sent_s for handover in self.handovers}
        ends_s[plan[-1].epoch] = self.times_s[-1]
        spans = []
        for segment in plan:
            end_s = ends_s.get(segment.epoch)
            if end_s is None or segment.predicted_s is None:
                return []
            spans.append((segment.predicted_s, end_s - start_s))
            start_s = end_s
        return spans

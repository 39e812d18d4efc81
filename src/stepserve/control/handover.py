"""The two sides of a hand-over: an instance that lets a request go, and its successor.

Source: DynaServe 3.7. ``SegmentPlaced`` with a source is PREPARE; the successor holds room and
says so (``HandoverPrepared``). From then on the predecessor pushes whole pages as it settles
them, at its stop the rest, and says how far it came (``HandedOff``); the successor begins when all
of that has landed, and its ``HandoverAcknowledged`` frees the predecessor's pages. Messages and
chunks may overtake each other; chunks of one pair of instances do not.

Nothing here reserves, runs or ends anything: that is the local scheduler's. What happens when
instances are lost is the global scheduler's (``splits``). Deviations: decoded tokens are pushed
in as many pages as prefilled ones, not every 16.
"""

from stepserve.core.actions import LocalAction, PushChunk, Report, StartTimer, Tell
from stepserve.core.events import (
    ChunkLanded,
    HandedOff,
    HandoverAcknowledged,
    HandoverPrepared,
    HandoverStalled,
    SegmentExtended,
    SegmentPlaced,
    TimerExpired,
)
from stepserve.core.ids import InstanceId
from stepserve.core.request import Progress
from stepserve.core.running import RunningRequest
from stepserve.core.segment import HandoverStage, Segment

PREPARE_S, LANDING_S, ACKNOWLEDGE_S = 0.5, 2.0, 5.0

HandoverEvent = (
    HandoverPrepared
    | ChunkLanded
    | HandedOff
    | HandoverAcknowledged
    | TimerExpired
    | SegmentExtended
)


class Inbound:
    """A segment that will run here; its request comes with keys and values."""

    def __init__(self, placed: SegmentPlaced) -> None:
        self.placed = placed
        self._landed = 0  # tokens, without a gap
        self._handed: HandedOff | None = None
        self._waits = True  # for what has not landed

    def hear(self, event: HandoverEvent) -> list[LocalAction]:
        """Take an event of this hand-over into account; ``begins`` may have changed."""
        match event:
            case ChunkLanded(_, _, start, stop, intact):
                if intact and start <= self._landed:
                    self._landed = max(self._landed, stop)
                else:  # chunks come in order: what is missing will not come
                    self._waits = False
            case TimerExpired():
                self._waits = False
            case HandedOff(request_id, epoch, _, wait):
                self._handed = event
                self._waits &= wait
                if self.begins is None:
                    timer = TimerExpired(request_id, epoch, HandoverStage.LANDING)
                    return [StartTimer(LANDING_S, timer, f"{self._landed} tokens have landed")]
        return []

    @property
    def begins(self) -> Progress | None:
        """Where the request goes on, once it does: what has not landed is computed anew.

        At least the last token is, so that the next one is sampled: keys and values may
        have landed of tokens that a lost predecessor did not get told to anybody.
        """
        if self._handed is None:
            return None
        progress = self._handed.progress
        if self._waits and self._landed < progress.settled:
            return None
        known = self.placed.request.prompt_tokens + progress.emitted
        return progress._replace(settled=min(self._landed, known - 1))

    @property
    def progress(self) -> Progress:
        """As far as known, for the case that it never begins."""
        return self.placed.progress if self._handed is None else self._handed.progress


class Outbound:
    """A segment with a stop, until its successor has acknowledged, or is no more."""

    def __init__(self, segment: Segment, page_tokens: int, push_pages: int) -> None:
        """``push_pages``: whole ones that are pushed together; 0: nothing before the stop."""
        self.segment = segment
        self.epoch = segment.epoch + 1  # of the hand-over
        self.running: RunningRequest | None = None  # None as long as it is inbound itself
        self.waits_for: HandoverStage | None = HandoverStage.PREPARE
        self._to: InstanceId | None = None
        self._pushed = 0  # tokens
        self._page_tokens = page_tokens
        self._push_tokens = push_pages * page_tokens

    def timer(self, after_s: float, stage: HandoverStage) -> LocalAction:
        """A ``StartTimer`` of this hand-over."""
        expired = TimerExpired(self.segment.request_id, self.epoch, stage)
        return StartTimer(after_s, expired, f"{stage.value} of epoch {self.epoch}")

    def hear(self, event: HandoverEvent) -> list[LocalAction]:
        """Take an event of this hand-over into account; ``waits_for`` may have changed."""
        stage = self.waits_for
        match event:
            case HandoverPrepared() if stage is HandoverStage.PREPARE:
                self._to, self.waits_for = event.instance, None
                return self.push()
            case TimerExpired() if event.stage is stage is HandoverStage.PREPARE:
                self.waits_for = None
                return self.stalled()
        return []

    def stalled(self) -> list[LocalAction]:
        """Tell that no room was made in time, if so; until something is done about it, it waits."""
        if self.waits_for is not None or self._to is not None:
            return []
        stalled = HandoverStalled(self.segment.request_id, self.epoch)
        return [Report(stalled, "no room was made")]

    def ends(self, event: HandoverEvent) -> bool:
        """Whether the request is the successor's by now, or has to be."""
        if self.waits_for is not HandoverStage.ACKNOWLEDGE:
            return False
        expired = isinstance(event, TimerExpired) and event.stage is HandoverStage.ACKNOWLEDGE
        return expired or isinstance(event, HandoverAcknowledged)

    def push(self) -> list[LocalAction]:
        """What to send of the steps that have ended; all that is left once at the stop."""
        if self._to is None or self.running is None:
            return []
        progress, stop = self.running.progress, self.segment.stop
        assert stop is not None, "a segment without a stop is not handed over"
        at_stop, to, name = progress.settled >= stop, self._to, self.segment.request_id
        settled = progress.settled
        if not at_stop:
            settled -= settled % self._page_tokens
            if not self._push_tokens or settled - self._pushed < self._push_tokens:
                return []
        why = f"{settled} of {stop} tokens settled"
        actions: list[LocalAction] = []
        if settled > self._pushed:
            actions.append(PushChunk(to, name, self.epoch, self._pushed, settled, why))
            self._pushed = settled
        if at_stop:
            self.waits_for = HandoverStage.ACKNOWLEDGE
            actions.append(Tell(to, HandedOff(name, self.epoch, progress), why))
            actions.append(self.timer(ACKNOWLEDGE_S, HandoverStage.ACKNOWLEDGE))
        return actions

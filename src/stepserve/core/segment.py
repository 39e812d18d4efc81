"""Placed ranges of a request."""

from dataclasses import dataclass
from enum import StrEnum

from stepserve.core.ids import InstanceId, RequestId


@dataclass(frozen=True, slots=True)
class Segment:
    """Half-open range ``[start, stop)`` of settled positions, placed on one instance.

    ``stop`` is ``None`` while open. ``epoch`` is the version of the request's plan: messages
    of an older epoch are ignored. Segments placed together have consecutive epochs, and a
    hand-over between two of them carries the epoch of the second.
    """

    request_id: RequestId
    index: int
    start: int
    stop: int | None
    instance: InstanceId
    epoch: int


class SegmentEnd(StrEnum):
    """How a segment ended."""

    FINISHED = "finished"  # the request is complete
    FAILED = "failed"  # this request cannot be continued (its own fault)
    RELEASED = "released"  # let go as asked; the global scheduler knows why
    HANDED_OFF = "handed_off"  # its stop was reached; the next segment has taken over


class HandoverStage(StrEnum):
    """What a hand-over waits for; each has its time limit (DynaServe 3.7)."""

    PREPARE = "prepare"  # the sender: for room on the other side
    LANDING = "landing"  # the receiver, told that all was sent: for the rest of it
    ACKNOWLEDGE = "acknowledge"  # the sender, all sent: for leave to free its pages


class ReleasePoint(StrEnum):
    """When an instance lets a segment go that it was asked to release."""

    STEP = "step"  # at once, or when the running step ends
    CUT = "cut"  # before the next step that may start elsewhere at no extra work

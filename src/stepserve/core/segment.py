"""Placed ranges of a request."""

from dataclasses import dataclass
from enum import StrEnum

from stepserve.core.ids import InstanceId, RequestId


@dataclass(frozen=True, slots=True)
class Segment:
    """Half-open range ``[start, stop)`` of settled positions, placed on one instance.

    ``stop`` is ``None`` while open. ``epoch`` is the version of the request's plan: messages
    of an older epoch are ignored.
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


class ReleasePoint(StrEnum):
    """When an instance lets a segment go that it was asked to release."""

    STEP = "step"  # at once, or when the running step ends
    CUT = "cut"  # before the next step that may start elsewhere at no extra work

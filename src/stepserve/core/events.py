"""Everything that can happen to a scheduler. Closed: a new kind of event is a change here.

Events are values without behaviour; a recorded list of (time, event) replays a run.
"""

from dataclasses import dataclass
from typing import NamedTuple

from stepserve.core.forecast import StepForecast
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.instance import HeldSegment, InstanceSpec, RunningReport
from stepserve.core.plan import ClusterPlan
from stepserve.core.request import FinishReason, Progress, Request
from stepserve.core.segment import HandoverStage, ReleasePoint, Segment, SegmentEnd
from stepserve.core.step import Mix, StepOutcome


class OpenRequest(NamedTuple):
    """A request that a scheduler before this one accepted.

    ``progress`` is what reached the frontend, if anything did; ``epoch`` the latest that was sent.
    """

    request: Request
    progress: Progress | None
    epoch: int


@dataclass(frozen=True, slots=True)
class SchedulerStarted:
    """The first event of a global scheduler, which may follow others on the same cluster.

    ``number``: how many came before; who answers a question says whose it was.
    ``layout`` is the last that stood, or what a cluster begins with: instances are started where
    nothing else is. Of those that are there, ``instances`` are up and will be asked what they
    hold; ``starting`` ones will announce themselves. A driver that starts instances itself may
    leave the first of these events out.
    """

    number: int
    layout: tuple[InstanceSpec, ...]
    requests: tuple[OpenRequest, ...] = ()
    instances: tuple[InstanceSpec, ...] = ()
    starting: tuple[InstanceSpec, ...] = ()


class RequestArrived(NamedTuple):
    """A client's request was read and found valid."""

    request: Request


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The client left, or the gateway saw a stop string: no further step is wanted."""

    request_id: RequestId
    reason: FinishReason


class Predicted(NamedTuple):
    """Answer to ``Predict``. It has an age: see ``StepForecast.at_steps``."""

    request_id: RequestId
    forecast: StepForecast


@dataclass(frozen=True, slots=True)
class SegmentPlaced:
    """The global scheduler gives an instance a segment to run.

    ``cap`` is the highest threshold that load control allows the request for now. With a
    ``source``, keys and values of ``[0, segment.start)`` will come from that instance: hold
    room for them, and tell it (PREPARE of DynaServe 3.7). ``predicted_s`` and
    ``predicted_tbt_s`` are the seconds to the segment's end and between its tokens that the
    placement was chosen for.
    """

    segment: Segment
    request: Request
    progress: Progress
    forecast: StepForecast
    cap: float = 1.0
    source: InstanceId | None = None
    predicted_s: float | None = None
    predicted_tbt_s: float | None = None


@dataclass(frozen=True, slots=True)
class StateAsked:
    """A new global scheduler asks what is held here; answered by ``InstanceFound``."""

    scheduler: int


@dataclass(frozen=True, slots=True)
class SegmentReleased:
    """The global scheduler takes a segment back; the instance answers ``SegmentEnded``."""

    request_id: RequestId
    epoch: int
    at: ReleasePoint


@dataclass(frozen=True, slots=True)
class CapsSet:
    """Load control changed the threshold caps of some requests of an instance."""

    caps: tuple[tuple[RequestId, float], ...]


@dataclass(frozen=True, slots=True)
class SegmentExtended:
    """There is no successor any more: the segment goes on to the end of the request.

    ``epoch`` is that of the hand-over that will not be; ``segment`` keeps its own.
    """

    request_id: RequestId
    epoch: int
    segment: Segment


@dataclass(frozen=True, slots=True)
class HandoverPrepared:
    """The successor has room: keys and values may be pushed to ``instance``, where it is."""

    request_id: RequestId
    epoch: int
    instance: InstanceId


@dataclass(frozen=True, slots=True)
class ChunkLanded:
    """Keys and values of ``[start, stop)`` are in the successor's pages.

    ``intact``: their checksums agree with what was sent.
    """

    request_id: RequestId
    epoch: int
    start: int
    stop: int
    intact: bool = True


@dataclass(frozen=True, slots=True)
class HandedOff:
    """The predecessor is done, at ``progress``; the driver adds the tokens themselves.

    It may overtake the last chunks. ``wait`` for those; if not (the predecessor is gone), the
    successor computes anew what has not landed.
    """

    request_id: RequestId
    epoch: int
    progress: Progress
    wait: bool = True


@dataclass(frozen=True, slots=True)
class HandoverAcknowledged:
    """The successor runs the request; the predecessor may free its pages."""

    request_id: RequestId
    epoch: int


@dataclass(frozen=True, slots=True)
class TimerExpired:
    """Answer to ``StartTimer``. One that nobody waits for any more is ignored."""

    request_id: RequestId
    epoch: int
    stage: HandoverStage


@dataclass(frozen=True, slots=True)
class HandoverStalled:
    """No room was made on the other side in time; ``epoch`` is the hand-over's."""

    request_id: RequestId
    epoch: int


class SegmentEnded(NamedTuple):
    """An instance no longer holds a segment, nor any state of it."""

    segment: Segment
    end: SegmentEnd
    progress: Progress
    error: str | None = None


class BatchDone(NamedTuple):
    """The executor finished a batch, ``seconds`` after it began."""

    batch_id: int
    outcomes: tuple[StepOutcome, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class InstanceUp:
    """An instance is ready for work and holds nothing."""

    spec: InstanceSpec


class InstanceFound(NamedTuple):
    """Answer to ``StateAsked``: everything that an instance holds."""

    scheduler: int
    spec: InstanceSpec
    segments: tuple[HeldSegment, ...]


class InstanceReported(NamedTuple):
    """An instance begins a batch, or has nothing to run.

    ``batch_ends_s`` predicts the end of the batch (now, when idle). ``measured`` is the
    tokens, rows and seconds of the batch that just ended, for the listener's cost model, and
    ``mix`` what it was made of.
    ``running_requests`` come along every now and then (``ControlConfig.report_every_s``).
    """

    instance: InstanceId
    batch_ends_s: float
    measured: tuple[int, int, float] | None = None
    running_requests: tuple[RunningReport, ...] = ()
    mix: Mix | None = None


@dataclass(frozen=True, slots=True)
class InstanceStopped:
    """Answer to ``Stop``: a drained instance is gone, its GPUs are free."""

    spec: InstanceSpec


@dataclass(frozen=True, slots=True)
class PlanSolved:
    """Answer to ``SolvePlan``."""

    plan: ClusterPlan


@dataclass(frozen=True, slots=True)
class InstanceLost:
    """An instance stopped answering, or never came up.

    ``progress`` is what reached the frontend of the requests placed there.
    """

    spec: InstanceSpec
    progress: tuple[tuple[RequestId, Progress], ...]


GlobalEvent = (
    SchedulerStarted
    | RequestArrived
    | RequestCancelled
    | Predicted
    | SegmentEnded
    | InstanceUp
    | InstanceFound
    | InstanceReported
    | InstanceStopped
    | PlanSolved
    | InstanceLost
    | HandoverStalled
)
LocalEvent = (
    StateAsked
    | SegmentPlaced
    | SegmentReleased
    | SegmentExtended
    | CapsSet
    | Predicted
    | BatchDone
    | HandoverPrepared
    | ChunkLanded
    | HandedOff
    | HandoverAcknowledged
    | TimerExpired
)
Event = GlobalEvent | LocalEvent

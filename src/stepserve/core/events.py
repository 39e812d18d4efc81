"""Everything that can happen to a scheduler. Closed: a new kind of event is a change here.

Events are values without behaviour; a recorded list of (time, event) replays a run.
"""

from dataclasses import dataclass
from typing import NamedTuple

from stepserve.core.forecast import StepForecast
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.instance import InstanceSpec, ResidentReport
from stepserve.core.plan import ClusterPlan
from stepserve.core.request import FinishReason, Progress, Request
from stepserve.core.segment import ReleasePoint, Segment, SegmentEnd
from stepserve.core.step import StepOutcome


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

    ``cap`` is the highest threshold that load control allows the request for now.
    """

    segment: Segment
    request: Request
    progress: Progress
    forecast: StepForecast
    cap: float = 1.0


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


class InstanceReported(NamedTuple):
    """An instance begins a batch, or has nothing to run.

    ``batch_ends_s`` predicts the end of the batch (now, when idle). ``measured`` is the
    tokens, rows and seconds of the batch that just ended, for the listener's cost model.
    ``residents`` come along every now and then (``ControlConfig.report_every_s``).
    """

    instance: InstanceId
    batch_ends_s: float
    measured: tuple[int, int, float] | None = None
    residents: tuple[ResidentReport, ...] = ()


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
    RequestArrived
    | RequestCancelled
    | Predicted
    | SegmentEnded
    | InstanceUp
    | InstanceReported
    | InstanceStopped
    | PlanSolved
    | InstanceLost
)
LocalEvent = SegmentPlaced | SegmentReleased | CapsSet | Predicted | BatchDone
Event = GlobalEvent | LocalEvent

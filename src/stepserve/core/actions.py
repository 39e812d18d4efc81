"""Everything a scheduler can ask of its driver. Closed; every action says why.

The ``why`` is the system's log of decisions: short, factual, with the numbers compared.
"""

from dataclasses import dataclass
from typing import NamedTuple

from stepserve.core.events import GlobalEvent, LocalEvent, TimerExpired
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.instance import InstanceSpec
from stepserve.core.plan import PlanProblem
from stepserve.core.request import FinishReason, Progress, Refusal, Request
from stepserve.core.step import Batch, Mix


class Send(NamedTuple):
    """Deliver an event to an instance's local scheduler."""

    to: InstanceId
    event: LocalEvent
    why: str


class Report(NamedTuple):
    """Deliver an event to the global scheduler."""

    event: GlobalEvent
    why: str


class Predict(NamedTuple):
    """Ask for remaining steps at each of ``thresholds``; answered by ``Predicted``."""

    request: Request
    progress: Progress
    thresholds: tuple[float, ...]
    why: str


class RunBatch(NamedTuple):
    """Run a batch on this instance's executor; answered by ``BatchDone``.

    The most frequent action says why in numbers: the tokens it executes, how many running requests
    there were to choose from, and how long it is predicted to take.
    """

    batch: Batch
    query_tokens: int
    running_requests: int
    predicted_s: float
    mix: Mix | None = None


class Tell(NamedTuple):
    """Deliver an event to a peer's local scheduler."""

    to: InstanceId
    event: LocalEvent
    why: str


class PushChunk(NamedTuple):
    """Copy keys and values of ``[start, stop)`` to a peer; it hears ``ChunkLanded``."""

    to: InstanceId
    request_id: RequestId
    epoch: int
    start: int
    stop: int
    why: str


class StartTimer(NamedTuple):
    """Deliver an event to this very scheduler, ``after_s`` seconds from now."""

    after_s: float
    event: TimerExpired
    why: str


@dataclass(frozen=True, slots=True)
class LoadState:
    """Have this instance's executor hold a request, from its settled tokens on."""

    request: Request
    progress: Progress
    why: str


@dataclass(frozen=True, slots=True)
class FreeState:
    """Drop what this instance's executor holds of a request."""

    request_id: RequestId
    why: str


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Form an instance, ``after_s`` from now; answered by ``InstanceUp``, or ``InstanceLost``."""

    spec: InstanceSpec
    after_s: float
    why: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Tear down an instance that holds nothing; answered by ``InstanceStopped``."""

    spec: InstanceSpec
    why: str


@dataclass(frozen=True, slots=True)
class SolvePlan:
    """Ask for the tensor-parallel layout of the cluster; answered by ``PlanSolved``."""

    problem: PlanProblem
    why: str


@dataclass(frozen=True, slots=True)
class Reject:
    """Refuse a request before any work was done.

    ``retry_after_s``: from when on it is predicted to be accepted; ``None`` where asking again
    cannot help.
    """

    request_id: RequestId
    retry_after_s: float | None
    why: str
    reason: Refusal = Refusal.SATURATED


@dataclass(frozen=True, slots=True)
class Finish:
    """A request is over; ``error`` is the message for the client when it failed."""

    request_id: RequestId
    reason: FinishReason
    error: str | None
    why: str


GlobalAction = Send | Predict | Rebuild | Stop | SolvePlan | Reject | Finish
LocalAction = Report | Predict | LoadState | RunBatch | FreeState | Tell | PushChunk | StartTimer
Action = GlobalAction | LocalAction

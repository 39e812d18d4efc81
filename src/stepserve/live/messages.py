"""What the control loop says to instances and gateways, and they to it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stepserve.core.events import GlobalEvent, LocalEvent, TimerExpired
from stepserve.core.ids import InstanceId
from stepserve.core.instance import InstanceSpec
from stepserve.core.payload import KvChunk, Payload, SettledToken
from stepserve.core.request import FinishReason, Request
from stepserve.core.step import Step, StepOutcome
from stepserve.metrics.control import ControlReading


@dataclass(frozen=True, slots=True)
class Delivery:
    """An event for a local scheduler; a placed segment brings its token values along.

    ``settled`` maps output offsets to token ids that are already final; a hand-over brings them
    too. ``chunk`` comes with ``ChunkLanded``.
    """

    event: LocalEvent
    payload: Payload | None = None
    settled: Mapping[int, int] = field(default_factory=dict)
    chunk: KvChunk | None = None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One executed step, with the token values it settled. Times are on the loop's clock."""

    step: Step
    outcome: StepOutcome
    tokens: tuple[SettledToken, ...]
    epoch: int
    started_s: float


@dataclass(frozen=True, slots=True)
class InstanceOutput:
    """What an instance says after a turn: steps first, then events for the global scheduler.

    ``incarnation`` counts the rebuilds of the instance: output of a past one is dropped.
    ``peers``: what goes to other instances; ``later``: what it wants to hear itself, and in how
    many seconds.
    """

    instance: InstanceId
    incarnation: int
    steps: tuple[StepRecord, ...] = ()
    events: tuple[GlobalEvent, ...] = ()
    peers: tuple[tuple[InstanceId, Delivery], ...] = ()
    later: tuple[tuple[float, TimerExpired], ...] = ()


@dataclass(frozen=True, slots=True)
class Present:
    """What an instance says of itself when a control loop connects.

    ``up``: whether it has announced itself to somebody. ``steps``: those of segments it
    holds, with their tokens.
    """

    spec: InstanceSpec
    up: bool
    steps: tuple[StepRecord, ...]


@dataclass(frozen=True, slots=True)
class Submit:
    """A gateway has a request. ``emitted``, ``forwards`` and ``cancelled``: how far it has come.

    They are not empty where an earlier global scheduler had it.
    """

    request: Request
    payload: Payload
    emitted: tuple[SettledToken, ...] = ()
    forwards: int = 0
    cancelled: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Hello:
    """The first that a gateway says: the requests that it has."""

    requests: tuple[Submit, ...]


@dataclass(frozen=True, slots=True)
class Standing:
    """What gateways are told of the cluster, several times a second.

    ``serves``: whether requests can be run; ``healthy``: whether the scheduler makes progress.
    """

    serves: bool
    healthy: bool
    running: int
    waiting: int
    kv_usage: float
    reading: ControlReading

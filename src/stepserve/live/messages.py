"""What crosses the transport between the control loop and an instance."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stepserve.core.events import GlobalEvent, LocalEvent, TimerExpired
from stepserve.core.ids import InstanceId
from stepserve.core.payload import KvChunk, Payload, SettledToken
from stepserve.core.step import Step, StepOutcome


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

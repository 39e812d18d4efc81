"""The states of a request and of an instance at the global scheduler, and what leads to which.

A transition that a table does not have raises ``LifecycleError``: it is a mistake in a scheduler,
which a driver answers by a new one (``supervisor``).
"""

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from stepserve.core.errors import StepserveError
from stepserve.core.status import InstancePhase


class LifecycleError(StepserveError):
    """Something happened to a request or an instance that its state does not allow."""


class RequestPhase(Enum):
    """Where a request is. It holds a claim on an instance in RUNNING and LEAVING only."""

    UNPLACED = "unplaced"  # it has no place, and what follows is decided within the same event
    PREDICTING = "predicting"  # it waits for a forecast
    QUEUED = "queued"  # it waits for room
    RUNNING = "running"  # its segment is placed on an instance
    LEAVING = "leaving"  # as RUNNING, and the instance was asked to let it go
    OVER = "over"


class RequestStep(Enum):
    """What happens to a request."""

    PREDICT = "predict"
    ENQUEUE = "enqueue"
    PLACE = "place"
    RELEASE = "release"  # its instance is asked to let it go
    ADVANCE = "advance"  # its next planned segment runs
    LOSE_PLACE = "lose place"  # it was let go, or its instance is lost
    END = "end"


class InstanceStep(Enum):
    """What happens to an instance."""

    DRAIN = "drain"
    STOP = "stop"


class SlotPhase(Enum):
    """Where the GPUs of an instance are in a change of the layout."""

    LEAVING = "leaving"  # the instance on them drains and is torn down
    WAITING = "waiting"  # an instance is to be formed, once the GPUs are free
    STARTING = "starting"
    DONE = "done"


class SlotStep(Enum):
    """What happens to the GPUs of an instance in a change of the layout."""

    FREE = "be freed"
    START = "start"
    COME_UP = "come up"
    FAIL = "fail"


_P, _R = RequestPhase, RequestStep
REQUEST: Mapping[tuple[RequestPhase, RequestStep], RequestPhase] = {
    (_P.UNPLACED, _R.PREDICT): _P.PREDICTING,
    (_P.UNPLACED, _R.PLACE): _P.RUNNING,  # goes on where room was reserved, or was found there
    (_P.UNPLACED, _R.ADVANCE): _P.RUNNING,
    (_P.UNPLACED, _R.END): _P.OVER,
    (_P.PREDICTING, _R.ENQUEUE): _P.QUEUED,
    (_P.PREDICTING, _R.END): _P.OVER,
    (_P.QUEUED, _R.PLACE): _P.RUNNING,
    (_P.QUEUED, _R.END): _P.OVER,
    (_P.RUNNING, _R.RELEASE): _P.LEAVING,
    (_P.RUNNING, _R.ADVANCE): _P.RUNNING,
    (_P.RUNNING, _R.LOSE_PLACE): _P.UNPLACED,
    (_P.LEAVING, _R.RELEASE): _P.LEAVING,  # at once, not at the next cut
    (_P.LEAVING, _R.ADVANCE): _P.RUNNING,
    (_P.LEAVING, _R.LOSE_PLACE): _P.UNPLACED,
}

_I, _S = InstancePhase, InstanceStep
INSTANCE: Mapping[tuple[InstancePhase, InstanceStep], InstancePhase] = {
    (_I.UP, _S.DRAIN): _I.DRAINING,
    (_I.DRAINING, _S.DRAIN): _I.DRAINING,
    (_I.DRAINING, _S.STOP): _I.STOPPING,
    (_I.STOPPING, _S.DRAIN): _I.STOPPING,
}

_G, _W = SlotPhase, SlotStep
SLOT: Mapping[tuple[SlotPhase, SlotStep], SlotPhase] = {
    (_G.LEAVING, _W.FREE): _G.DONE,
    (_G.WAITING, _W.START): _G.STARTING,
    (_G.WAITING, _W.COME_UP): _G.DONE,  # asked for by a scheduler before this one
    (_G.WAITING, _W.FAIL): _G.DONE,
    (_G.STARTING, _W.COME_UP): _G.DONE,
    (_G.STARTING, _W.FAIL): _G.DONE,
}

State = TypeVar("State", bound=Enum)
Happens = TypeVar("Happens", bound=Enum)


def after(
    table: Mapping[tuple[State, Happens], State], state: State, happens: Happens, what: str
) -> State:
    """The state of ``what`` that follows. Raises LifecycleError if none does."""
    found = table.get((state, happens))
    if found is None:
        raise LifecycleError(f"{what} cannot {happens.value} while it is {state.value}")
    return found

"""An instance as a world holds it, the order of what happens at the same time, and who listens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stepserve.control.local_scheduler import LocalScheduler
from stepserve.core.actions import LocalAction
from stepserve.core.events import LocalEvent
from stepserve.core.instance import InstanceSpec
from stepserve.core.request import Progress, Request
from stepserve.core.step import Step, StepOutcome

BATCH_ENDS, ANSWER, MESSAGE, CLIENT = range(4)
"""Priorities of events at the same time."""


Timed = Callable[[str, Callable[..., Any]], Callable[..., Any]]


def untimed(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Leaves a part as it is."""
    return call


Learn = Callable[[Request, Progress, StepOutcome, Step], None]

OnHandled = Callable[[InstanceSpec | None, int, float, Any, list[Any]], None]
"""Told of every call of ``handle``: instance and incarnation (a global scheduler: none, and how
many came before it), time, event, actions."""


@dataclass(slots=True, eq=False)
class Instance:
    """One incarnation of an instance. Messages name the incarnation, not the instance."""

    spec: InstanceSpec
    local: LocalScheduler
    handle: Callable[[float, LocalEvent], list[LocalAction]]
    slow: float
    alive: bool = True
    retired: bool = False  # told to stop: it takes nothing in any more
    to_s: float = 0.0  # messages to it arrive no earlier
    from_s: float = 0.0  # nor do messages from it

"""An instance as a world holds it, and the order of what happens at the same time."""

from collections.abc import Callable
from dataclasses import dataclass

from stepserve.control.local_scheduler import LocalScheduler
from stepserve.core.actions import LocalAction
from stepserve.core.events import LocalEvent
from stepserve.core.instance import InstanceSpec

BATCH_ENDS, ANSWER, MESSAGE, CLIENT = range(4)
"""Priorities of events at the same time."""


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

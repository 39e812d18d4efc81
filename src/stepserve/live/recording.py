"""Who listens to the schedulers: everything they saw and did, as it happens.

A listener takes one ``Handled`` per call of ``handle``, in the order of each scheduler, from
whatever thread that scheduler runs on. The event log and the counters of ``/metrics`` are
listeners; ``Recorder`` is the one of the tests.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from stepserve.core.actions import Action
from stepserve.core.events import Event
from stepserve.core.ids import InstanceId
from stepserve.core.instance import InstanceSpec


@dataclass(frozen=True, slots=True)
class Handled:
    """One call of ``handle``: its time, its event, the actions it returned, its cost.

    ``spec`` and ``incarnation`` say which local scheduler it was; ``None``: the global; its
    ``incarnation`` counts the schedulers before it.
    """

    spec: InstanceSpec | None
    incarnation: int
    now_s: float
    event: Event
    actions: tuple[Action, ...]
    seconds: float


Listener = Callable[[Handled], None]


class Recorder:
    """Keeps everything, by ``(instance, incarnation)``; the first global is ``(None, 0)``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.entries: dict[tuple[InstanceId | None, int], list[Handled]] = {}

    def note(self, handled: Handled) -> None:
        """A listener."""
        name = handled.spec.id if handled.spec else None
        with self._lock:
            self.entries.setdefault((name, handled.incarnation), []).append(handled)

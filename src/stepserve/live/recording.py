"""Keeps what schedulers saw and did, so that a live run can be replayed into fresh ones."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from stepserve.core.actions import Action
from stepserve.core.events import Event
from stepserve.core.ids import InstanceId


@dataclass(frozen=True, slots=True)
class Entry:
    """One call of ``handle``: its time, its event, and the actions it returned."""

    now_s: float
    event: Event
    actions: tuple[Action, ...]


class Recorder:
    """Entries by scheduler: ``(instance, incarnation)``, or ``(None, 0)`` for the global one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.entries: dict[tuple[InstanceId | None, int], list[Entry]] = {}

    def note(
        self,
        scheduler: InstanceId | None,
        incarnation: int,
        now_s: float,
        event: Event,
        actions: Sequence[Action],
    ) -> None:
        """Append one entry. Called from every instance's thread."""
        with self._lock:
            rows = self.entries.setdefault((scheduler, incarnation), [])
            rows.append(Entry(now_s, event, tuple(actions)))

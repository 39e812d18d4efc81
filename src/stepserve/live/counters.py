"""What the schedulers decided, counted for ``/metrics``."""

import threading

from stepserve.core.actions import Predict, Send
from stepserve.core.events import (
    CapsSet,
    HandoverAcknowledged,
    PlanSolved,
    RequestCancelled,
    SegmentReleased,
)
from stepserve.core.segment import ReleasePoint

from .recording import Handled


class Counters:
    """A listener. Its counts only ever grow, whatever becomes of the instances."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.seconds = {"global": 0.0, "local": 0.0}  # spent inside schedulers
        self.events = {"global": 0, "local": 0}
        self.forecasts_refreshed = 0
        self.caps_updates = 0
        self.migrations_asked = 0
        self.handovers = 0
        self.plans_solved = 0

    def note(self, handled: Handled) -> None:
        """Count one call of ``handle``, from any thread."""
        kind = "global" if handled.spec is None else "local"
        sent = [action.event for action in handled.actions if isinstance(action, Send)]
        cancels = isinstance(handled.event, RequestCancelled)
        with self._lock:
            self.seconds[kind] += handled.seconds
            self.events[kind] += 1
            if kind == "local":
                self.forecasts_refreshed += sum(isinstance(a, Predict) for a in handled.actions)
                self.handovers += isinstance(handled.event, HandoverAcknowledged)
            self.plans_solved += isinstance(handled.event, PlanSolved)
            self.caps_updates += any(isinstance(event, CapsSet) for event in sent)
            if not cancels:
                self.migrations_asked += sum(
                    isinstance(e, SegmentReleased) and e.at is ReleasePoint.CUT for e in sent
                )

"""Keeps the batch times of a causal model that a server measured, for its next start."""

from collections import deque
from pathlib import Path

from stepserve.core.events import InstanceReported
from stepserve.core.step import Mix
from stepserve.cost.batch_profile import BatchProfile

from .recording import Handled

KEPT = 2000
"""Batches, the latest that instances reported: of each instance about one per report."""


class KeptBatches:
    """Listens to what instances report, and writes it with the profile that was started from."""

    def __init__(self, path: Path, profile: BatchProfile) -> None:
        self._path, self._profile = path, profile
        self._steps: deque[tuple[Mix, float]] = deque(maxlen=KEPT)

    def note(self, handled: Handled) -> None:
        """A listener."""
        event = handled.event
        if isinstance(event, InstanceReported) and event.measured is not None and event.mix:
            self._steps.append((event.mix, event.measured[2]))

    def close(self) -> None:
        """Write the profile, if anything was measured."""
        if self._steps:
            whole = self._path.with_name(self._path.name + ".part")
            self._profile.extended(list(self._steps)).save(whole)
            whole.replace(self._path)

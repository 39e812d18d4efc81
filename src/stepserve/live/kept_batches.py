"""Keeps the batch times of an autoregressive model that a server measured, for its next start."""

from collections import deque
from pathlib import Path

from stepserve.core.actions import Report
from stepserve.core.errors import FieldError
from stepserve.core.events import InstanceReported
from stepserve.core.step import Mix
from stepserve.cost.batch_profile import BatchProfile

from .recording import Handled

KEPT = 2000
"""Batches, the latest that instances reported: of each instance about one per report."""


class KeptBatches:
    """Listens to what instances report, and writes it with the profile that was started from."""

    def __init__(self, path: Path, profile: BatchProfile, tp_degree: int) -> None:
        """The profile is of instances of ``tp_degree``; others are not listened to.

        Raises FieldError (``keep_profile``) for a path that cannot be written.
        """
        self._path, self._profile, self._tp_degree = path, profile, tp_degree
        self._part = path.with_name(path.name + ".part")
        try:
            self._part.touch()
        except OSError as error:
            raise FieldError("keep_profile", f"{path} cannot be written: {error}") from error
        self._steps: deque[tuple[Mix, float]] = deque(maxlen=KEPT)

    def note(self, handled: Handled) -> None:
        """A listener."""
        if handled.spec is None or handled.spec.tp_degree != self._tp_degree:
            return
        for action in handled.actions:
            event = action.event if isinstance(action, Report) else None
            if isinstance(event, InstanceReported) and event.measured is not None and event.mix:
                self._steps.append((event.mix, event.measured[2]))

    def close(self) -> None:
        """Write the profile; as it was, if nothing was measured."""
        self._profile.extended(self._steps or self._profile.learned).save(self._part)
        self._part.replace(self._path)

"""One predictor for all instances of a process, and the log of their steps."""

import threading
from collections.abc import Sequence

from stepserve.core.forecast import StepForecast
from stepserve.core.protocols import StepPredictor
from stepserve.core.request import Progress, Request
from stepserve.core.step import Step, StepOutcome
from stepserve.cost.step_log import StepLog


class SharedPredictor:
    """A ``StepPredictor`` behind a lock: every instance's thread asks it and teaches it.

    What it learns from goes to the step log as well, if there is one.
    """

    def __init__(self, predictor: StepPredictor, log: StepLog | None = None) -> None:
        self._predictor = predictor
        self._log = log
        self._lock = threading.Lock()

    def remaining_steps(
        self, request: Request, progress: Progress, thresholds: Sequence[float]
    ) -> StepForecast:
        """See ``StepPredictor.remaining_steps``."""
        with self._lock:
            return self._predictor.remaining_steps(request, progress, thresholds)

    def learn(self, request: Request, progress: Progress, outcome: StepOutcome, step: Step) -> None:
        """See ``StepPredictor.learn``."""
        with self._lock:
            self._predictor.learn(request, progress, outcome, step)
            if self._log is not None:
                self._log.note(request, progress, outcome, step)

    def close(self) -> None:
        """End the step log; an instance that was left behind logs nothing any more."""
        with self._lock:
            log, self._log = self._log, None
        if log is not None:
            log.close()

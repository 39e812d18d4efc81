"""One predictor for all instances of a process."""

import threading
from collections.abc import Sequence

from stepserve.core.forecast import StepForecast
from stepserve.core.protocols import StepPredictor
from stepserve.core.request import Progress, Request
from stepserve.core.step import Step, StepOutcome


class SharedPredictor:
    """A ``StepPredictor`` behind a lock: every instance's thread asks it and teaches it."""

    def __init__(self, predictor: StepPredictor) -> None:
        self._predictor = predictor
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

"""A predictor that knows: remaining steps read off the truth (the published ablation's oracle).

Source: DiLaServe B5 ("oracle 0"). It still answers late, and its answers age like any other.
"""

from collections.abc import Sequence

from stepserve.core.forecast import StepForecast
from stepserve.core.protocols import StepPredictor
from stepserve.core.request import Progress, Request
from stepserve.core.step import Step, StepOutcome

from .executors import TraceExecutors
from .outcomes import true_remaining


class Oracle(StepPredictor):
    """A ``StepPredictor`` over the truths of a trace-driven world."""

    def __init__(self, rows: TraceExecutors) -> None:
        self._rows = rows

    def remaining_steps(
        self, request: Request, progress: Progress, thresholds: Sequence[float]
    ) -> StepForecast:
        """The truth as of now."""
        truth = self._rows.truths[request.id]
        steps = tuple(max(1.0, true_remaining(truth, t)) for t in thresholds)
        return StepForecast(tuple(thresholds), steps, float(truth.end), progress.steps)

    def learn(self, request: Request, progress: Progress, outcome: StepOutcome, step: Step) -> None:
        """Nothing to learn."""

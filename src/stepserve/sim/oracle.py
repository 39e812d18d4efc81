"""A predictor that knows: remaining steps read off the truth (the published ablation's oracle).

Source: DiLaServe B5 ("oracle 0"). It still answers late, and its answers age like any other.
"""

from collections.abc import Sequence

from stepserve.core.config import NoOptions
from stepserve.core.errors import FieldError
from stepserve.core.forecast import StepForecast
from stepserve.core.protocols import StepPredictor
from stepserve.core.request import Family, Progress, Request
from stepserve.core.step import Step, StepOutcome
from stepserve.cost.forecast_parts import ForecastParts

from .outcomes import true_remaining


class Oracle(StepPredictor):
    """A ``StepPredictor`` over the truths of a trace-driven world."""

    Options = NoOptions
    family = Family.DIFFUSION

    def __init__(self, options: NoOptions, parts: ForecastParts) -> None:
        """Raises FieldError where nothing knows the truth."""
        if parts.truths is None:
            raise FieldError("use", "only a trace knows its end: no oracle here")
        self._truths = parts.truths

    def remaining_steps(
        self, request: Request, progress: Progress, thresholds: Sequence[float]
    ) -> StepForecast:
        """The truth as of now."""
        truth = self._truths[request.id]
        steps = tuple(max(1.0, true_remaining(truth, t)) for t in thresholds)
        return StepForecast(tuple(thresholds), steps, float(truth.end), progress.steps)

    def learn(self, request: Request, progress: Progress, outcome: StepOutcome, step: Step) -> None:
        """Nothing to learn."""

"""A predictor that knows how long an output gets, exactly or give or take a normal error.

Source: DynaServe 3.6 (oracle, and oracle + N(0, sigma) for the sensitivity test) and DynaServe 1.3.
The error of a request is drawn once, and is the same for every system and order of events.

Deviation: the answer is not limited by the request's ``max_output_tokens``. In experiments that
limit *is* the length, so that reservations are exact (DynaServe 3.10.3), and would hide every error
upward.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from stepserve.core.bounds import Bounded, FiniteNotNegative
from stepserve.core.errors import FieldError
from stepserve.core.forecast import StepForecast
from stepserve.core.protocols import StepPredictor
from stepserve.core.request import Family, Progress, Request
from stepserve.core.step import Step, StepOutcome
from stepserve.cost.forecast_parts import ForecastParts

LEAST_LEFT_TOKENS = 32
LEAST_LEFT_SHARE = 0.1
"""What an output that outgrew its prediction is expected to still bring: the larger of 32
tokens and a tenth of what it has (DynaServe 3.6)."""


class KnownLengths(StepPredictor):
    """A ``StepPredictor`` over the truths of ``ArExecutors``; one step is one output token."""

    family = Family.AUTOREGRESSIVE

    @dataclass(frozen=True, slots=True)
    class Options(Bounded):
        """``sigma_tokens``: standard deviation of the error; 0 for none."""

        sigma_tokens: FiniteNotNegative = 0.0

    def __init__(self, options: Options, parts: ForecastParts) -> None:
        """Raises FieldError where nothing knows the truth."""
        if parts.truths is None:
            raise FieldError("use", "only a simulation knows lengths before")
        self._truths = parts.truths
        self._sigma_tokens = options.sigma_tokens
        self._seed = parts.seed
        self._errors: dict[str, float] = {}

    def remaining_steps(
        self, request: Request, progress: Progress, thresholds: Sequence[float]
    ) -> StepForecast:
        """Output tokens left, at least 1, the same at each threshold."""
        length = self._truths[request.id].output_tokens + self._error(request.id)
        emitted = progress.emitted
        left = length - emitted
        if left <= 0.0:
            left = max(LEAST_LEFT_TOKENS, LEAST_LEFT_SHARE * emitted) if emitted else 1.0
        left = max(1.0, left)
        return StepForecast(
            tuple(thresholds), (left,) * len(thresholds), emitted + left, progress.steps
        )

    def _error(self, request_id: str) -> float:
        if not self._sigma_tokens:
            return 0.0
        error = self._errors.get(request_id)
        if error is None:
            rng = random.Random(f"{self._seed}/lengths/{request_id}")
            error = self._errors[request_id] = round(rng.gauss(0.0, self._sigma_tokens))
        return error

    def learn(self, request: Request, progress: Progress, outcome: StepOutcome, step: Step) -> None:
        """Nothing to learn."""

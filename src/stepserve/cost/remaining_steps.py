"""How many steps a request still needs: the mean tokens per step of each threshold.

The plain sibling of a trained predictor: it knows a request's threshold and how many tokens
are left, nothing of its difficulty. Both of its numbers are learned while serving: tokens
settled per step by threshold, and the output length at which requests end.
"""

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepserve.core.config import NoOptions
from stepserve.core.errors import FieldError
from stepserve.core.forecast import StepForecast
from stepserve.core.request import Family, FinishReason, Progress, Request
from stepserve.core.step import Step, StepOutcome
from stepserve.cost.forecast_parts import ForecastParts
from stepserve.files import content_of, read_json

LEARNING_RATE = 0.02


@dataclass(frozen=True, slots=True)
class Yields:
    """Measured means for one model.

    ``tokens_per_step`` by threshold; ``output_tokens``: mean output length of requests that
    end by themselves. ``source`` says how they were measured.
    """

    tokens_per_step: Mapping[float, float]
    output_tokens: float
    source: str

    def __post_init__(self) -> None:
        """Raises FieldError for values that no forecast can be made of."""
        values = self.tokens_per_step.values()
        if not values or not all(0.0 < value < math.inf for value in values):
            raise FieldError("yields.tokens_per_step", "needs values, positive and finite")
        if not 1.0 <= self.output_tokens < math.inf:
            raise FieldError("yields.output_tokens", "must be at least 1 and finite")

    @classmethod
    def load(cls, path: Path) -> "Yields":
        """Read yields from JSON: ``{"tokens_per_step": {"0.9": 2.1, ...}, ...}``.

        Raises FieldError (``yields``) for another file.
        """
        table = read_json(path, "yields")
        with content_of(path, "yields", "table of yields"):
            per_step = {float(t): float(y) for t, y in table["tokens_per_step"].items()}
            return cls(per_step, float(table["output_tokens"]), table["source"])


def most_steps(request: Request, progress: Progress, settled: int) -> float:
    """Steps that the request's own caps allow it still; infinite without caps."""
    options, most = request.diffusion, math.inf
    if options.max_forwards is not None:
        most = float(options.max_forwards - progress.steps)
    if options.max_steps_per_block is not None:
        blocks = -((settled - request.max_output_tokens) // options.block_tokens)
        most = min(most, float(blocks * options.max_steps_per_block))
    return most


PUBLISHED = Yields(
    {0.9: 256 / 85.70, 0.8: 256 / 67.05, 0.7: 256 / 54.08, 0.6: 256 / 44.83, 0.5: 256 / 38.65},
    256.0,
    "published: LLaDA-8B, GSM8K, 256 tokens, block 32, dual cache (DiLaServe D2)",
)
"""A start for models that come without yields of their own; corrected while serving."""


class MeanYield:
    """A ``StepPredictor`` by per-threshold means: measured ones of the model, or published."""

    Options = NoOptions
    family = Family.DIFFUSION

    def __init__(self, options: NoOptions, parts: ForecastParts) -> None:
        yields = parts.yields or PUBLISHED
        self._thresholds = sorted(yields.tokens_per_step)
        self._per_step = [yields.tokens_per_step[t] for t in self._thresholds]
        self._output_tokens = yields.output_tokens
        self._bounds = [(a + b) / 2 for a, b in itertools.pairwise(self._thresholds)]

    def remaining_steps(
        self, request: Request, progress: Progress, thresholds: Sequence[float]
    ) -> StepForecast:
        """Tokens left over tokens per step; never more steps than positions left."""
        settled = progress.settled - request.prompt_tokens
        limit = request.max_output_tokens
        expected = request.diffusion.expected_output_tokens or self._output_tokens
        expected = request.possible_tokens(expected)
        if settled >= expected:  # it outlived the guess: half of what it may still use
            expected = settled + (limit - settled) / 2
        output = min(float(limit), max(expected, settled + 1.0))
        left = output - settled
        most = most_steps(request, progress, settled)
        steps = tuple(max(1.0, min(most, left / self._yield(t))) for t in thresholds)
        return StepForecast(tuple(thresholds), steps, output, progress.steps)

    def learn(self, request: Request, progress: Progress, outcome: StepOutcome, step: Step) -> None:
        """Update the yield of the nearest known threshold, and the length of a natural end.

        What a client's own caps did (several tokens forced at once, an end at ``max_tokens``)
        says nothing about the model and is left out; as is how long an answer was that could not
        have been shorter.
        """
        if step.threshold is None or outcome.error is not None or outcome.forced > 1:
            return
        index = bisect.bisect_left(self._bounds, step.threshold)
        mean = self._per_step[index]
        self._per_step[index] = max(1.0, mean + LEARNING_RATE * (outcome.settled - mean))
        if outcome.finished is FinishReason.STOP and not request.min_output_tokens:
            self._output_tokens += LEARNING_RATE * (outcome.emitted - self._output_tokens)

    def _yield(self, threshold: float) -> float:
        """Tokens per step, linear between known thresholds, constant beyond them."""
        known, values = self._thresholds, self._per_step
        right = bisect.bisect_left(known, threshold)
        if right == 0:
            return values[0]
        if right == len(known):
            return values[-1]
        share = (threshold - known[right - 1]) / (known[right] - known[right - 1])
        return values[right - 1] + share * (values[right] - values[right - 1])

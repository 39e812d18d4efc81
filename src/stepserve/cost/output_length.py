"""How long an autoregressive output becomes: a hint, the mean of its like, or the limit.

Source: DynaServe 3.6 (its fill-ins: class mean, request hint, ``max_tokens``). A forecast has
one threshold, 1.0: ``steps`` are decode steps left, ``output_tokens`` is the expected total. What a
request makes certain goes before all of them: it is never above the request's limit, and never
below its ``min_output_tokens``. No margin is added: that is the placement's. Deviations:

- Classes are powers of two of the prompt length alone: a cluster serves one model, and the
  endpoint is not known here.
- An end at the limit says that the natural length is at least that. Such lengths count as
  censored: tokens seen over ends seen (what maximises likelihood if every token is as likely to
  be the last). Where all ends are at the limit, forecasts are the limit.
- Tokens that could not have been the last (``min_output_tokens``) count for nothing. A request of
  fixed length teaches nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from stepserve.core.bounds import AT_LEAST_1, Bounded
from stepserve.core.config import NoOptions
from stepserve.core.forecast import StepForecast
from stepserve.core.request import Family, FinishReason, Progress, Request
from stepserve.core.step import Step, StepOutcome
from stepserve.cost.forecast_parts import ForecastParts

LEARNING_RATE = 0.02
FIRST = 4.0  # requests that a class's start counts for
LEAST_LEFT, LEFT_SHARE = 32.0, 0.1  # of a request that outlived its forecast (DynaServe 3.6)


def forecast_of(
    request: Request, progress: Progress, thresholds: Sequence[float], expected: float
) -> StepForecast:
    """The forecast of a request whose output is ``expected`` to be so long, if it is not yet."""
    emitted, output = progress.emitted, request.possible_tokens(expected)
    if emitted >= output:
        output = request.possible_tokens(emitted + max(LEAST_LEFT, LEFT_SHARE * emitted))
    steps = (max(1.0, output - emitted),) * len(thresholds)
    return StepForecast(tuple(thresholds), steps, output, progress.steps)


class MaxTokens:
    """A ``StepPredictor`` that expects every output to reach its limit."""

    Options = NoOptions
    family = Family.AUTOREGRESSIVE

    def __init__(self, options: NoOptions, parts: ForecastParts) -> None:
        """Nothing is needed."""

    def remaining_steps(
        self, request: Request, progress: Progress, thresholds: Sequence[float]
    ) -> StepForecast:
        """See ``StepPredictor.remaining_steps``."""
        return forecast_of(request, progress, thresholds, float(request.max_output_tokens))

    def learn(self, request: Request, progress: Progress, outcome: StepOutcome, step: Step) -> None:
        """Nothing to learn."""


class _Lengths:
    """Mean tokens of an output, and the share that ended by themselves."""

    def __init__(self, tokens: float, ended: float) -> None:
        self.tokens, self.ended, self.count = tokens, ended, FIRST

    def take(self, tokens: int, ended: bool) -> None:
        self.count += 1.0
        rate = max(LEARNING_RATE, 1.0 / self.count)
        self.tokens += rate * (tokens - self.tokens)
        self.ended += rate * (ended - self.ended)


class ClassMean:
    """A ``StepPredictor`` by the mean output length of prompts about as long, learned online.

    A class that has seen nothing starts from what all requests together have shown so far.
    """

    family = Family.AUTOREGRESSIVE

    @dataclass(frozen=True, slots=True)
    class Options(Bounded):
        """``output_tokens``: expected before any request has ended."""

        output_tokens: Annotated[float, AT_LEAST_1] = 256.0

    def __init__(self, options: Options, parts: ForecastParts) -> None:
        self._all = _Lengths(options.output_tokens, 1.0)
        self._classes: dict[int, _Lengths] = {}

    def remaining_steps(
        self, request: Request, progress: Progress, thresholds: Sequence[float]
    ) -> StepForecast:
        """See ``StepPredictor.remaining_steps``."""
        lengths = self._classes.get(request.prompt_tokens.bit_length(), self._all)
        limit = float(request.max_output_tokens)
        # compared by products: the share of ends may come down to 0
        bounded = lengths.tokens >= limit * lengths.ended
        expected = limit if bounded else max(1.0, lengths.tokens / lengths.ended)
        return forecast_of(request, progress, thresholds, expected)

    def learn(self, request: Request, progress: Progress, outcome: StepOutcome, step: Step) -> None:
        """Take a request that ended by itself or at its limit into account."""
        free = outcome.emitted - request.min_output_tokens
        if outcome.finished not in (FinishReason.STOP, FinishReason.LENGTH) or free <= 0:
            return
        ended = outcome.finished is FinishReason.STOP
        kind = request.prompt_tokens.bit_length()
        if kind not in self._classes:
            self._classes[kind] = _Lengths(self._all.tokens, self._all.ended)
        for lengths in (self._all, self._classes[kind]):
            lengths.take(free, ended)


class Hinted(ClassMean):
    """A ``StepPredictor`` that believes ``Request.expected_output_tokens``; else ``ClassMean``.

    It learns of all requests, hint or not.
    """

    def remaining_steps(
        self, request: Request, progress: Progress, thresholds: Sequence[float]
    ) -> StepForecast:
        """See ``StepPredictor.remaining_steps``."""
        if request.expected_output_tokens is None:
            return super().remaining_steps(request, progress, thresholds)
        expected = float(request.expected_output_tokens)
        return forecast_of(request, progress, thresholds, expected)

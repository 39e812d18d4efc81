"""Remaining steps by gradient-boosted trees over progress and confidence (DiLaServe B5).

One model answers for all thresholds: it is asked once per candidate, with the threshold as a
feature. Its plain sibling is ``MeanYield``. ``boosted_fit`` trains it; serving needs only the
shared library of LightGBM, called directly: its Python layer takes longer than the trees.

Deviations: predictions are clipped to what is possible (DiLaServe C5); shares are of the reach (see
``features``); a second, equal model foretells the output length where requests end by
themselves; and a running correction may heal a model that is wrong (DiLaServe E6).
"""

import bisect
import ctypes
import functools
import importlib.util
import itertools
import json
import math
import struct
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from stepserve.core.bounds import Bounded, Chance
from stepserve.core.errors import FieldError, StepserveError
from stepserve.core.forecast import StepForecast
from stepserve.core.ids import RequestId
from stepserve.core.request import Family, Progress, Request
from stepserve.core.step import Step, StepOutcome
from stepserve.cost.features import (
    ENDED,
    FEATURE_SETS,
    FEATURES,
    NO_CONFIDENCE,
    feature_values,
)
from stepserve.cost.forecast_parts import ForecastParts
from stepserve.cost.remaining_steps import most_steps
from stepserve.files import content_of, read_text

FORMAT = "stepserve step model 1"
"""Weight of the newest finished request in the averages that the correction keeps."""

MOST = 4.0
"""A correction multiplies or divides by no more than this."""

REMEMBERED = 4096
"""Most first forecasts, and most unfinished requests, kept in memory."""


@dataclass(frozen=True, slots=True)
class StepModel:
    """A trained model. ``steps`` and ``output`` are LightGBM model texts.

    ``steps`` predicts remaining steps / reach; ``output`` predicts (output length - unmasked) /
    reach and is empty if requests run to their limit. ``features`` names the feature set;
    ``natural_tokens`` bounds the reach; ``thresholds`` ascend; ``wmape`` was measured on
    requests not trained on; ``source`` says what it was trained on.
    """

    steps: str
    output: str
    features: str
    natural_tokens: float | None
    thresholds: tuple[float, ...]
    wmape: float
    source: str

    def save(self, path: Path) -> None:
        """Write one line of JSON, then the model texts."""
        header = {"format": FORMAT, **asdict(self)}
        header.update(steps=len(self.steps), output=len(self.output))
        path.write_text(json.dumps(header) + "\n" + self.steps + self.output)

    @classmethod
    def load(cls, path: Path) -> "StepModel":
        """Read a model. Raises FieldError (``predictor``) for a file that is none."""
        line, _, body = read_text(path, "predictor").partition("\n")
        with content_of(path, "predictor", "step model"):
            header = json.loads(line)
            if header.pop("format") != FORMAT or header["features"] not in FEATURE_SETS:
                raise ValueError(f"not written as {FORMAT!r}")
            end, rest = header["steps"], header["output"]
            if len(body) != end + rest:
                raise ValueError(f"{len(body)} characters of model, not {end + rest}")
            header.update(steps=body[:end], output=body[end:])
            model = cls(**{**header, "thresholds": tuple(header["thresholds"])})
        Trees(model.steps, FEATURE_SETS[model.features], new_row())  # refuses a broken model now
        return model


@functools.cache
def _lightgbm() -> ctypes.PyDLL:
    """LightGBM's C interface.

    The interpreter lock is kept (``PyDLL``): a call takes microseconds, and getting the lock
    back from a busy thread may take milliseconds.
    """
    package = importlib.util.find_spec("lightgbm")
    if package is None or package.origin is None:
        raise StepserveError("the boosted predictor needs the package 'lightgbm'")
    library = next(Path(package.origin).parent.rglob("lib_lightgbm.*"))
    try:
        lightgbm = ctypes.PyDLL(str(library))
    except OSError as error:  # most likely libgomp is not installed
        raise StepserveError(f"LightGBM cannot be loaded: {error}") from error
    lightgbm.LGBM_GetLastError.restype = ctypes.c_char_p
    return lightgbm


def _check(status: int) -> None:
    if status != 0:
        why = _lightgbm().LGBM_GetLastError().decode(errors="replace")
        raise FieldError("predictor", f"LightGBM refuses the model: {why}")


_ROW = struct.Struct(f"{len(FEATURES)}d")


def new_row() -> "ctypes.Array[ctypes.c_double]":
    """A row of features, to be filled and asked about."""
    return (ctypes.c_double * len(FEATURES))()


class Trees:
    """A model text ready to be asked row by row; owns its booster. Not thread-safe.

    ``width``: how many of the features it was trained on. ``row`` is what ``ask`` is about,
    always all of ``FEATURES``; the asker fills it, and may share it among models.
    """

    def __init__(self, text: str, width: int, row: "ctypes.Array[ctypes.c_double]") -> None:
        lightgbm, booster, config = _lightgbm(), ctypes.c_void_p(), ctypes.c_void_p()
        found = ctypes.c_int()
        at = ctypes.byref
        _check(lightgbm.LGBM_BoosterLoadModelFromString(text.encode(), at(found), at(booster)))
        weakref.finalize(self, lightgbm.LGBM_BoosterFree, booster)
        _check(lightgbm.LGBM_BoosterGetNumFeature(booster, at(found)))
        if found.value != width:
            raise FieldError("predictor", f"made for {found.value} features, not {width}")
        normal, first_tree, all_trees, float64 = 0, 0, -1, 1
        options = b"num_threads=1 verbosity=-1"
        _check(
            lightgbm.LGBM_BoosterPredictForMatSingleRowFastInit(
                booster, normal, first_tree, all_trees, float64, width, options, at(config)
            )
        )
        weakref.finalize(self, lightgbm.LGBM_FastConfigFree, config)
        self._answer, self._length = ctypes.c_double(), ctypes.c_int64()
        self._predict = lightgbm.LGBM_BoosterPredictForMatSingleRowFast
        self._row = row
        self._arguments = (config, at(row), at(self._length), at(self._answer))

    def ask(self) -> float:
        """The model's answer for what is in the row now."""
        status = self._predict(*self._arguments)
        if status:
            _check(status)
        return self._answer.value

    def ask_each(self, thresholds: Sequence[float], unit: float) -> list[float]:
        """``unit`` times the answers at these thresholds, which are put first in the row."""
        predict, arguments, row, answer = self._predict, self._arguments, self._row, self._answer
        answers = []
        for row[0] in thresholds:
            status = predict(*arguments)
            if status:
                _check(status)
            answers.append(answer.value * unit)
        return answers


class Correction:
    """A factor per threshold, learned from how many steps finished requests really took.

    Per threshold two running averages are kept, of true and of forecast remaining steps, each
    summed over a request's steps at that threshold; the factor is their ratio. (An average
    of ratios would sink below 1 for a model that is right.) A forecast assumes that the threshold
    stays: where it did not, the correction learns from a request that is a mixture.
    """

    def __init__(self, thresholds: Sequence[float], rate: float) -> None:
        self._bounds = [(a + b) / 2 for a, b in itertools.pairwise(thresholds)]
        self._averages: list[tuple[float, float] | None] = [None] * len(thresholds)
        self._rate = rate
        self._open: dict[RequestId, list[tuple[int, int, float]]] = {}

    def factor(self, threshold: float) -> float:
        """What forecasts at this threshold are to be multiplied by."""
        averages = self._averages[bisect.bisect(self._bounds, threshold)]
        if averages is None:
            return 1.0
        return max(1 / MOST, min(MOST, averages[0] / averages[1]))

    def note(self, request_id: RequestId, steps: int, threshold: float, forecast: float) -> None:
        """A step ran: ``steps`` ran before it, and ``forecast`` (uncorrected) were expected."""
        seen = self._open.get(request_id)
        if seen is None:
            if len(self._open) >= REMEMBERED:  # most likely cancelled, and never heard of again
                del self._open[next(iter(self._open))]
            seen = self._open[request_id] = []
        seen.append((bisect.bisect(self._bounds, threshold), steps, forecast))

    def forget(self, request_id: RequestId) -> None:
        """The request says nothing about the model."""
        self._open.pop(request_id, None)

    def finish(self, request_id: RequestId, total_steps: int) -> None:
        """The request ended by itself after that many steps."""
        seen = self._open.pop(request_id, [])
        for index in {index for index, _, _ in seen}:
            truth = float(sum(total_steps - steps for i, steps, _ in seen if i == index))
            forecast = sum(value for i, _, value in seen if i == index)
            true_mean, mean = self._averages[index] or (forecast, forecast)
            self._averages[index] = (
                true_mean + self._rate * (truth - true_mean),
                mean + self._rate * (forecast - mean),
            )


class BoostedSteps:
    """A ``StepPredictor`` by a trained model. Not thread-safe, as any of them.

    How often a forecast is made is the scheduler's ``predict_every_tokens``: 8 is the published
    *online* predictor, a number beyond every output limit the *one-shot* one.
    """

    family = Family.DIFFUSION

    @dataclass(frozen=True, slots=True)
    class Options(Bounded):
        """``healing_rate``: how fast a running correction follows the requests that finish.

        0 for none, which is the published predictor.
        """

        healing_rate: Chance = 0.02

    def __init__(self, options: Options, parts: ForecastParts) -> None:
        """Raises FieldError where nothing was trained."""
        model, healing_rate = parts.trees, options.healing_rate
        if model is None:
            raise FieldError("use", f"nothing was trained: no step_predictor.txt in {parts.folder}")
        width = FEATURE_SETS[model.features]
        self._natural_tokens = model.natural_tokens
        self._row = new_row()
        self._steps = Trees(model.steps, width, self._row)
        self._output = Trees(model.output, width, self._row) if model.output else None
        self._correction = Correction(model.thresholds, healing_rate) if healing_rate else None
        self._first: dict[tuple[object, ...], tuple[list[float], float]] = {}

    def remaining_steps(
        self, request: Request, progress: Progress, thresholds: Sequence[float]
    ) -> StepForecast:
        """One question to the model per threshold, and one about the output length.

        Never fewer steps than blocks left up to the expected end, never more than masked
        positions or than the request's own caps allow.
        """
        limit, block = request.max_output_tokens, request.diffusion.block_tokens
        unmasked = progress.settled - request.prompt_tokens
        candidates = tuple(thresholds)
        steps, left = self._forecast(request, progress, candidates)
        output = request.possible_tokens(max(unmasked + left, unmasked + 1.0))
        low = max(1.0, float(math.ceil(output / block) - unmasked // block))
        high = max(1.0, min(most_steps(request, progress, unmasked), float(limit - unmasked)))
        if self._correction is not None:
            factor = self._correction.factor
            steps = [value * factor(t) for value, t in zip(steps, candidates, strict=True)]
        least = min(high, low)
        clipped = tuple([least if v <= low else v if v < high else high for v in steps])
        return StepForecast(candidates, clipped, output, progress.steps)

    def learn(self, request: Request, progress: Progress, outcome: StepOutcome, step: Step) -> None:
        """Feed the correction, if there is one.

        What a client's own caps may have cut short says nothing about the model: left out.
        """
        correction = self._correction
        if correction is None or step.threshold is None:
            return
        caps = (request.diffusion.max_forwards, request.diffusion.max_steps_per_block)
        if outcome.error is not None or outcome.forced > 1 or any(caps):
            correction.forget(request.id)
            return
        (expected,), _ = self._forecast(request, progress, (step.threshold,))
        correction.note(request.id, progress.steps, step.threshold, max(1.0, expected))
        if outcome.finished in ENDED:
            correction.finish(request.id, progress.steps + 1)

    def _forecast(
        self, request: Request, progress: Progress, thresholds: tuple[float, ...]
    ) -> tuple[list[float], float]:
        """Steps left at each threshold and output tokens left, as the trees say.

        Of a request that has run no step it depends on few numbers, and is kept in a table.
        """
        limit, options = request.max_output_tokens, request.diffusion
        reach = float(limit)
        if self._natural_tokens is not None:
            expected = options.expected_output_tokens or self._natural_tokens
            reach = request.possible_tokens(expected)
        block, unmasked = options.block_tokens, progress.settled - request.prompt_tokens
        key = None
        if progress.steps == 0 and unmasked == 0:
            key = (limit, block, reach, thresholds)
            if key in self._first:
                return self._first[key]
        seen = progress.confidence or NO_CONFIDENCE
        values = feature_values(thresholds[0], limit, block, reach, progress.steps, unmasked, seen)
        answer = self._ask(values, thresholds, reach)
        if key is not None:
            if len(self._first) >= REMEMBERED:
                self._first.clear()
            self._first[key] = answer
        return answer

    def _ask(
        self, values: tuple[float, ...], thresholds: tuple[float, ...], reach: float
    ) -> tuple[list[float], float]:
        """Answers in tokens. The output length is asked for at the first threshold."""
        _ROW.pack_into(self._row, 0, *values)
        left = math.inf if self._output is None else self._output.ask() * reach
        return self._steps.ask_each(thresholds, reach), left

"""An accuracy proxy: what lower thresholds cost, by where in a request they were used.

A proxy, never a measured accuracy: results that carry it say ``accuracy_kind="proxy"``.

Source: DiLaServe B3 (accuracy at fixed thresholds), DiLaServe D4 (what each third of a request
contributes), DiLaServe C9.6 (the plain variant by mean threshold). Ours: a token settled at a
threshold takes the share of accuracy that the threshold takes when used throughout, weighted by the
third of the output it lies in. Averaging over tokens, not the threshold, is what reproduces the
published curve of two thresholds mixed within a request to half a point.

Deviations: 0.8 counts as harmless and the first third as free, where the published numbers
are slightly better than harmless, within their noise. Only GSM8K on LLaDA-8B has a published
curve; the other models and data sets lose the same share of their own accuracy at 0.9.
"""

import bisect
from collections.abc import Sequence

from stepserve.core.errors import FieldError
from stepserve.sim.data import facts

ACCURACY_KIND = "proxy"

_FACTS = facts("quality")
_CURVE = sorted((float(t), points) for t, points in _FACTS["by_threshold"].items())
_THRESHOLDS = [t for t, _ in _CURVE]
_BEST: float = _CURVE[-1][1]
_LOSSES: list[float] = [max(0.0, 1.0 - points / _BEST) for _, points in _CURVE]
_GAINS: list[float] = [max(0.0, points) for points in _FACTS["points_by_third"]]
STAGE_WEIGHTS: tuple[float, ...] = tuple(gain / sum(_GAINS) for gain in _GAINS)
"""Share of the harm that a low threshold does in each third of the output."""


def loss(threshold: float) -> float:
    """Share of the accuracy at 0.9 that is lost if all tokens settle at this threshold.

    Linear between the published thresholds, constant beyond them; never rises with the
    threshold.
    """
    right = bisect.bisect_left(_THRESHOLDS, threshold)
    if right == 0:
        return _LOSSES[0]
    if right == len(_THRESHOLDS):
        return _LOSSES[-1]
    low, high = _THRESHOLDS[right - 1], _THRESHOLDS[right]
    share = (threshold - low) / (high - low)
    return _LOSSES[right - 1] + share * (_LOSSES[right] - _LOSSES[right - 1])


_SEEN: dict[float, float] = {}  # losses worked out before: a run has a handful of thresholds


class StageUse:
    """The thresholds at which a request's tokens settled, by third of its output."""

    __slots__ = ("_losses", "_output", "_thresholds", "_tokens")

    def __init__(self, output_tokens: int) -> None:
        self._output = output_tokens
        self._tokens, self._thresholds, self._losses = [0] * 3, [0.0] * 3, [0.0] * 3

    def settle(self, before: int, tokens: int, threshold: float) -> None:
        """``tokens`` more settled, ``before`` of them earlier: the third where they begin."""
        third = 3 * before // self._output
        if third > 2:
            third = 2
        lost = _SEEN.get(threshold)
        if lost is None:
            lost = _SEEN[threshold] = loss(threshold)
        self._tokens[third] += tokens
        self._thresholds[third] += tokens * threshold
        self._losses[third] += tokens * lost

    @property
    def losses(self) -> tuple[float, ...]:
        """Mean loss of each third; 0 for a third without tokens."""
        return tuple(x / max(1, n) for x, n in zip(self._losses, self._tokens, strict=True))

    @property
    def mean_threshold(self) -> float:
        """Token-weighted; the highest one if nothing settled."""
        tokens = sum(self._tokens)
        return sum(self._thresholds, 0.0) / tokens if tokens else _THRESHOLDS[-1]


def base_accuracy(model: str, dataset: str) -> float:
    """Published accuracy at threshold 0.9, in 0..1. Raises FieldError where there is none."""
    sets = _FACTS["at_0.9"].get(model)
    if sets is None:
        raise FieldError("model", f"no published accuracy of {model!r}")
    if dataset not in sets:
        raise FieldError("dataset", f"no published accuracy on {dataset!r}")
    return float(sets[dataset])


def accuracy_proxy(
    model: str, dataset: str, losses: Sequence[float], points_lost: float = 0.0
) -> float:
    """Expected accuracy (0..1) of a request with these mean losses in its three thirds.

    ``losses`` comes from ``StageUse.losses``, or from ``loss`` of a threshold held through
    a third. ``points_lost``: percentage points lost to rarer or narrower recomputes, measured
    elsewhere. Raises FieldError for a number of thirds other than 3.
    """
    if len(losses) != len(STAGE_WEIGHTS):
        raise FieldError("losses", "needs one loss per third of the output")
    share = sum(w * lost for w, lost in zip(STAGE_WEIGHTS, losses, strict=True))
    return max(0.0, base_accuracy(model, dataset) * (1.0 - share) - points_lost / 100.0)

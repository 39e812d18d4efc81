"""Remaining steps as they were predicted, with the age of the prediction."""

import itertools
from typing import NamedTuple


class StepForecast(NamedTuple):
    """Predicted remaining steps at each candidate threshold, highest threshold first.

    ``output_tokens`` is the expected total output length. ``at_steps`` is how many steps the
    request had run when the forecast was made; steps run since are subtracted, one each
    (DiLaServe B5).
    """

    thresholds: tuple[float, ...]
    steps: tuple[float, ...]
    output_tokens: float
    at_steps: int = 0

    def remaining(self, index: int, steps_run: int) -> float:
        """Steps left at ``thresholds[index]`` after ``steps_run`` steps; at least 1."""
        return max(1.0, self.steps[index] - (steps_run - self.at_steps))

    def steps_at(self, threshold: float) -> float:
        """Predicted steps at any threshold: linear between candidates, the nearest beyond."""
        pairs = list(zip(self.thresholds, self.steps, strict=True))
        for (high, most), (low, least) in itertools.pairwise(pairs):
            if low <= threshold <= high:
                return least + (most - least) * (threshold - low) / (high - low)
        return pairs[0][1] if threshold > pairs[0][0] else pairs[-1][1]

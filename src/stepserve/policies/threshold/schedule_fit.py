"""A threshold schedule over the request instead of one threshold: low early, high late.

Where in a request a low threshold is used matters: raising 0.5 to 0.9 changes accuracy by -0.5
points in the first third of the output, by +5.5 in the middle and by +8.5 in the last
(DiLaServe D4, 200 questions, 3 points of standard error a cell). So speed is bought first
where it costs least (DiLaServe E2). The choice is ``deadline_fit``'s: the best schedule whose
predicted remaining latency fits the deadline, picked anew at every step, under the cap.
"""

from collections.abc import Sequence

from stepserve.core.protocols import Parts
from stepserve.core.request import Request
from stepserve.core.running import RunningRequest, StepPace

from .deadline_fit import DeadlineFit

Levels = tuple[int, int, int]
"""Index into the candidate thresholds (0: the highest) for each third of the output."""


def schedules(candidates: int) -> tuple[Levels, ...]:
    """From the best quality to the fastest: early goes down first, then middle before late."""
    last = candidates - 1
    early = [(level, 0, 0) for level in range(candidates)]
    rest = [(last, level, level - 1) for level in range(1, candidates)]
    return (*early, *rest, (last, last, last)) if last else ((0, 0, 0),)


class ScheduleFit:
    """Monotone as ``deadline_fit`` is: less time or a slower pace never picks a better schedule."""

    Options = DeadlineFit.Options

    def __init__(self, options: DeadlineFit.Options, parts: Parts) -> None:
        self._margin = parts.margin(options.margin)
        self._schedules: dict[int, tuple[Levels, ...]] = {}

    def pick(self, running: RunningRequest, pace: StepPace, now_s: float) -> float:
        """The threshold of the present third in the first schedule that fits; else the lowest."""
        request, forecast, progress = running.request, running.forecast, running.progress
        thresholds = forecast.thresholds
        if request.slo.pinned or len(thresholds) == 1:
            return thresholds[0]
        budget_s = request.left_s(now_s, self._margin)
        third, shares = _thirds_left(request, progress.settled, forecast.output_tokens)
        run, cap = progress.steps - forecast.at_steps, running.cap
        steps = [max(1.0, left - run) for left in forecast.steps]
        heavy_left, light_s = running.heavy_left, pace.light_s
        more_s = pace.heavy_s - light_s
        early, middle, late = shares
        tried: tuple[int, ...] = ()
        for levels in self._levels(len(thresholds)):
            if thresholds[levels[third]] > cap or levels[third:] == tried:
                continue
            tried = levels[third:]
            left = early * steps[levels[0]] + middle * steps[levels[1]] + late * steps[levels[2]]
            heavy = heavy_left if heavy_left < left else left
            if left * light_s + heavy * more_s <= budget_s:
                return thresholds[levels[third]]
        return thresholds[-1]

    def _levels(self, candidates: int) -> Sequence[Levels]:
        if candidates not in self._schedules:
            self._schedules[candidates] = schedules(candidates)
        return self._schedules[candidates]


def _thirds_left(
    request: Request, settled: int, output_tokens: float
) -> tuple[int, tuple[float, float, float]]:
    """The present third, and the share of the remaining output in each third."""
    done = min(1.0, (settled - request.prompt_tokens) / output_tokens)
    left = max(1e-9, 1.0 - done)
    if done < 1.0 / 3.0:
        return 0, ((1.0 / 3.0 - done) / left, 1.0 / 3.0 / left, 1.0 / 3.0 / left)
    if done < 2.0 / 3.0:
        return 1, (0.0, (2.0 / 3.0 - done) / left, 1.0 / 3.0 / left)
    return 2, (0.0, 0.0, 1.0)

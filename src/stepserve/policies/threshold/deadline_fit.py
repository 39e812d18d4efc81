"""The highest threshold whose predicted remaining latency fits the deadline.

Source: DiLaServe A2.1 and ``pick`` of DiLaServe B6. Deviations: re-picked at every step
(DiLaServe C3); the deadline is the request's own, and so are the candidates, bounded by its
preferred threshold and its floor; ``on_miss = best_effort`` keeps the preferred threshold. The
search starts from the request's cap (``load_caps``).
"""

from dataclasses import dataclass

from stepserve.core.bounds import Bounded, Share
from stepserve.core.protocols import Parts
from stepserve.core.running import RunningRequest, StepPace


class DeadlineFit:
    """Monotone: more time left never picks a lower threshold, a slower pace never a higher."""

    @dataclass(frozen=True, slots=True)
    class Options(Bounded):
        """``margin``: the share of a deadline that is planned against; else ``control.margin``."""

        margin: Share | None = None

    def __init__(self, options: Options, parts: Parts) -> None:
        self._margin = parts.margin(options.margin)

    def pick(self, running: RunningRequest, pace: StepPace, now_s: float) -> float:
        """First candidate, from the cap downwards, whose remaining steps fit; else the lowest."""
        request = running.request
        if request.slo.pinned:
            return running.forecast.thresholds[0]
        return highest_fit(running, pace, request.left_s(now_s, self._margin))


def highest_fit(running: RunningRequest, pace: StepPace, budget_s: float) -> float:
    """The highest candidate under the cap whose predicted time fits; the lowest if none does."""
    forecast = running.forecast
    cap, heavy_left, light_s = running.cap, running.heavy_left, pace.light_s
    more_s = pace.heavy_s - light_s
    run = running.progress.steps - forecast.at_steps
    for threshold, steps in zip(forecast.thresholds, forecast.steps, strict=True):
        if threshold <= cap:
            left = steps - run  # StepForecast.remaining, without the call
            if left < 1.0:
                left = 1.0
            heavy = heavy_left if heavy_left < left else left
            if left * light_s + heavy * more_s <= budget_s:
                return threshold
    return forecast.thresholds[-1]

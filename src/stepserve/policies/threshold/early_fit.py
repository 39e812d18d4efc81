"""``deadline_fit`` that is careful early and exact late: low thresholds first, high ones last.

A forecast is least sure at the start of a request, and what it misses has to be caught up at
the end, by low thresholds where they cost most: from 0.5 to 0.9, accuracy rises by -0.5, 5.5
and 8.5 points over the thirds of a request (DiLaServe D4). So the share of the deadline that
is planned against grows with the request's progress (ours, DiLaServe E2): time that was saved early
comes back as higher thresholds.
"""

from stepserve.core.request import OnMiss
from stepserve.core.running import RunningRequest, StepPace

from .deadline_fit import highest_fit


class EarlyFit:
    """Monotone in time left and pace, as ``deadline_fit`` is."""

    def __init__(self, early: float, late: float) -> None:
        """Shares of the deadline planned against at the start and at the end of a request."""
        self._early = early
        self._late = late

    def pick(self, running: RunningRequest, pace: StepPace, now_s: float) -> float:
        """First candidate, from the cap downwards, whose remaining steps fit; else the lowest."""
        request, slo = running.request, running.request.slo
        if slo.e2e_s is None or slo.on_miss is OnMiss.BEST_EFFORT:
            return running.forecast.thresholds[0]
        settled = running.progress.settled - request.prompt_tokens
        done = settled / running.forecast.output_tokens
        if done > 1.0:
            done = 1.0
        share = self._early + (self._late - self._early) * done
        return highest_fit(running, pace, request.arrival_s + share * slo.e2e_s - now_s)

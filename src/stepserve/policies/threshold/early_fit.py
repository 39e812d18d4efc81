"""``deadline_fit`` that is careful early and exact late: low thresholds first, high ones last.

A forecast is least sure at the start of a request, and what it misses has to be caught up at
the end, by low thresholds where they cost most: from 0.5 to 0.9, accuracy rises by -0.5, 5.5
and 8.5 points over the thirds of a request (DiLaServe D4). So the share of the deadline that
is planned against grows with the request's progress (ours, DiLaServe E2): time that was saved early
comes back as higher thresholds.
"""

from dataclasses import dataclass

from stepserve.core.bounds import Bounded, Share
from stepserve.core.protocols import Parts
from stepserve.core.running import RunningRequest, StepPace

from .deadline_fit import highest_fit


class EarlyFit:
    """Monotone in time left and pace, as ``deadline_fit`` is."""

    @dataclass(frozen=True, slots=True)
    class Options(Bounded):
        """``early_margin``: share of the deadline planned against at a request's start.

        ``margin``: at its end; else ``control.margin``.
        """

        early_margin: Share = 0.75
        margin: Share | None = None

    def __init__(self, options: Options, parts: Parts) -> None:
        self._early = options.early_margin
        self._late = parts.margin(options.margin)

    def pick(self, running: RunningRequest, pace: StepPace, now_s: float) -> float:
        """First candidate, from the cap downwards, whose remaining steps fit; else the lowest."""
        request = running.request
        if request.slo.pinned:
            return running.forecast.thresholds[0]
        settled = running.progress.settled - request.prompt_tokens
        done = settled / running.forecast.output_tokens
        if done > 1.0:
            done = 1.0
        share = self._early + (self._late - self._early) * done
        return highest_fit(running, pace, request.left_s(now_s, share))

"""The highest threshold whose predicted remaining latency fits the deadline.

Source: DiLaServe, dilaserve.md A2.1 and ``pick`` of B6. Deviations: re-picked at every step
(C3); the deadline is the request's own, and so are the candidates, bounded by its preferred
threshold and its floor; ``on_miss = best_effort`` keeps the preferred threshold. The caps
under load that B6 starts from are a separate policy.
"""

from stepserve.core.request import OnMiss
from stepserve.core.resident import Resident, StepPace


class DeadlineFit:
    """Monotone: more time left never picks a lower threshold, a slower pace never a higher."""

    def __init__(self, margin: float) -> None:
        """``margin``: the share of a deadline that is planned against (B1: 0.9)."""
        self._margin = margin

    def pick(self, resident: Resident, pace: StepPace, now_s: float) -> float:
        """First candidate, from the highest, whose remaining steps fit; else the lowest."""
        request, forecast = resident.request, resident.forecast
        slo = request.slo
        if slo.e2e_s is None or slo.on_miss is OnMiss.BEST_EFFORT:
            return forecast.thresholds[0]
        budget_s = request.arrival_s + self._margin * slo.e2e_s - now_s
        for index, threshold in enumerate(forecast.thresholds):
            steps = forecast.remaining(index, resident.progress.steps)
            heavy = min(steps, resident.heavy_left)
            if heavy * pace.heavy_s + (steps - heavy) * pace.light_s <= budget_s:
                return threshold
        return forecast.thresholds[-1]

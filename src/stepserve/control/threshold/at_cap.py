"""Always the cap that load control sets: the published ablation without the deadline's choice.

Source: dilaserve.md B6 ("no SLO-aware").
"""

from stepserve.core.resident import Resident, StepPace


class AtCap:
    """Load control alone decides."""

    def pick(self, resident: Resident, pace: StepPace, now_s: float) -> float:
        """The highest candidate that the cap allows; the lowest if it allows none."""
        thresholds = resident.forecast.thresholds
        return next((t for t in thresholds if t <= resident.cap), thresholds[-1])

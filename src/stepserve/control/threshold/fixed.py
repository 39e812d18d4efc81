"""The plain threshold: always the preferred one. Baseline of ``deadline_fit``."""

from stepserve.core.resident import Resident, StepPace


class FixedThreshold:
    """What every serving system before DiLaServe does."""

    def pick(self, resident: Resident, pace: StepPace, now_s: float) -> float:
        """The request's preferred threshold."""
        return resident.forecast.thresholds[0]

"""The plain threshold: always the preferred one. Baseline of ``deadline_fit``."""

from stepserve.core.config import NoOptions
from stepserve.core.protocols import Parts
from stepserve.core.running import RunningRequest, StepPace


class FixedThreshold:
    """What every serving system before DiLaServe does."""

    Options = NoOptions

    def __init__(self, options: NoOptions, parts: Parts) -> None:
        """Nothing is needed."""

    def pick(self, running: RunningRequest, pace: StepPace, now_s: float) -> float:
        """The request's preferred threshold."""
        return running.forecast.thresholds[0]

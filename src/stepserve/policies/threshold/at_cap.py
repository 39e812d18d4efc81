"""Always the cap that load control sets: the published ablation without the deadline's choice.

Source: DiLaServe B6 ("no SLO-aware").
"""

from stepserve.core.config import NoOptions
from stepserve.core.protocols import Parts
from stepserve.core.running import RunningRequest, StepPace


class AtCap:
    """Load control alone decides."""

    Options = NoOptions

    def __init__(self, options: NoOptions, parts: Parts) -> None:
        """Nothing is needed."""

    def pick(self, running: RunningRequest, pace: StepPace, now_s: float) -> float:
        """The highest candidate that the cap allows; the lowest if it allows none."""
        thresholds = running.forecast.thresholds
        return next((t for t in thresholds if t <= running.cap), thresholds[-1])

"""A lost deadline buys nothing: whoever cannot keep it runs at the preferred threshold.

Ours (``control.lost = make_way``): at the lowest threshold, as published, a lost request is late
and bad, and gains nobody more than the steps that its place would have run for somebody in time.
"""

from stepserve.core.protocols import ThresholdPolicy
from stepserve.core.resident import Resident, StepPace


class UnlessLost:
    """Asks another policy about everybody whose deadline is in reach at the lowest threshold."""

    def __init__(self, policy: ThresholdPolicy) -> None:
        self._policy = policy

    def pick(self, resident: Resident, pace: StepPace, now_s: float) -> float:
        """The preferred threshold, whatever the cap, once even the lowest would be late."""
        return (
            resident.forecast.thresholds[0]
            if resident.lost(pace, now_s)
            else self._policy.pick(resident, pace, now_s)
        )

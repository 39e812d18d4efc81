"""An infeasible deadline buys nothing: whoever cannot keep it runs at the preferred threshold.

Ours (``control.infeasible = preempt``): at the lowest threshold, as published, it is late
and bad, and gains nobody more than the steps that its place would have run for somebody in time.
"""

from stepserve.core.protocols import ThresholdPolicy
from stepserve.core.running import RunningRequest, StepPace


class UnlessInfeasible:
    """Asks another policy about everybody whose deadline is in reach at the lowest threshold."""

    def __init__(self, policy: ThresholdPolicy) -> None:
        self._policy = policy

    def pick(self, running: RunningRequest, pace: StepPace, now_s: float) -> float:
        """The preferred threshold, whatever the cap, once even the lowest would be late."""
        return (
            running.forecast.thresholds[0]
            if running.infeasible(pace, now_s)
            else self._policy.pick(running, pace, now_s)
        )

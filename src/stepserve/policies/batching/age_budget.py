"""``tbt_budget`` by the age of each decode's last token (ours).

The target of a gap has begun to pass when the batch begins: a token that is late already makes
the batch shorter, by at most half of its target, not empty of prefills.
"""

from stepserve.core.running import RunningRequest
from stepserve.core.step import Step

from .tbt_budget import TbtBudget


class AgeBudget(TbtBudget):
    """A ``BatchingPolicy``: M is what is left of the targets."""

    def left_s(self, running: RunningRequest, step: Step, now_s: float) -> float:
        """Seconds that the batch may take for this one."""
        target_s = running.request.slo.scheduled_tbt_s or self._tbt_s
        if step.kind.heavy:
            return target_s
        return target_s - min(now_s - running.last_token_s, 0.5 * target_s)

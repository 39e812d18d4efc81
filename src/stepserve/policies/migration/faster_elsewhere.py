"""Migration to where a step would be faster (DiLaServe B7, DiLaServe C6).

One target is considered, the instance with the fewest running tokens that has room; the
move is worth it if a step there, the newcomer at full length included, takes less than a step here
takes now. Deviation (DiLaServe C6): a relative gain is asked for, so that nobody ping-pongs.
"""

from collections.abc import Callable, Iterator

from stepserve.core.ids import InstanceId
from stepserve.core.instance import InstanceLoad
from stepserve.core.protocols import CostModel
from stepserve.core.request import Request


class FasterElsewhere:
    """A ``MigrationPolicy``."""

    def __init__(self, cost: CostModel, full_tokens: Callable[[Request], int], gain: float) -> None:
        """``gain``: share by which the step must be faster."""
        self._cost = cost
        self._full_tokens = full_tokens
        self._gain = gain

    def target(
        self, request: Request, source: InstanceLoad, others: Iterator[InstanceLoad]
    ) -> InstanceId | None:
        """See ``MigrationPolicy.target``."""
        best = next(others, None)
        if best is None:
            return None
        tokens = best.running_tokens + self._full_tokens(request)
        there_s = self._cost.step_time_s(tokens, best.running_requests + 1, best.spec)
        here_s = self._cost.step_time_s(source.running_tokens, source.running_requests, source.spec)
        return best.spec.id if there_s < here_s * (1.0 - self._gain) else None

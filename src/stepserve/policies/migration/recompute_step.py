"""Migration to where a step would be faster, at a recompute step (DiLaServe B7).

One target is considered, the instance with the fewest running tokens that has room; the
move is worth it if a step there, the newcomer at full length included, takes less than a step here
takes now. Deviation (DiLaServe C6): a relative gain is asked for, so that nobody ping-pongs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from stepserve.core.bounds import Bounded, NotNegative
from stepserve.core.ids import InstanceId
from stepserve.core.instance import InstanceLoad
from stepserve.core.protocols import Parts
from stepserve.core.request import Request
from stepserve.core.segment import ReleasePoint


class RecomputeStep:
    """A ``MigrationPolicy``: the move costs no work beside what was due anyway."""

    at = ReleasePoint.CUT

    @dataclass(frozen=True, slots=True)
    class Options(Bounded):
        """``gain``: share by which the step must be faster."""

        gain: NotNegative = 0.05

    def __init__(self, options: Options, parts: Parts) -> None:
        self._cost = parts.cost
        self._full_tokens = parts.program.full_tokens
        self._gain = options.gain

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

"""Watches a run from outside: whether its rate is held, and whether its queue grows.

Nothing here is told to the schedulers, and nothing but ``EarlyEnd`` changes a run.
"""

from collections.abc import Sequence

from stepserve.core.errors import StepserveError
from stepserve.core.ids import RequestId
from stepserve.core.request import Family

from .instance import CLIENT
from .simulation import Row
from .world import World

CHECK_EVERY_S = 2.0
ROUNDING = 1e-9


def held(row: Row, hold: float) -> bool:
    """Whether a run's rate was held: see ``CapacitySearch``."""
    if row["family"] == Family.DIFFUSION:
        return bool(row["attainment"] >= hold)
    gaps = row["tbt_attainment"]
    return (gaps is None or gaps >= hold) and bool(row["served_share"] >= hold)


class NotHeldError(StepserveError):
    """A run whose rate is not held any more, whatever still happens in it."""


class QueueSamples:
    """How many requests wait for their first token, half-way through the arrivals and after."""

    def __init__(self, world: World, last_arrival_s: float) -> None:
        self.counts: list[int] = []
        for when_s in (last_arrival_s / 2.0, last_arrival_s):
            world.at(when_s, CLIENT, self._sample, world)

    def _sample(self, world: World, _: None) -> None:
        self.counts.append(sum(not record.tokens for record in world.unanswered.values()))

    @property
    def growth(self) -> int:
        """By how many more they became."""
        return self.counts[1] - self.counts[0]


class EarlyEnd:
    """Ends a run by ``NotHeldError`` as soon as it is certain that its rate is not held.

    Certain: more than the allowed share of all gaps that will ever be are above their target, or
    of the requests have missed what they had to keep. So it never ends a run that would have been
    held, and when it ends one depends on nothing but the run.
    """

    def __init__(
        self, world: World, judged: Sequence[RequestId], gaps: int, hold: float, patience_s: float
    ) -> None:
        """``judged``: the requests that count, in order of arrival, with ``gaps`` in all."""
        self._world = world
        self._open = list(judged)
        self._seen: dict[RequestId, int] = {}
        allowed = 1.0 - hold + ROUNDING
        self._most_late, self._most_missed = allowed * gaps, allowed * len(judged)
        self._patience_s = patience_s
        self.late = self.missed = 0
        self._next()

    def _next(self) -> None:
        if self._open:
            self._world.at(self._world.now_s + CHECK_EVERY_S, CLIENT, self._check, None)

    def _check(self, _: None, __: None) -> None:
        world, still = self._world, list[RequestId]()
        missing = 0
        for position, name in enumerate(self._open):
            record = world.records.get(name)
            if record is None:  # nor have those after it arrived
                still += self._open[position:]
                break
            self.late += record.late_gaps(self._seen.get(name, 0))
            self._seen[name] = record.tokens
            missed = record.missed(world.now_s, self._patience_s)
            if record.answer is None:
                still.append(name)
                missing += missed
            else:
                self.missed += missed
        self._open = still
        if self.late > self._most_late:
            raise NotHeldError(f"{self.late} gaps are above their target")
        if self.missed + missing > self._most_missed:
            raise NotHeldError(f"{self.missed + missing} requests missed what they had to keep")
        self._next()

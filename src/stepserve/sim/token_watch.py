"""Looks at a running world of autoregressive models from outside: what its row of results needs.

Nothing here is told to the schedulers, and nothing but ``Judge`` changes a run.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from stepserve.core.errors import StepserveError
from stepserve.core.events import BatchDone, HandoverStalled
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.instance import InstanceSpec
from stepserve.core.step import Mix

from .a100 import A100Truth
from .ar_record import ArRecord
from .instance import CLIENT
from .world import World

ALLOWED = 0.01
"""Share of gaps, and of requests, that may miss (DynaServe 3.10.5: P99, and 99 %)."""

CHECK_EVERY_S = 2.0


class CountedTruth:
    """A truth that counts what it is asked for: each batch that is run once, by instance."""

    def __init__(self, truth: A100Truth) -> None:
        self._step_time_s = truth.step_time_s
        self.shape = truth.shape
        self.flops: dict[InstanceId, float] = defaultdict(float)

    def step_time_s(
        self, tokens: int, rows: int, spec: InstanceSpec, mix: Mix | None = None
    ) -> float:
        """See ``CostModel.step_time_s``."""
        assert mix is not None, "an autoregressive batch says what it is made of"
        self.flops[spec.id] += self.shape.flops(mix)
        return self._step_time_s(tokens, rows, spec, mix)

    def observe(
        self, tokens: int, rows: int, spec: InstanceSpec, seconds: float, mix: Mix | None = None
    ) -> None:
        """Nothing: the truth is known."""


class Watch:
    """Hears every call of a scheduler (``World``'s ``on_handled``).

    ``stalled``: hand-overs that were given up because no room was made in time. ``busy_s``: of
    each instance, in batches that ended.
    """

    def __init__(self) -> None:
        self.stalled = 0
        self.busy_s: dict[InstanceId, float] = defaultdict(float)

    def on_handled(
        self, spec: InstanceSpec | None, incarnation: int, now_s: float, event: Any, _: list[Any]
    ) -> None:
        """See ``world.OnHandled``."""
        if spec is None:
            self.stalled += isinstance(event, HandoverStalled)
        elif isinstance(event, BatchDone):
            self.busy_s[spec.id] += event.seconds


class HopelessError(StepserveError):
    """A run that cannot be held any more, whatever still happens in it."""


def waiting(world: World) -> int:
    """Requests that have come and have no token yet."""
    return sum(not record.tokens for record in world.unanswered.values())


class Samples:
    """How many requests wait for their first token, half-way through the arrivals and after."""

    def __init__(self, world: World, last_arrival_s: float) -> None:
        self.counts: list[int] = []
        for when_s in (last_arrival_s / 2.0, last_arrival_s):
            world.at(when_s, CLIENT, self._sample, world)

    def _sample(self, world: World, _: None) -> None:
        self.counts.append(waiting(world))

    @property
    def growth(self) -> int:
        """By how many more they became."""
        return self.counts[1] - self.counts[0]


class Judge:
    """Ends a run by ``HopelessError`` as soon as it is certain that its rate is not held.

    Certain: more than 1 % of all gaps that will ever be are above the limit, or more than 1 %
    of the requests have waited too long for their first token. So it never ends a run that
    would have been held, and when it ends one depends on nothing but the run.
    """

    def __init__(
        self,
        world: World,
        judged: Sequence[RequestId],
        gaps: int,
        limit_s: float,
        patience_s: float,
    ) -> None:
        """``judged``: the requests that count, in order of arrival, with ``gaps`` in all."""
        self._world = world
        self._open = list(judged)
        self._counted: dict[RequestId, int] = {}
        self._most_late, self._most_impatient = ALLOWED * gaps, ALLOWED * len(judged)
        self._limit_s, self._patience_s = limit_s, patience_s
        self.late = self.impatient = 0
        self._next()

    def _next(self) -> None:
        if self._open:
            self._world.at(self._world.now_s + CHECK_EVERY_S, CLIENT, self._check, None)

    def _check(self, _: None, __: None) -> None:
        still: list[RequestId] = []
        waits = 0
        for position, name in enumerate(self._open):
            record = self._world.records.get(name)
            if record is None:  # nor have those after it arrived
                still += self._open[position:]
                break
            assert isinstance(record, ArRecord)
            times_s = record.times_s
            waits += self._count(name, record.request.arrival_s, times_s)
            if record.answer is None:
                still.append(name)
        self._open = still
        if self.late > self._most_late:
            raise HopelessError(f"{self.late} gaps are above {self._limit_s} s")
        if self.impatient + waits > self._most_impatient:
            raise HopelessError(f"{self.impatient + waits} waited over {self._patience_s} s")
        self._next()

    def _count(self, name: RequestId, arrival_s: float, times_s: Sequence[float]) -> bool:
        """Count new gaps; returns whether the request still waits, and has for too long."""
        if not times_s:
            return self._world.now_s - arrival_s > self._patience_s
        done = self._counted.get(name, 0)
        if not done:
            self.impatient += times_s[0] - arrival_s > self._patience_s
            done = 1
        fresh = times_s[done - 1 :]
        self.late += sum(b - a > self._limit_s for a, b in pairwise(fresh))
        self._counted[name] = len(times_s)
        return False

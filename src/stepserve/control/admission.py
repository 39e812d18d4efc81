"""Whether a deadline can still be met: the question behind ``on_miss = reject``; and refusals.

A prediction, not a promise: it assumes that everybody on an instance has the newcomer's mix
of heavy and light steps, and that the queue drains at the pace of full instances.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from stepserve.core.actions import Reject
from stepserve.core.instance import InstanceLoad, InstanceSpec
from stepserve.core.protocols import Batches, CostModel, StepProgram
from stepserve.core.request import Refusal, Request

from .fair_shares import FairQueue, QueueKey
from .ledger import Ledger, RequestState

SOONEST_S, LATEST_S = 0.1, 60.0
"""Bounds of the time after which a client is told to ask again."""


def refusal(request: Request, need_s: float, alone_s: float, left_s: float) -> Reject:
    """The rejection of a request that needs more seconds than are left to its deadline.

    ``alone_s``: what it would need if nothing else ran. Who asks again has the whole time anew,
    except to a moment of the wall clock.
    """
    again_s, why = request.slo.e2e_s or 0.0, f"predicted {need_s:.3f} s, deadline in {left_s:.3f} s"
    if again_s <= 0.0:
        return Reject(request.id, None, "the deadline has passed", Refusal.DEADLINE)
    if again_s < alone_s < math.inf:
        return Reject(request.id, None, f"{why}; alone {alone_s:.3f} s", Refusal.DEADLINE)
    return Reject(request.id, _retry_s(request, need_s - again_s), why, Refusal.SATURATED)


def _retry_s(request: Request, predicted_s: float) -> float | None:
    return None if request.slo.fixed_deadline else max(SOONEST_S, min(LATEST_S, predicted_s))


@dataclass(frozen=True, slots=True)
class Admission:
    """Who is refused. ``entry``: under what a request waits in the queue, or would."""

    queue: FairQueue
    entry: Callable[[RequestState], tuple[str, QueueKey]]
    ledger: Ledger
    program: StepProgram
    cost: CostModel

    def refuse(self, now_s: float, state: RequestState) -> Reject | None:
        """A rejection if the deadline is out of reach by the time the request would be served."""
        need_s = self._need_s(now_s, state, self.queue.ahead(*self.entry(state)))
        late = need_s > state.request.left_s(now_s)
        return self._reject(now_s, state, need_s) if late else None

    def drop(self, now_s: float, state: RequestState) -> Reject:
        """The rejection of one that has waited. If it asks again, it goes behind all that wait."""
        return self._reject(now_s, state, self._need_s(now_s, state, len(self.queue)))

    def turn_away(self, now_s: float, request: Request) -> Reject:
        """The queue is full: there is a place at the latest when its last one is done."""
        *_, (_, key) = self.queue.ranks()
        need_s = self._need_s(now_s, self.ledger.requests[key[2]], len(self.queue) - 1)
        why = f"queue is full ({len(self.queue)} waiting)"
        return Reject(request.id, _retry_s(request, need_s), why, Refusal.QUEUE_FULL)

    def _reject(self, now_s: float, state: RequestState, need_s: float) -> Reject:
        idle = [load._replace(running_requests=0) for load in self.ledger.loads()]
        alone_s = self.completion_s(state, idle, idle, 0)
        return refusal(state.request, need_s, alone_s, state.request.left_s(now_s))

    def _need_s(self, now_s: float, state: RequestState, ahead: int) -> float:
        """Seconds until the predicted end of a request that waits, or would."""
        with_room = self.ledger.view(state.request, now_s).loads.values()
        return self.completion_s(state, with_room, tuple(self.ledger.loads()), ahead)

    def completion_s(
        self,
        state: RequestState,
        with_room: Collection[InstanceLoad],
        loads: Collection[InstanceLoad],
        ahead: int,
    ) -> float:
        """Seconds from now to the predicted end at the lowest threshold, on the best instance.

        ``with_room``: the instances of ``loads`` that could take the request now. ``ahead``: queued
        requests that go first. Infinite when there is no instance.
        """
        request, forecast, batches_left = state.request, state.forecast, self.program.batches_left
        assert forecast is not None, "asked of requests that have one"
        lowest = len(forecast.steps) - 1

        def alone_s(load: InstanceLoad, running_requests: int) -> float:
            batches = batches_left(request, state.progress, forecast, lowest, running_requests)
            return service_s(batches, load.spec, self.cost)

        if with_room and ahead == 0:
            return min(alone_s(load, load.running_requests + 1) for load in with_room)
        slots = sum(load.spec.max_running_requests for load in loads)
        waits = 1.0 + (ahead + 1) / slots if slots else math.inf
        full_s = (alone_s(load, load.spec.max_running_requests) for load in loads)
        return waits * min(full_s, default=math.inf)


def service_s(batches: Batches, spec: InstanceSpec, cost: CostModel) -> float:
    """Predicted seconds of ``StepProgram.batches_left`` on an instance."""
    return sum(n * cost.step_time_s(tokens, rows, spec, mix) for n, tokens, rows, mix in batches)

"""Whether a deadline can still be met: the question behind ``on_miss = reject``.

A prediction, not a promise: it assumes that everybody on an instance has the newcomer's mix
of heavy and light steps, and that the queue drains at the pace of full instances.
"""

import math
from collections.abc import Collection

from stepserve.core.actions import Reject
from stepserve.core.forecast import StepForecast
from stepserve.core.ids import RequestId
from stepserve.core.instance import InstanceLoad, InstanceSpec
from stepserve.core.protocols import Batches, CostModel, StepProgram
from stepserve.core.request import Progress, Request


def refusal(request_id: RequestId, need_s: float, left_s: float) -> Reject | None:
    """A rejection if a request needs more seconds than are left to its deadline."""
    if need_s <= left_s:
        return None
    why = f"predicted {need_s:.3f} s, deadline in {left_s:.3f} s"
    if left_s <= 0.0:
        why = "the deadline has passed"
    return Reject(request_id, max(1.0, min(60.0, need_s - left_s)), why)


def completion_s(
    request: Request,
    progress: Progress,
    forecast: StepForecast,
    *,
    with_room: Collection[InstanceLoad],
    loads: Collection[InstanceLoad],
    ahead: int,
    program: StepProgram,
    cost: CostModel,
) -> float:
    """Seconds from now to the predicted end at the lowest threshold, on the best instance.

    ``with_room``: the instances of ``loads`` that could take the request now. ``ahead``: queued
    requests that go first. Infinite when there is no instance.
    """
    lowest = len(forecast.steps) - 1

    def alone_s(load: InstanceLoad, running_requests: int) -> float:
        batches = program.batches_left(request, progress, forecast, lowest, running_requests)
        return service_s(batches, load.spec, cost)

    if with_room and ahead == 0:
        return min(alone_s(load, load.running_requests + 1) for load in with_room)
    slots = sum(load.spec.max_running_requests for load in loads)
    waits = 1.0 + (ahead + 1) / slots if slots else math.inf
    full_s = (alone_s(load, load.spec.max_running_requests) for load in loads)
    return waits * min(full_s, default=math.inf)


def service_s(batches: Batches, spec: InstanceSpec, cost: CostModel) -> float:
    """Predicted seconds of ``StepProgram.batches_left`` on an instance."""
    return sum(n * cost.step_time_s(tokens, rows, spec, mix) for n, tokens, rows, mix in batches)

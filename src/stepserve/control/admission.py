"""Whether a deadline can still be met: the question behind ``on_miss = reject``.

A prediction, not a promise: it assumes that everybody on an instance has the newcomer's mix
of heavy and light steps, and that the queue drains at the pace of full instances.
"""

import math
from collections.abc import Collection

from stepserve.core.forecast import StepForecast
from stepserve.core.instance import InstanceLoad, InstanceSpec
from stepserve.core.protocols import CostModel, StepProgram
from stepserve.core.request import Progress, Request
from stepserve.core.step import Mix


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

    def alone_s(load: InstanceLoad, residents: int) -> float:
        of = request, progress, forecast, lowest, load.spec, residents
        return service_s(*of, program=program, cost=cost)

    if with_room and ahead == 0:
        return min(alone_s(load, load.residents + 1) for load in with_room)
    slots = sum(load.spec.max_residents for load in loads)
    waits = 1.0 + (ahead + 1) / slots if slots else math.inf
    full_s = (alone_s(load, load.spec.max_residents) for load in loads)
    return waits * min(full_s, default=math.inf)


def service_s(
    request: Request,
    progress: Progress,
    forecast: StepForecast,
    index: int,
    spec: InstanceSpec,
    residents: int,
    *,
    program: StepProgram,
    cost: CostModel,
) -> float:
    """Predicted seconds to the end at the ``index``-th threshold, among so many residents."""
    steps = forecast.remaining(index, progress.steps)
    heavy = program.heavy_left(request, progress, forecast.output_tokens)
    if program.mix(()) is not None:  # forecasts of causal requests count the decodes alone
        chunk, halfway = program.heavy_tokens(request), round(forecast.output_tokens / 2.0)
        decode = Mix(
            decodes=residents, decode_context=residents * (request.prompt_tokens + halfway)
        )
        fill = decode._replace(prefill_tokens=chunk, prefill_pairs=chunk * (chunk + 1) // 2)
        fill_s = cost.step_time_s(chunk + residents, residents + 1, spec, fill)
        return steps * cost.step_time_s(residents, residents, spec, decode) + heavy * fill_s
    share = min(1.0, heavy / steps)
    mean_tokens = share * program.heavy_tokens(request)
    mean_tokens += (1.0 - share) * program.light_tokens(request)
    return steps * cost.step_time_s(round(mean_tokens * residents), residents, spec)

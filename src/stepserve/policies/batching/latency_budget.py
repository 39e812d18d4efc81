"""Light steps first, then heavy tokens up to what the running requests' deadlines allow.

DynaServe's local scheduler (DynaServe 3.3) applied to denoising (DiLaServe E1): a
cached step is nearly free to batch, a recompute step is compute bound, and in the published
batching one recompute delays every neighbour.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stepserve.core.bounds import Bounded, Count, Share
from stepserve.core.instance import InstanceSpec
from stepserve.core.protocols import CostModel, Parts
from stepserve.core.request import Family
from stepserve.core.running import RunningRequest, StepPace
from stepserve.core.step import Step


class LatencyBudget:
    """Bounds the time of a batch by the step allowance of the tightest feasible deadline.

    A running request's allowance is the seconds that each of its light steps may take, if its heavy
    ones take what they would take alone. Heavy steps go in the order of least allowance; those
    left out ``starvation_batches`` times go first. One heavy step may exceed what the light
    ones allow: that of a running request left out so often, or else of one tighter than all of
    them. A deadline that is infeasible bounds no batch. ``heavy_tokens`` bounds every batch.
    """

    family = Family.DIFFUSION

    @dataclass(frozen=True, slots=True)
    class Options(Bounded):
        """``margin``: the share of a deadline that is planned against; else ``control.margin``.

        ``heavy_tokens``: most recompute tokens in one batch when no deadline asks for fewer.
        ``starvation_batches``: a running request left out that often goes first.
        """

        margin: Share | None = None
        heavy_tokens: Count = 8192
        starvation_batches: Count = 4

    def __init__(self, options: Options, parts: Parts) -> None:
        self._cost = parts.cost
        self._margin = parts.margin(options.margin)
        self._heavy_tokens = options.heavy_tokens
        self._starvation_batches = options.starvation_batches

    def pace(self, running_requests: Sequence[RunningRequest], spec: InstanceSpec) -> StepPace:
        """Time of the expected batch: each running request contributes its mix of heavy and light.

        The share of heavy steps is taken over what a running request has left at its highest
        threshold. A heavy step takes no less than one heavy step beside everybody else's light
        one.
        """
        if not running_requests:
            return StepPace(0.0, 0.0)
        expected, light_sum, heaviest = 0.0, 0, 0
        for running in running_requests:
            full, light, forecast = running.heavy_tokens, running.light_tokens, running.forecast
            # StepForecast.remaining, without the call
            steps = forecast.steps[0] - (running.progress.steps - forecast.at_steps)
            if steps < 1.0:
                steps = 1.0
            heavy = running.heavy_left
            share = heavy / steps if heavy < steps else 1.0
            expected += share * full + (1.0 - share) * light
            light_sum += light
            if full - light > heaviest:
                heaviest = full - light
        rows = len(running_requests)
        light_s = self._cost.step_time_s(round(expected), rows, spec)
        heavy_s = self._cost.step_time_s(light_sum + heaviest, rows, spec)
        return StepPace(heavy_s if heavy_s > light_s else light_s, light_s)

    def compose(
        self, candidates: Sequence[tuple[RunningRequest, Step]], spec: InstanceSpec, now_s: float
    ) -> tuple[Step, ...]:
        """All light steps; heavy ones while the batch stays within the allowance."""
        steps = tuple([step for _, step in candidates])
        if len(steps) == 1 or not any(step.kind.heavy for step in steps):
            return steps  # the most usual case: nothing to be weighed
        chosen: list[Step] = []
        heavy: list[
            tuple[bool, bool, float, int]
        ] = []  # may wait, infeasible, allowance, candidate
        limit_s = light_limit_s = math.inf
        alone_s = _Alone(self._cost, spec)
        tokens = 0
        for index, (running, step) in enumerate(candidates):
            allowance_s = self._allowance_s(running, step, alone_s, now_s)
            if step.kind.heavy:
                may_wait = running.skipped < self._starvation_batches
                heavy.append((may_wait, allowance_s < 0.0, allowance_s, index))
                if running.heavy_left == math.inf and allowance_s >= alone_s[step.query_tokens]:
                    limit_s = min(limit_s, allowance_s)
            else:
                chosen.append(step)
                tokens += step.query_tokens
                if allowance_s < light_limit_s and allowance_s >= alone_s[step.query_tokens]:
                    light_limit_s = allowance_s
        limit_s = min(limit_s, light_limit_s)
        budget, lights = tokens + self._heavy_tokens, len(chosen)
        for may_wait, infeasible, allowance_s, index in sorted(heavy):
            step = candidates[index][1]
            tokens += step.query_tokens
            first = len(chosen) == lights
            goes_first = not may_wait or (not infeasible and allowance_s <= light_limit_s)
            in_time = first and goes_first
            in_time |= self._cost.step_time_s(tokens, len(chosen) + 1, spec) <= limit_s
            if chosen and not (in_time and tokens <= budget):
                break
            chosen.append(step)
        return tuple(chosen)

    def _allowance_s(
        self, running: RunningRequest, step: Step, alone_s: "_Alone", now_s: float
    ) -> float:
        """Seconds for each light step left (each step, if all are heavy); see the class."""
        left_s = running.request.left_s(now_s, self._margin)
        if left_s == math.inf:
            return left_s
        forecast = running.forecast
        index = forecast.thresholds.index(step.threshold) if step.threshold else 0
        steps = forecast.remaining(index, running.progress.steps)
        if running.heavy_left == math.inf:
            return left_s / steps
        heavy = min(steps, running.heavy_left)
        left_s -= heavy * alone_s[running.heavy_tokens]
        return left_s / max(1.0, steps - heavy)


class _Alone(dict[int, float]):
    """Seconds of one step by its tokens, alone in a batch; asked once per size and batch."""

    def __init__(self, cost: CostModel, spec: InstanceSpec) -> None:
        self._cost, self._spec = cost, spec

    def __missing__(self, tokens: int) -> float:
        self[tokens] = seconds = self._cost.step_time_s(tokens, 1, self._spec)
        return seconds

"""Light steps first, then heavy tokens up to what the residents' deadlines allow.

DynaServe's local scheduler (dynaserve.md 3.3) applied to denoising (dilaserve.md Part E 1): a
cached step is nearly free to batch, a recompute step is compute bound, and in the published
batching one recompute delays every neighbour.
"""

import math
from collections.abc import Sequence

from stepserve.core.instance import InstanceSpec
from stepserve.core.protocols import CostModel
from stepserve.core.resident import Resident, StepPace
from stepserve.core.step import Step


class LatencyBudget:
    """Bounds the time of a batch by the step allowance of the tightest feasible deadline.

    A resident's allowance is the seconds that each of its light steps may take, if its heavy
    ones take what they would take alone. Heavy steps go in the order of least allowance; those
    left out ``starvation_batches`` times go first. One heavy step may exceed what the light
    ones allow: that of a resident left out so often, or else of one tighter than all of them.
    A deadline that is lost bounds no batch. ``heavy_tokens`` bounds every batch.
    """

    def __init__(
        self, cost: CostModel, *, margin: float, heavy_tokens: int, starvation_batches: int
    ) -> None:
        self._cost = cost
        self._margin = margin
        self._heavy_tokens = heavy_tokens
        self._starvation_batches = starvation_batches

    def pace(self, residents: Sequence[Resident], spec: InstanceSpec) -> StepPace:
        """Time of the expected batch: each resident contributes its mix of heavy and light.

        The share of heavy steps is taken over what a resident has left at its highest
        threshold. A heavy step takes no less than one heavy step beside everybody else's light
        one.
        """
        if not residents:
            return StepPace(0.0, 0.0)
        expected, light_sum, heaviest = 0.0, 0, 0
        for resident in residents:
            full, light, forecast = resident.heavy_tokens, resident.light_tokens, resident.forecast
            # StepForecast.remaining, without the call
            steps = forecast.steps[0] - (resident.progress.steps - forecast.at_steps)
            if steps < 1.0:
                steps = 1.0
            heavy = resident.heavy_left
            share = heavy / steps if heavy < steps else 1.0
            expected += share * full + (1.0 - share) * light
            light_sum += light
            if full - light > heaviest:
                heaviest = full - light
        rows = len(residents)
        light_s = self._cost.step_time_s(round(expected), rows, spec)
        heavy_s = self._cost.step_time_s(light_sum + heaviest, rows, spec)
        return StepPace(heavy_s if heavy_s > light_s else light_s, light_s)

    def compose(
        self, candidates: Sequence[tuple[Resident, Step]], spec: InstanceSpec, now_s: float
    ) -> tuple[Step, ...]:
        """All light steps; heavy ones while the batch stays within the allowance."""
        steps = tuple([step for _, step in candidates])
        if len(steps) == 1 or not any(step.kind.heavy for step in steps):
            return steps  # the most usual case: nothing to be weighed
        chosen: list[Step] = []
        heavy: list[tuple[bool, bool, float, int]] = []  # (may wait, lost, allowance, candidate)
        limit_s = light_limit_s = math.inf
        alone_s = _Alone(self._cost, spec)
        tokens = 0
        for index, (resident, step) in enumerate(candidates):
            allowance_s = self._allowance_s(resident, step, alone_s, now_s)
            if step.kind.heavy:
                may_wait = resident.skipped < self._starvation_batches
                heavy.append((may_wait, allowance_s < 0.0, allowance_s, index))
                if resident.heavy_left == math.inf and allowance_s >= alone_s[step.query_tokens]:
                    limit_s = min(limit_s, allowance_s)
            else:
                chosen.append(step)
                tokens += step.query_tokens
                if allowance_s < light_limit_s and allowance_s >= alone_s[step.query_tokens]:
                    light_limit_s = allowance_s
        limit_s = min(limit_s, light_limit_s)
        budget, lights = tokens + self._heavy_tokens, len(chosen)
        for may_wait, lost, allowance_s, index in sorted(heavy):
            step = candidates[index][1]
            tokens += step.query_tokens
            first = len(chosen) == lights
            goes_first = not may_wait or (not lost and allowance_s <= light_limit_s)
            in_time = first and goes_first
            in_time |= self._cost.step_time_s(tokens, len(chosen) + 1, spec) <= limit_s
            if chosen and not (in_time and tokens <= budget):
                break
            chosen.append(step)
        return tuple(chosen)

    def _allowance_s(
        self, resident: Resident, step: Step, alone_s: "_Alone", now_s: float
    ) -> float:
        """Seconds for each light step left (each step, if all are heavy); see the class."""
        slo = resident.request.slo
        if slo.e2e_s is None:
            return math.inf
        forecast = resident.forecast
        index = forecast.thresholds.index(step.threshold) if step.threshold else 0
        left_s = resident.request.arrival_s + self._margin * slo.e2e_s - now_s
        steps = forecast.remaining(index, resident.progress.steps)
        if resident.heavy_left == math.inf:
            return left_s / steps
        heavy = min(steps, resident.heavy_left)
        left_s -= heavy * alone_s[resident.heavy_tokens]
        return left_s / max(1.0, steps - heavy)


class _Alone(dict[int, float]):
    """Seconds of one step by its tokens, alone in a batch; asked once per size and batch."""

    def __init__(self, cost: CostModel, spec: InstanceSpec) -> None:
        self._cost, self._spec = cost, spec

    def __missing__(self, tokens: int) -> float:
        self[tokens] = seconds = self._cost.step_time_s(tokens, 1, self._spec)
        return seconds

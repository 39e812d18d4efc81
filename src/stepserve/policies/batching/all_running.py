"""The published batching: every running request steps in every batch (DiLaServe B7).

DiLaServe B7 also bounds who may run on an instance by the sum of full lengths: that is
``ControlConfig.running_tokens``, kept by the global scheduler.
"""

from collections.abc import Sequence

from stepserve.core.config import NoOptions
from stepserve.core.instance import InstanceSpec
from stepserve.core.protocols import Parts
from stepserve.core.running import RunningRequest, StepPace
from stepserve.core.step import Step


class AllRunning:
    """Recompute and cached steps mixed in one batch, however long it takes."""

    Options = NoOptions

    def __init__(self, options: NoOptions, parts: Parts) -> None:
        self._cost = parts.cost

    def pace(self, running_requests: Sequence[RunningRequest], spec: InstanceSpec) -> StepPace:
        """``time_left`` of DiLaServe B6: all recompute together, all run cached steps together."""
        if not running_requests:
            return StepPace(0.0, 0.0)
        heavy = sum([r.heavy_tokens for r in running_requests])
        light = sum([r.light_tokens for r in running_requests])
        rows = len(running_requests)
        return StepPace(
            self._cost.step_time_s(heavy, rows, spec), self._cost.step_time_s(light, rows, spec)
        )

    def compose(
        self, candidates: Sequence[tuple[RunningRequest, Step]], spec: InstanceSpec, now_s: float
    ) -> tuple[Step, ...]:
        """Everything."""
        return tuple([step for _, step in candidates])

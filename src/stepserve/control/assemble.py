"""Builds schedulers from configuration: the one place where policies get their names.

Both worlds call these functions; neither may define a policy.
"""

from stepserve.core.config import ControlConfig
from stepserve.core.errors import FieldError
from stepserve.core.instance import InstanceSpec
from stepserve.core.protocols import (
    BatchingPolicy,
    CostModel,
    PlacementPolicy,
    StepProgram,
    ThresholdPolicy,
)

from .batching.all_resident import AllResident
from .batching.latency_budget import LatencyBudget
from .global_scheduler import GlobalScheduler
from .local_scheduler import LocalScheduler
from .placement.least_loaded import LeastLoaded
from .placement.step_completion import StepCompletion
from .programs.diffusion import DiffusionProgram
from .threshold.deadline_fit import DeadlineFit
from .threshold.fixed import FixedThreshold


def assemble_global(config: ControlConfig, cost: CostModel) -> GlobalScheduler:
    """The cluster's scheduler. Raises FieldError for an unknown policy name."""
    program = DiffusionProgram()
    return GlobalScheduler(config, program, _placement(config, program, cost), cost)


def assemble_local(config: ControlConfig, spec: InstanceSpec, cost: CostModel) -> LocalScheduler:
    """The scheduler of one instance, with its own cost model, fed by its own batches."""
    program = DiffusionProgram()
    return LocalScheduler(
        spec,
        program,
        _batching(config, cost),
        _threshold(config),
        cost,
        config.predict_every_tokens,
    )


def _placement(config: ControlConfig, program: StepProgram, cost: CostModel) -> PlacementPolicy:
    match config.placement:
        case "least_loaded":
            return LeastLoaded()
        case "step_completion":
            return StepCompletion(cost, program.full_tokens)
    raise _unknown("placement", config.placement, "least_loaded, step_completion")


def _batching(config: ControlConfig, cost: CostModel) -> BatchingPolicy:
    match config.batching:
        case "all_resident":
            return AllResident(cost)
        case "latency_budget":
            return LatencyBudget(
                cost,
                margin=config.margin,
                heavy_tokens=config.heavy_tokens,
                starvation_batches=config.starvation_batches,
            )
    raise _unknown("batching", config.batching, "all_resident, latency_budget")


def _threshold(config: ControlConfig) -> ThresholdPolicy:
    match config.threshold:
        case "fixed":
            return FixedThreshold()
        case "deadline_fit":
            return DeadlineFit(config.margin)
    raise _unknown("threshold", config.threshold, "fixed, deadline_fit")


def _unknown(field: str, value: str, known: str) -> FieldError:
    return FieldError(f"control.{field}", f"unknown policy {value!r}; known: {known}")

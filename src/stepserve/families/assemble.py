"""Builds schedulers from configuration: the one place where policies get their names.

Both worlds call these functions; neither may define a policy.
"""

from dataclasses import replace

from stepserve.control.global_scheduler import GlobalScheduler
from stepserve.control.handover import PUSH_PAGES
from stepserve.control.load_control import LoadControl
from stepserve.control.local_scheduler import LocalScheduler
from stepserve.control.programs.autoregressive import AutoregressiveProgram
from stepserve.control.programs.diffusion import DiffusionProgram
from stepserve.core.config import ControlConfig
from stepserve.core.errors import FieldError
from stepserve.core.instance import InstanceSpec
from stepserve.core.protocols import (
    BatchingPolicy,
    CapPolicy,
    CostModel,
    MigrationPolicy,
    PlacementPolicy,
    RefreshPolicy,
    SegmentCost,
    StepProgram,
    ThresholdPolicy,
)
from stepserve.core.request import Family
from stepserve.policies.batching.all_running import AllRunning
from stepserve.policies.batching.latency_budget import LatencyBudget
from stepserve.policies.batching.token_budget import TokenBudget
from stepserve.policies.caps.horizon_caps import HorizonCaps
from stepserve.policies.caps.load_caps import LoadCaps
from stepserve.policies.caps.marginal_caps import MarginalCaps
from stepserve.policies.migration.faster_elsewhere import FasterElsewhere
from stepserve.policies.placement.disaggregated import Disaggregated
from stepserve.policies.placement.least_loaded import LeastLoaded
from stepserve.policies.placement.step_completion import StepCompletion
from stepserve.policies.placement.tandem_split import TandemSplit
from stepserve.policies.refresh.when_slack import WhenSlack
from stepserve.policies.threshold.at_cap import AtCap
from stepserve.policies.threshold.deadline_fit import DeadlineFit
from stepserve.policies.threshold.early_fit import EarlyFit
from stepserve.policies.threshold.fixed import FixedThreshold
from stepserve.policies.threshold.schedule_fit import ScheduleFit
from stepserve.policies.threshold.unless_infeasible import UnlessInfeasible


def assemble_global(
    config: ControlConfig, cost: CostModel, segment_cost: SegmentCost | None = None
) -> GlobalScheduler:
    """The cluster's scheduler; ``tandem_split`` placement needs ``segment_cost``.

    Of autoregressive models there are no thresholds to choose, so none to bound, and nothing to
    refresh; a request moves where its placement says: such policies of the configuration have no
    effect. Raises FieldError for an unknown policy name.
    """
    given, (config, program) = config, _for_family(config)
    _migration(given, program, cost), _caps(given, cost)  # unknown names are refused all the same
    return GlobalScheduler(
        config,
        program,
        _placement(config, program, cost, segment_cost),
        _migration(config, program, cost),
        LoadControl(_caps(config, cost), program, cost, config.caps_every_s),
        cost,
        program.work if isinstance(program, AutoregressiveProgram) else None,
    )


def assemble_local(config: ControlConfig, spec: InstanceSpec, cost: CostModel) -> LocalScheduler:
    """The scheduler of one instance, with its own cost model, fed by its own batches."""
    given, (config, program) = config, _for_family(config)
    _infeasible(given, _threshold(given)), _refresh(given, program, cost)
    return LocalScheduler(
        spec,
        program,
        _batching(config, program, cost),
        _infeasible(config, _threshold(config)),
        _refresh(config, program, cost),
        cost,
        config.predict_every_tokens,
        config.report_every_s,
        PUSH_PAGES if config.tokens.push == "chunks" else 0,
    )


def _for_family(
    config: ControlConfig,
) -> tuple[ControlConfig, DiffusionProgram | AutoregressiveProgram]:
    if config.family == Family.DIFFUSION:
        return config, DiffusionProgram()
    config = replace(config, threshold="fixed", load_control="none", migration="none")
    config = replace(config, refresh="as_asked", infeasible="lowest_threshold")
    return config, AutoregressiveProgram(config.tokens.chunk_tokens)


def _placement(
    config: ControlConfig, program: StepProgram, cost: CostModel, segment_cost: SegmentCost | None
) -> PlacementPolicy:
    causal = isinstance(program, AutoregressiveProgram)
    if config.placement in ("tandem_split", "disaggregated") and not causal:
        what = f"{config.placement} is for autoregressive models: it cuts requests"
        raise FieldError("control.placement", what)
    match config.placement:
        case "least_loaded":
            return LeastLoaded()
        case "step_completion":
            return StepCompletion(cost, program.full_tokens)
        case "tandem_split":
            if segment_cost is None:
                raise FieldError("control.placement", "tandem_split needs a segment cost")
            return TandemSplit(segment_cost, config.tokens)
        case "disaggregated":
            return Disaggregated(config.tokens.prefill_instances, config.tokens.bypass_tokens)
    known = "least_loaded, step_completion, tandem_split, disaggregated"
    raise _unknown("placement", config.placement, known)


def _migration(
    config: ControlConfig, program: StepProgram, cost: CostModel
) -> MigrationPolicy | None:
    match config.migration:
        case "none":
            return None
        case "recompute_step" | "any_step":
            return FasterElsewhere(cost, program.full_tokens, config.migration_gain)
    raise _unknown("migration", config.migration, "none, recompute_step, any_step")


def _caps(config: ControlConfig, cost: CostModel) -> CapPolicy | None:
    match config.load_control:
        case "none":
            return None
        case "load_caps":
            tokens = config.running_tokens or config.heavy_tokens
            return LoadCaps(
                cost,
                margin=config.margin,
                utilisation=config.utilisation,
                batch_tokens=tokens,
            )
        case "horizon_caps":
            return HorizonCaps(cost, margin=config.margin, utilisation=config.utilisation)
        case "marginal_caps":
            quality = tuple(zip(config.quality_thresholds, config.quality_points, strict=True))
            return MarginalCaps(
                cost, margin=config.margin, utilisation=config.utilisation, quality=quality
            )
    known = "none, load_caps, horizon_caps, marginal_caps"
    raise _unknown("load_control", config.load_control, known)


def _batching(config: ControlConfig, program: StepProgram, cost: CostModel) -> BatchingPolicy:
    match config.batching:
        case "all_running":
            return AllRunning(cost)
        case "latency_budget" if isinstance(program, AutoregressiveProgram):
            return TokenBudget(cost, program, config.tokens, config.starvation_batches)
        case "latency_budget":
            return LatencyBudget(
                cost,
                margin=config.margin,
                heavy_tokens=config.heavy_tokens,
                starvation_batches=config.starvation_batches,
            )
    raise _unknown("batching", config.batching, "all_running, latency_budget")


def _threshold(config: ControlConfig) -> ThresholdPolicy:
    match config.threshold:
        case "fixed":
            return FixedThreshold()
        case "deadline_fit":
            return DeadlineFit(config.margin)
        case "early_fit":
            return EarlyFit(config.early_margin, config.margin)
        case "schedule_fit":
            return ScheduleFit(config.margin)
        case "at_cap":
            return AtCap()
    known = "fixed, deadline_fit, early_fit, schedule_fit, at_cap"
    raise _unknown("threshold", config.threshold, known)


def _infeasible(config: ControlConfig, threshold: ThresholdPolicy) -> ThresholdPolicy:
    match config.infeasible:
        case "lowest_threshold":
            return threshold
        case "preempt":
            return UnlessInfeasible(threshold)
    raise _unknown("infeasible", config.infeasible, "lowest_threshold, preempt")


def _refresh(config: ControlConfig, program: StepProgram, cost: CostModel) -> RefreshPolicy | None:
    match config.refresh:
        case "as_asked":
            return None
        case "when_slack":
            return WhenSlack(
                program, cost, margin=config.refresh_margin, heavy_tokens=config.heavy_tokens
            )
    raise _unknown("refresh", config.refresh, "as_asked, when_slack")


def _unknown(field: str, value: str, known: str) -> FieldError:
    return FieldError(f"control.{field}", f"unknown policy {value!r}; known: {known}")

"""Builds schedulers from configuration. Both worlds call these functions; neither may define a
policy.
"""

from dataclasses import replace
from typing import Any, cast

from stepserve.control.global_scheduler import GlobalScheduler
from stepserve.control.load_control import LoadControl
from stepserve.control.local_scheduler import LocalScheduler
from stepserve.core.config import ControlConfig
from stepserve.core.instance import InstanceSpec, Link
from stepserve.core.plan import Planner
from stepserve.core.protocols import CostModel, Parts
from stepserve.policies.threshold.unless_infeasible import UnlessInfeasible

from .autoregressive import AUTOREGRESSIVE
from .diffusion import DIFFUSION
from .family import ModelFamily
from .registry import build

FAMILIES = {family.name: family for family in (DIFFUSION, AUTOREGRESSIVE)}


def assemble_global(
    family: ModelFamily, control: ControlConfig, cost: CostModel, link: Link | None = None
) -> GlobalScheduler:
    """The cluster's scheduler; ``link``: what keys and values are copied over, where they are.

    Raises FieldError for a policy that there is not, and for an option that makes no sense.
    """
    control = family.resolved(control)
    parts = Parts(family.program(control), cost, control, link)
    if link is not None:
        parts = replace(parts, segment_cost=_part("segment_cost", family, parts))
    load_control = _part("load_control", family, parts)
    return GlobalScheduler(
        control,
        parts.program,
        _part("placement", family, parts),
        _part("migration", family, parts),
        LoadControl(load_control, parts.program, cost, control.caps_every_s),
        cost,
    )


def assemble_local(
    family: ModelFamily, control: ControlConfig, spec: InstanceSpec, cost: CostModel
) -> LocalScheduler:
    """The scheduler of one instance, with its own cost model, fed by its own batches."""
    control = family.resolved(control)
    parts = Parts(family.program(control), cost, control)
    threshold = _part("threshold", family, parts)
    if control.infeasible == "preempt":
        threshold = UnlessInfeasible(threshold)
    assert control.predict_every_tokens is not None, "it is resolved"
    return LocalScheduler(
        spec,
        parts.program,
        _part("batching", family, parts),
        threshold,
        _part("refresh", family, parts),
        cost,
        control.predict_every_tokens,
        control.report_every_s,
        control.push_pages,
    )


def make_planner(family: ModelFamily, control: ControlConfig) -> Planner | None:
    """What answers ``SolvePlan``, for drivers to call where it may take seconds."""
    choice = family.resolved(control).planner
    return None if choice is None else cast("Planner | None", build("planner", choice, None))


def _part(kind: str, family: ModelFamily, parts: Parts) -> Any:
    return build(kind, getattr(parts.control, kind), parts, family.name)

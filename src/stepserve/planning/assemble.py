"""Builds the planner that a configuration names; both worlds call it."""

from stepserve.core.config import ControlConfig
from stepserve.core.errors import FieldError
from stepserve.core.plan import Planner

from .greedy import GreedyPlanner
from .two_stage import TwoStagePlanner


def make_planner(config: ControlConfig) -> Planner | None:
    """What answers ``SolvePlan``, for drivers to call where it may take seconds.

    Raises FieldError for an unknown name.
    """
    match config.planner:
        case "none":
            return None
        case "greedy":
            return GreedyPlanner()
        case "capacity_ilp":
            return TwoStagePlanner()
    known = "none, greedy, capacity_ilp"
    raise FieldError("control.planner", f"unknown policy {config.planner!r}; known: {known}")

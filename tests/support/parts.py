"""Policies and their configuration, written shortly."""

from stepserve.core.config import ControlConfig
from stepserve.core.protocols import Parts
from stepserve.cost.forecast_parts import ForecastParts
from stepserve.tables import from_table


def make_control(**options):
    """A ``ControlConfig`` from TOML values: policies are names or tables."""
    return from_table(ControlConfig, options, "control")


def make_policy(
    cls, cost=None, program=None, control=None, link=None, segment_cost=None, **options
):
    """A policy of these options and parts."""
    parts = Parts(program, cost, control or ControlConfig())
    return cls(cls.Options(**options), parts)


def make_forecast(cls, yields=None, trees=None, truths=None, seed=0, **options):
    """A forecast of these options and parts."""
    return cls(cls.Options(**options), ForecastParts(yields, trees, truths=truths, seed=seed))

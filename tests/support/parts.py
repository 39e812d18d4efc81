"""Policies and their configuration, written shortly."""

from stepserve.core.config import ControlConfig, from_table
from stepserve.core.protocols import Parts


def make_control(**options):
    """A ``ControlConfig`` from TOML values: policies are names or tables."""
    return from_table(ControlConfig, options, "control")


def make_policy(
    cls, cost=None, program=None, control=None, link=None, segment_cost=None, **options
):
    """A policy of these options and parts."""
    parts = Parts(program, cost, control or ControlConfig())
    return cls(cls.Options(**options), parts)

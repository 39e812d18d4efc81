"""A cost model that knows the true step times: what the world runs on, and what a scheduler has
whose profile is right and never corrected (the published systems).

The same answers as ``StepTable`` without learning, from a list by token count: a simulated
hour asks millions of times.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from stepserve.core.instance import InstanceSpec
from stepserve.core.step import Mix
from stepserve.cost.step_table import StepProfile, by_tokens


class Truth(ABC):
    """A ``CostModel`` that knows, and learns nothing."""

    @abstractmethod
    def step_time_s(
        self, tokens: int, rows: int, spec: InstanceSpec, mix: Mix | None = None
    ) -> float:
        """See ``CostModel.step_time_s``."""

    def observe(  # noqa: B027
        self, tokens: int, rows: int, spec: InstanceSpec, seconds: float, mix: Mix | None = None
    ) -> None:
        """Nothing to learn."""


class KnownSteps(Truth):
    """A ``CostModel`` over one profile per tensor-parallel degree. Holds no state."""

    def __init__(self, profiles: Mapping[int, StepProfile]) -> None:
        self._profiles = dict(profiles)
        self._tables = {
            degree: (by_tokens(p)[0], p.host_s, p.host_row_s) for degree, p in profiles.items()
        }

    def step_time_s(
        self, tokens: int, rows: int, spec: InstanceSpec, mix: Mix | None = None
    ) -> float:
        """See ``CostModel.step_time_s``. Raises KeyError for a degree without a profile."""
        if tokens <= 0:
            return 0.0
        table, host_s, host_row_s = self._tables[spec.tp_degree]
        if tokens < len(table):
            return table[tokens] + (host_s + host_row_s * (rows - 1))  # adds up as in StepTable
        return self._profiles[spec.tp_degree].step_time_s(tokens, rows)

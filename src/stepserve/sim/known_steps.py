"""Cost models that know the true step times: what the world runs on, and what a scheduler has
whose profile is right and never corrected (the published systems).
"""

from abc import ABC, abstractmethod

from stepserve.core.instance import InstanceSpec
from stepserve.core.step import Mix
from stepserve.cost.step_table import StepTable


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


class KnownSteps(Truth, StepTable):
    """A table of steps by tensor-parallel degree and tokens, which is true."""

    step_time_s = StepTable.step_time_s

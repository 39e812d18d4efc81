"""What fresh schedulers are made of, as a value: it can be pickled, and heads an event log."""

from dataclasses import dataclass

from stepserve.control.global_scheduler import GlobalScheduler
from stepserve.control.local_scheduler import LocalScheduler
from stepserve.core.config import ControlConfig
from stepserve.core.instance import InstanceSpec, Link
from stepserve.core.protocols import CostModel
from stepserve.core.request import Family
from stepserve.cost.batch_profile import BatchProfile
from stepserve.cost.step_table import StepProfiles

from .assemble import FAMILIES, assemble_global, assemble_local


@dataclass(frozen=True, slots=True)
class SchedulerSetup:
    """Policies by name with their options, and the times that schedulers begin with.

    ``link``: see ``Parts``.
    """

    family: Family
    control: ControlConfig
    profile: StepProfiles | BatchProfile
    link: Link | None = None

    def new_global(self) -> GlobalScheduler:
        """A fresh scheduler of the cluster."""
        return assemble_global(FAMILIES[self.family], self.control, self._cost(), self.link)

    def new_local(self, spec: InstanceSpec) -> LocalScheduler:
        """A fresh scheduler of an instance, with its own copy of the cost model to correct."""
        return assemble_local(FAMILIES[self.family], self.control, spec, self._cost())

    def _cost(self) -> CostModel:
        return self.profile.cost_model(self.control.tp_degrees)

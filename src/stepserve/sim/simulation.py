"""All that one run is made of: what each family of models brings, and what both have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from stepserve.control.global_scheduler import GlobalScheduler
from stepserve.control.local_scheduler import LocalScheduler
from stepserve.core.errors import FieldError
from stepserve.core.ids import InstanceId
from stepserve.core.instance import InstanceSpec, Link
from stepserve.core.plan import Planner
from stepserve.core.protocols import CostModel, StepPredictor
from stepserve.core.request import Request
from stepserve.core.step import Mix
from stepserve.cost.batch_profile import BatchProfile
from stepserve.cost.boosted_steps import StepModel
from stepserve.cost.step_table import StepProfiles
from stepserve.families.assemble import FAMILIES, assemble_global, assemble_local
from stepserve.families.registry import chosen
from stepserve.families.setup import SchedulerSetup

from .config import System
from .executors import Executors
from .experiment import Experiment
from .faults import Faults
from .instance import Learn, OnHandled, Timed, untimed
from .record import RequestRecord
from .tenants import with_tenants
from .transfers import Transfers
from .world import World

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a system. ``chosen``: the candidate that it stands for. ``rate_per_s`` 0: that
    of the recording.
    """

    system: str
    chosen: str
    rate_per_s: float
    seed: int


class Simulation(ABC):
    """A cluster, its schedulers, and its requests, before they meet in a world.

    ``unused``: fields of ``System`` without effect in this family.
    """

    unused: ClassVar[tuple[str, ...]]

    requests: Sequence[Request]
    specs: tuple[InstanceSpec, ...]
    executors: Executors
    truth: CostModel
    predictor: StepPredictor
    alike: bool  # instances, in hardware and degree
    link: Link | None = None
    transfers: Transfers | None = None
    planner: Planner | None = None
    learn: tuple[Learn, ...] = ()
    accuracy_kind: str | None = None
    gaps: Sequence[int] = ()

    def __init__(self, experiment: Experiment, point: Point) -> None:
        self.experiment, self.point = experiment, point
        self.system = experiment.systems[point.chosen]
        self.family = FAMILIES[experiment.family]
        self.control = self.system.control_for(experiment.gpus)

    @classmethod
    def check(cls, experiment: Experiment) -> None:
        """Raises FieldError for what this family cannot simulate, before anything is run."""
        usual = System()
        for name, system in experiment.systems.items():
            chosen("forecast", system.predictor, experiment.family, f"system.{name}.predictor")
            for option in cls.unused:
                if getattr(system, option) != getattr(usual, option):
                    what = f"has no effect on {experiment.family} models"
                    raise FieldError(f"system.{name}.{option}", what)
            if system.control.plans and not experiment.setting.nodes:
                raise FieldError(f"system.{name}.control.planner", "needs setting.nodes")
            try:
                FAMILIES[experiment.family].check(system.control, len(experiment.hosts))
            except FieldError as error:
                raise FieldError(f"system.{name}.{error.field}", error.message) from error

    def new_global(self) -> GlobalScheduler:
        """A fresh scheduler of the cluster."""
        return assemble_global(self.family, self.control, self.global_cost(), self.link)

    def new_local(self, spec: InstanceSpec) -> LocalScheduler:
        """A fresh scheduler of an instance, with a cost model of its own."""
        return assemble_local(self.family, self.control, spec, self.new_cost(spec))

    @abstractmethod
    def global_cost(self) -> CostModel:
        """What the scheduler of the cluster believes of batches."""

    @abstractmethod
    def new_cost(self, spec: InstanceSpec) -> CostModel:
        """What the scheduler of an instance believes of its batches."""

    @abstractmethod
    def profile(self) -> StepProfiles | BatchProfile:
        """The times that schedulers begin with."""

    def setup(self) -> SchedulerSetup:
        """What an event log says schedulers are made of. Raises FieldError if no log can."""
        if not self.alike:
            raise FieldError("--events", "a log has times of one hardware: no replay")
        family = self.experiment.family
        return SchedulerSetup(family, self.control, self.profile(), self.link)

    @abstractmethod
    def new_record(self, request: Request, index: int) -> RequestRecord:
        """What a world remembers of a request."""

    @abstractmethod
    def quality(self, records: Sequence[RequestRecord]) -> Row:
        """The part of a row that is about answers."""

    def machines(self, world: World, records: Sequence[RequestRecord]) -> Row:
        """The part of a row that only this family has, of the whole run."""
        return {}

    def accuracy(self, records: Sequence[RequestRecord]) -> float | None:
        """Mean over the requests that got their whole answer, 0..1; ``None`` without any."""
        return None

    def world(
        self,
        learn: Sequence[Learn] = (),
        timed: Timed = untimed,
        on_handled: OnHandled | None = None,
    ) -> World:
        """A world that has begun, and has not run."""
        setting = self.experiment.setting
        world = World(
            self.new_global,
            self.new_local,
            executors=self.executors,
            record=self.new_record,
            truth=self.truth,
            predictor=self.predictor,
            planner=self.planner,
            delays=setting.delays,
            faults=Faults(setting.faults, self.point.seed),
            transfers=self.transfers,
            learn=(*learn, *self.learn),
            timed=timed,
            on_handled=on_handled,
        )
        world.start(self.specs, with_tenants(self.requests, self.experiment.slo))
        return world


Factory = Callable[[Experiment, Point, StepModel | None], Simulation]


class PerInstance:
    """A cost model of instances that differ: each has its own."""

    def __init__(self, models: Mapping[InstanceId, CostModel]) -> None:
        self._models = models

    def step_time_s(
        self, tokens: int, rows: int, spec: InstanceSpec, mix: Mix | None = None
    ) -> float:
        """See ``CostModel.step_time_s``."""
        return self._models[spec.id].step_time_s(tokens, rows, spec, mix)

    def observe(
        self, tokens: int, rows: int, spec: InstanceSpec, seconds: float, mix: Mix | None = None
    ) -> None:
        """See ``CostModel.observe``."""
        self._models[spec.id].observe(tokens, rows, spec, seconds, mix)


def per_instance(
    specs: Sequence[InstanceSpec], make: Callable[[InstanceSpec], CostModel], alike: bool
) -> CostModel:
    """One model for instances that are ``alike``, else one for each."""
    return make(specs[0]) if alike else PerInstance({spec.id: make(spec) for spec in specs})


def shortened(experiment: Experiment) -> Experiment:
    """As it is run to tune a system."""
    seconds = experiment.capacity.tuning_duration_s
    return replace(experiment, workload=replace(experiment.workload, duration_s=seconds))

"""What instances are made of, wherever they will live."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stepserve.core.config import ServeConfig
from stepserve.core.instance import InstanceSpec
from stepserve.core.model import Engine, ModelFacts
from stepserve.core.protocols import StepPredictor
from stepserve.families.assemble import FAMILIES
from stepserve.families.forecasts import make_forecast, parts_of
from stepserve.families.profiles import cores_per_share
from stepserve.families.registry import build
from stepserve.families.setup import SchedulerSetup

from .instance import Instance
from .recording import Listener


def make_engine(config: ServeConfig) -> Engine:
    """The configured engine. Raises FieldError for what it cannot serve."""
    engine: Engine = build("engine", config.engine, config, field="engine")
    return engine


@dataclass(frozen=True, slots=True)
class InstanceFactory:
    """Makes instances, here or in another process: it can be pickled.

    Paths in ``config`` mean the same files there.
    """

    config: ServeConfig
    setup: SchedulerSetup

    def predictor(self, facts: ModelFacts) -> StepPredictor:
        """A fresh predictor of what requests still need."""
        family, parts = FAMILIES[self.setup.family], parts_of(facts.folder)
        return make_forecast(family, self.config.predictor, parts)

    def instance(
        self,
        engine: Engine,
        spec: InstanceSpec,
        incarnation: int,
        predictor: StepPredictor,
        now_s: Callable[[], float],
        listeners: Sequence[Listener],
    ) -> Instance:
        """An instance, on the thread that will run it."""
        local = self.setup.new_local(spec)
        executor = engine.executor(spec, cores_per_share(self.config))
        return Instance(local, executor, predictor, now_s, incarnation, listeners)

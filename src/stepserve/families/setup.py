"""What fresh schedulers are made of, as a value: it can be pickled, and heads an event log."""

import dataclasses
from dataclasses import dataclass

from stepserve.control.global_scheduler import GlobalScheduler
from stepserve.control.local_scheduler import LocalScheduler
from stepserve.core.config import ControlConfig, ServeConfig
from stepserve.core.errors import FieldError
from stepserve.core.instance import InstanceSpec, Link
from stepserve.core.model import Engine
from stepserve.core.protocols import CostModel
from stepserve.core.request import Family
from stepserve.cost.batch_profile import BatchProfile
from stepserve.cost.step_table import StepProfiles

from .assemble import FAMILIES, assemble_global, assemble_local
from .forecasts import make_forecast, parts_of
from .profiles import batch_profile, step_profiles, tp_degrees

COPY_BYTES_PER_S, COPY_S = 1e9, 0.002
"""Keys and values from one thread of this process to another: gathered, checked, scattered."""


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


def make_setup(config: ServeConfig, engine: Engine) -> SchedulerSetup:
    """What the schedulers of a served model are made of.

    Raises FieldError for what the model cannot be served with, before anything is measured.
    """
    family = FAMILIES[engine.facts.family]
    family.check(config.control, len(config.degrees))
    make_forecast(family, config.predictor, parts_of(engine.facts.folder))  # or refuses
    timed = _autoregressive if family.name is Family.AUTOREGRESSIVE else _diffusion
    return timed(config, engine, family.resolved(config.control))


def _diffusion(config: ServeConfig, engine: Engine, control: ControlConfig) -> SchedulerSetup:
    if config.keep_profile:
        raise FieldError("keep_profile", "batch times are those of autoregressive models")
    control, degrees = _with_degrees(config, engine, control)
    profiles = StepProfiles(step_profiles(config, engine.facts, degrees))
    return SchedulerSetup(Family.DIFFUSION, control, profiles)


def _autoregressive(config: ServeConfig, engine: Engine, control: ControlConfig) -> SchedulerSetup:
    """Without a profile in the model's folder (``stepserve profile`` makes one) a few batches are
    measured now, on an instance of the lowest degree; in any case the schedulers correct
    theirs while they serve, each degree its own.
    """
    if config.log_steps:
        raise FieldError("log_steps", "step logs are of diffusion models: they train predictors")
    control, degrees = _with_degrees(config, engine, control)
    profile = batch_profile(config, engine, degrees[0])
    link = Link(profile.line.kv_bytes_per_token, COPY_BYTES_PER_S, COPY_S)
    return SchedulerSetup(Family.AUTOREGRESSIVE, control, profile, link)


def _with_degrees(
    config: ServeConfig, engine: Engine, control: ControlConfig
) -> tuple[ControlConfig, tuple[int, ...]]:
    """With the degrees that instances may have, which the engine can form."""
    degrees = tp_degrees(config, engine)
    engine.check(degrees)
    return dataclasses.replace(control, tp_degrees=degrees), degrees

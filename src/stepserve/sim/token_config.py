"""What a simulated experiment with autoregressive models is made of, read strictly from TOML.

    family = "autoregressive"            # what tells it from one with diffusion models
    models = ["qwen2.5-14b"]
    workloads = ["hybrid"]
    systems = ["colocated", "dynaserve", "wide"]
    rates_of_capacity = [0.5, 1.0]

    [system.wide]                        # as in ``config``
    base = "dynaserve"
    control.placement.probes = 10

An unknown key is an error that names it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stepserve.core.config import Choice, ControlConfig, as_table, from_table
from stepserve.core.errors import FieldError
from stepserve.core.request import Family

from .a100 import A100Truth
from .config import one_of, take_systems, unknown_system
from .delays import Delays
from .faults import FaultConfig
from .lengths import TOKEN_WORKLOADS

ALL, NONE = "all", "none"


@dataclass(frozen=True, slots=True)
class TokenSetting:
    """What all systems of an experiment have in common, and what is swept.

    Every system serves every workload with every model, on ``instances`` of it. Requests arrive
    as a Poisson process for ``duration_s``, and until there are ``least_requests``; those of the
    first ``warm_up_s`` are not judged. ``tbt_s`` is the target between two tokens, ``ttft_s``
    that of the first one, 0 for none. Lengths are the same for all systems; the limit that a
    request names is ``slack_tokens`` above its length, or nothing could be predicted too long.

    A rate is held if 99 % of the gaps, pooled, are within ``tbt_s``, and 99 % of the requests get
    their whole answer, beginning within ``patience_s``: without that a system that starves
    prefills would hold any rate for as long as a run lasts (DynaServe 3.10.5 asks for 99 %
    that finish, but not by when). ``capacity`` searches the largest such rate: of ``all``
    systems, of ``none``, or of the one named, to ``capacity_step_per_s``, or to
    ``capacity_share`` of it where that is more. Systems with a choice to be tuned (chunk, P:D)
    are tuned by it, on ``tuning_duration_s`` of the requests of ``tuning_seed``.

    Runs are made at ``rates_per_s``, and at ``rates_of_capacity`` times the largest capacity
    found, mean over seeds. ``link_bytes_per_s`` is what an instance's network card carries each
    way (200 Gbit/s).
    """

    family: str = Family.AUTOREGRESSIVE.value
    models: tuple[str, ...] = ("qwen2.5-14b",)
    workloads: tuple[str, ...] = ("azure-code",)
    hardware: str = "a100"
    instances: int = 2
    duration_s: float = 600.0
    warm_up_s: float = 60.0
    least_requests: int = 1000
    tbt_s: float = 0.1
    ttft_s: float = 0.0
    patience_s: float = 30.0
    slack_tokens: int = 128
    capacity: str = ALL
    capacity_step_per_s: float = 0.1
    capacity_share: float = 0.02
    tuning_seed: int = 100
    tuning_duration_s: float = 300.0
    rates_per_s: tuple[float, ...] = ()
    rates_of_capacity: tuple[float, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    link_bytes_per_s: float = 25e9
    link_rtt_s: float = 50e-6
    delays: Delays = field(default_factory=Delays)
    faults: FaultConfig = field(default_factory=lambda: FaultConfig(step_cv=0.03))

    def __post_init__(self) -> None:
        """Raises FieldError naming what makes no sense."""
        one_of("family", self.family, (Family.AUTOREGRESSIVE.value,))
        for name in ("models", "workloads", "seeds"):
            if not getattr(self, name):
                raise FieldError(name, "needs at least one value")
        for workload in self.workloads:
            one_of("workloads", workload, TOKEN_WORKLOADS)
        for model in self.models:
            A100Truth(model, self.hardware)
        for name in ("instances", "least_requests"):
            if getattr(self, name) < 1:
                raise FieldError(name, "must be at least 1")
        times = ("duration_s", "tuning_duration_s", "tbt_s", "patience_s")
        for name in (*times, "link_bytes_per_s", "capacity_share"):
            if not getattr(self, name) > 0.0:
                raise FieldError(name, "must be positive")
        for name in ("warm_up_s", "ttft_s", "link_rtt_s", "capacity_step_per_s", "slack_tokens"):
            if getattr(self, name) < 0.0:
                raise FieldError(name, "must not be negative")
        for name in ("rates_per_s", "rates_of_capacity"):
            if any(rate <= 0.0 for rate in getattr(self, name)):
                raise FieldError(name, "must be positive")
        if self.rates_of_capacity and self.capacity == NONE:
            raise FieldError("rates_of_capacity", "needs a capacity to be searched")

    def requests_at(self, rate_per_s: float) -> int:
        """How many requests a run at this rate has."""
        return max(self.least_requests, round(rate_per_s * self.duration_s))


@dataclass(frozen=True, slots=True)
class TokenSystem:
    """A named way to serve: policies, predictor of output lengths, what an instance can hold.

    ``predictor``: ``known`` (the true length and noise of ``sigma_tokens``), ``class_mean``
    (learnt from those that ended), or ``longest`` (the limit). ``link_bytes_per_s``: in place of
    the setting's, if not 0. KV room is the model's on its GPUs.
    """

    control: ControlConfig = field(default_factory=ControlConfig)
    predictor: str = "known"
    sigma_tokens: float = 0.0
    link_bytes_per_s: float = 0.0
    page_tokens: int = 16
    max_running_requests: int = 256

    def __post_init__(self) -> None:
        """Raises FieldError naming what makes no sense."""
        one_of("predictor", self.predictor, ("known", "class_mean", "longest"))
        for name in ("sigma_tokens", "link_bytes_per_s"):
            if getattr(self, name) < 0.0:
                raise FieldError(name, "must not be negative")
        for name in ("page_tokens", "max_running_requests"):
            if getattr(self, name) < 1:
                raise FieldError(name, "must be at least 1")


@dataclass(frozen=True, slots=True)
class TokenExperiment:
    """A setting, the systems to compare in it, in order, and what each of them is chosen from.

    ``compared`` has the candidates of each name: itself alone, if there is nothing to tune.
    ``systems`` has all candidates.
    """

    setting: TokenSetting
    compared: Mapping[str, tuple[str, ...]]
    systems: Mapping[str, TokenSystem]

    def as_table(self) -> dict[str, Any]:
        """The resolved configuration as TOML values, to be kept beside results."""
        return {
            **as_table(self.setting),
            "systems": list(self.compared),
            "system": {name: as_table(system) for name, system in self.systems.items()},
        }


def from_tables(
    table: Mapping[str, Any],
    known: Mapping[str, TokenSystem],
    tuned: Callable[[str, int], tuple[str, ...]],
) -> TokenExperiment:
    """An experiment from the table of a file.

    ``known`` are the systems that need no table, ``tuned`` are what a name is to be chosen from
    on so many instances, if from anything. Raises FieldError naming the dotted key at fault.
    """
    rest = dict(table)
    names, systems = take_systems(rest, known, TokenSystem())
    setting = from_table(TokenSetting, rest)
    compared = {name: tuned(name, setting.instances) or (name,) for name in names}
    used: dict[str, TokenSystem] = {}
    for name in (candidate for all_of in compared.values() for candidate in all_of):
        if name not in systems:
            raise unknown_system(name, systems)
        used[name] = systems[name]
        control = used[name].control
        placement = control.placement or Choice()
        first = placement.options.get("prefill_instances", 1)
        if placement.use == "disaggregated" and not 0 < first < setting.instances:
            field = f"system.{name}.control.placement.prefill_instances"
            raise FieldError(field, "too many or none")
    if setting.capacity not in (ALL, NONE, *names):
        raise FieldError("capacity", f"must be all, none, or one of {', '.join(names)}")
    return TokenExperiment(setting, compared, used)

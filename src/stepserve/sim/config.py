"""What a simulated experiment is made of, read strictly from TOML.

    dataset = "gsm8k"
    rates_per_gpu_per_s = [1.5, 1.75]
    systems = ["infaas", "mine"]

    [system.mine]              # a new system, or changes to a known one of that name
    base = "dilaserve"
    control.threshold = "fixed"

    [quick]                    # what `--quick` changes
    requests = 50

An unknown key is an error that names it.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from stepserve.core.config import ControlConfig, as_table, from_table
from stepserve.core.errors import FieldError
from stepserve.core.request import CacheMode, OnMiss, RefreshScope

from .delays import Delays
from .faults import FaultConfig


def one_of(name: str, value: str, known: Any) -> None:
    """Raises FieldError for a word that is none of the known ones."""
    if value not in list(known):
        raise FieldError(name, f"must be one of {', '.join(known)}")


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a system sets in every request: ``ThresholdBounds`` and ``DiffusionOptions``."""

    preferred: float = 0.9
    floor: float = 0.5
    refresh_blocks: int = 1
    refresh_scope: str = "full"
    on_miss: str = "degrade"

    def __post_init__(self) -> None:
        """Raises FieldError for a name that is not known; numbers are checked per request."""
        one_of("request.refresh_scope", self.refresh_scope, RefreshScope)
        one_of("request.on_miss", self.on_miss, OnMiss)


@dataclass(frozen=True, slots=True)
class System:
    """A named way to serve: policies, predictor, and what an instance can hold.

    ``predictor``: ``mean`` (yields of the model), ``boosted`` (trees trained on simulated step
    logs), ``oracle`` (the truth). ``learn_steps``: whether schedulers correct their step table.
    ``kv_tokens``: positions of keys and values that fit beside the weights of one GPU: 80 GB less
    16 GB, at 0.5 MB each (DiLaServe C1). ``admitted_per_gpu`` sets ``control.admitted_limit`` from
    the cluster's size, at least 50 (DiLaServe B1: 50 at 4 GPUs, 100 at 16); 0 for none.
    ``accuracy_points_lost``: percentage points that the request's refresh options cost where they
    are made use of throughout, measured elsewhere, taken off the accuracy proxy.
    """

    control: ControlConfig = field(default_factory=ControlConfig)
    request: RequestOptions = field(default_factory=RequestOptions)
    predictor: str = "boosted"
    learn_steps: bool = True
    kv_tokens: int = 120_000
    page_tokens: int = 16
    max_running_requests: int = 32
    admitted_per_gpu: float = 0.0
    accuracy_points_lost: float = 0.0

    def __post_init__(self) -> None:
        """Raises FieldError naming what makes no sense."""
        one_of("predictor", self.predictor, ("mean", "boosted", "oracle"))
        for name in ("kv_tokens", "page_tokens", "max_running_requests"):
            if getattr(self, name) < 1:
                raise FieldError(name, "must be at least 1")

    def control_for(self, gpus: int) -> ControlConfig:
        """The policies on a cluster of this size."""
        if not self.admitted_per_gpu:
            return self.control
        return replace(self.control, admitted_limit=max(50, round(self.admitted_per_gpu * gpus)))


@dataclass(frozen=True, slots=True)
class Setting:
    """What all systems of an experiment have in common, and what is swept.

    ``requests``: of each run; or, if given, those of ``duration_s`` at its rate.
    ``hardware`` is by default that of the published runs; a name ending in ``.json`` is a table as
    `stepserve profile` writes it (``profiles.measured_profile``). ``nodes``: GPUs of each; all
    instances begin at ``tp_degree``. ``arrivals``: poisson,
    constant, or ``burstgpt`` (the published curve of 24 windows of ``window_s``, which then
    sets the number of requests, and of which ``rates_per_gpu_per_s`` is the peak). ``base_s``:
    unloaded latency that the SLO multiples are of; 0 for the data set's published one.
    ``early_stop``: requests end by themselves; the published ones run to their limit.
    ``class_shares``: shares of the requests that are of SLO class ``class0``, ``class1``, ...,
    drawn; ``class_weights`` and ``class_deadlines``: their weights, and their deadlines relative
    to the swept one.
    ``timeline_s``: length of the buckets of the timeline; 0 for none.
    """

    dataset: str = "gsm8k"
    model: str = "llada-8b"
    hardware: str = ""
    nodes: tuple[int, ...] = (4, 4, 4, 4)
    tp_degree: int = 1
    cache_mode: str = "dual"
    block_tokens: int = 32
    requests: int = 1000
    duration_s: float = 0.0
    arrivals: str = "poisson"
    rates_per_gpu_per_s: tuple[float, ...] = (1.5,)
    slo_multiples: tuple[float, ...] = (5.0,)
    base_s: float = 0.0
    window_s: float = 300.0
    early_stop: bool = False
    class_shares: tuple[float, ...] = (1.0,)
    class_weights: tuple[float, ...] = (1.0,)
    class_deadlines: tuple[float, ...] = (1.0,)
    seeds: tuple[int, ...] = (0,)
    timeline_s: float = 0.0
    delays: Delays = field(default_factory=Delays)
    faults: FaultConfig = field(default_factory=FaultConfig)

    def __post_init__(self) -> None:
        """Raises FieldError naming what makes no sense."""
        one_of("cache_mode", self.cache_mode, CacheMode)
        one_of("arrivals", self.arrivals, ("poisson", "constant", "burstgpt"))
        for name in ("requests", "block_tokens", "tp_degree"):
            if getattr(self, name) < 1:
                raise FieldError(name, "must be at least 1")
        for name in ("base_s", "timeline_s", "duration_s"):
            if getattr(self, name) < 0.0:
                raise FieldError(name, "must not be negative")
        for name in ("nodes", "rates_per_gpu_per_s", "slo_multiples", "seeds"):
            values = getattr(self, name)
            if not values:
                raise FieldError(name, "needs at least one value")
            if name != "seeds" and min(values) <= 0:
                raise FieldError(name, "must be positive")
        for name in ("class_shares", "class_weights", "class_deadlines"):
            values = getattr(self, name)
            if not values or min(values) <= 0.0 or len(values) != len(self.class_shares):
                raise FieldError(name, "must be positive, one per class")
        if any(gpus % self.tp_degree for gpus in self.nodes):
            raise FieldError("tp_degree", "must divide the GPUs of every node")

    def requests_at(self, rate_per_gpu_per_s: float) -> int:
        """How many requests a run at this rate has."""
        if not self.duration_s:
            return self.requests
        return max(1, round(rate_per_gpu_per_s * self.gpus * self.duration_s))

    @property
    def gpus(self) -> int:
        """GPUs of the cluster."""
        return sum(self.nodes)


@dataclass(frozen=True, slots=True)
class Experiment:
    """A setting and the systems to compare in it, by name, in order."""

    setting: Setting
    systems: Mapping[str, System]

    def as_table(self) -> dict[str, Any]:
        """The resolved configuration as TOML values, to be kept beside results."""
        return {
            **as_table(self.setting),
            "systems": list(self.systems),
            "system": {name: as_table(system) for name, system in self.systems.items()},
        }


T = TypeVar("T")


def read(path: Path, known: Mapping[str, System], *, quick: bool = False) -> Experiment:
    """Read an experiment; ``known`` are the systems that need no table.

    Raises FieldError naming the dotted key at fault.
    """
    return from_tables(read_table(path, quick=quick), known)


def read_table(path: Path, *, quick: bool = False) -> dict[str, Any]:
    """An experiment's table, that of ``[quick]`` laid over it or left out.

    ``[figure]`` is of ``experiments/lib/figures.py`` alone.

    Raises FieldError if there is none.
    """
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise FieldError("config", f"{path} cannot be read: {error}") from error
    table.pop("figure", None)
    changes = table.pop("quick", {})
    return merged(table, changes) if quick else table


def from_tables(table: Mapping[str, Any], known: Mapping[str, System]) -> Experiment:
    """As ``read``, of a table already read."""
    rest = dict(table)
    names, systems = take_systems(rest, known, System())
    missing = [name for name in names if name not in systems]
    if missing:
        raise unknown_system(missing[0], systems)
    return Experiment(from_table(Setting, rest), {name: systems[name] for name in names})


def take_systems(
    table: dict[str, Any], known: Mapping[str, T], fresh: T
) -> tuple[list[str], dict[str, T]]:
    """Take the names of the systems to compare out of a table, and the tables that define some.

    Returns the names and all systems; ``fresh`` is what one without a base starts from.
    """
    names = table.pop("systems", None)
    if not isinstance(names, list) or not names:
        raise FieldError("systems", "needs a list of names")
    systems = dict(known)
    for name, changes in table.pop("system", {}).items():
        changed = dict(changes)
        base = changed.pop("base", None)
        if base is not None and base not in systems:
            raise FieldError(f"system.{name}.base", f"no such system: {base!r}")
        start = systems.get(base or name, fresh)
        systems[name] = overlaid(start, changed, f"system.{name}")
    return names, systems


def unknown_system(name: str, known: Mapping[str, object]) -> FieldError:
    """What to raise for a name that is none of the known ones."""
    return FieldError("systems", f"unknown {name!r}; known: {', '.join(sorted(known))}")


def overlaid(base: T, changes: Mapping[str, Any], path: str) -> T:
    """A config value with a table laid over it. Raises FieldError naming the dotted key."""
    return from_table(type(base), changes, path, base)


def merged(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``table`` with ``changes`` laid over it; tables are merged, the rest replaced."""
    result = dict(table)
    for key, value in changes.items():
        old = result.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[key] = merged(old, value) if both else value  # type: ignore[arg-type]
    return result

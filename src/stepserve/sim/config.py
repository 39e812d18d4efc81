"""What a simulated experiment is made of, as values; ``experiment`` reads them from TOML."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from stepserve.core.bounds import Bounded, Count, FiniteNotNegative, FinitePositive, Whole, among
from stepserve.core.config import Choice, ControlConfig
from stepserve.core.errors import FieldError
from stepserve.core.request import CacheMode, OnMiss, RefreshScope

from .delays import Delays
from .faults import FaultConfig

ARRIVALS = ("poisson", "gamma", "constant", "recorded", "burstgpt")
ALL, NONE = "all", "none"


@dataclass(frozen=True, slots=True)
class InstanceGroup(Bounded, path="setting.instances"):
    """``count`` equal instances. ``hardware`` and ``degree``: the setting's, if not given."""

    count: Count = 1
    hardware: str = ""
    degree: Whole = 0


@dataclass(frozen=True, slots=True)
class LinkConfig(Bounded, path="setting.links"):
    """The network card of an instance, each way: 200 Gbit/s by default (DynaServe 2.3)."""

    bytes_per_s: FinitePositive = 25e9
    rtt_s: FiniteNotNegative = 50e-6


@dataclass(frozen=True, slots=True)
class Setting(Bounded, path="setting"):
    """The cluster and the model, which all systems of an experiment have in common.

    ``hardware``: of instances that name none; by default that of the published runs. ``nodes``:
    GPUs of each; without them instances have no slots, and no planner may change the layout.
    ``degree``: the tensor-parallel one of instances that name none; 0 is the model's own.
    ``base_s``: unloaded latency that deadlines are multiples of; 0 for the published one.
    ``timeline_s``: length of the buckets of the timeline; 0 for none.
    """

    family: str = ""
    model: str = "llada-8b"
    hardware: str = ""
    degree: Whole = 0
    nodes: tuple[Count, ...] = ()
    instances: tuple[InstanceGroup, ...] = ()
    cache_mode: Annotated[str, among(CacheMode)] = "dual"
    block_tokens: Count = 32
    base_s: FiniteNotNegative = 0.0
    slo_multiple: FinitePositive = 5.0
    timeline_s: FiniteNotNegative = 0.0
    links: LinkConfig = LinkConfig()
    delays: Delays = field(default_factory=Delays)
    faults: FaultConfig = field(default_factory=FaultConfig)


@dataclass(frozen=True, slots=True)
class Workload(Bounded, path="workload"):
    """What arrives: a ``name``, ``shapes`` (prompt and output tokens), or a ``file``; and when.

    A run has ``requests``, or those of ``duration_s`` at its rate, but ``least_requests``; a
    recorded one has those of its file. Those that arrive before ``warm_up_s`` are not judged.
    ``cv``: coefficient of variation of gamma gaps. ``window_s``: of the 24 windows of
    ``burstgpt``, whose rate is that of the busiest, and which sets the number of requests.
    ``early_stop``: diffusion requests end by themselves; the published ones run to their limit.
    ``slack_tokens``: of an autoregressive request's limit above its true length, or nothing
    could be predicted too long. Runs are made at ``rates_per_s``, at ``rates_per_gpu_per_s``,
    and at ``rates_of_capacity`` times the largest capacity found, mean over seeds.
    """

    name: str = ""
    shapes: tuple[tuple[int, int], ...] = ()
    file: str = ""
    arrivals: Annotated[str, among(ARRIVALS)] = "poisson"
    cv: FiniteNotNegative = 2.0
    window_s: FinitePositive = 300.0
    requests: Whole = 0
    duration_s: FiniteNotNegative = 0.0
    least_requests: Count = 1
    warm_up_s: FiniteNotNegative = 0.0
    early_stop: bool = False
    slack_tokens: Whole = 128
    rates_per_s: tuple[FinitePositive, ...] = ()
    rates_per_gpu_per_s: tuple[FinitePositive, ...] = ()
    rates_of_capacity: tuple[FinitePositive, ...] = ()

    def __post_init__(self) -> None:
        """Raises FieldError naming what makes no sense."""
        Bounded.__post_init__(self)
        if sum(map(bool, (self.name, self.shapes, self.file))) != 1:
            raise FieldError("workload.name", "give one of name, shapes and file")
        if any(len(shape) != 2 or min(shape) < 1 for shape in self.shapes):
            raise FieldError("workload.shapes", "needs pairs of prompt and output tokens")
        if self.arrivals == "recorded" and not self.file:
            raise FieldError("workload.arrivals", "recorded ones come from a file")
        drawn = self.arrivals in ("poisson", "gamma", "constant")
        if drawn and not (self.requests or self.duration_s):
            raise FieldError("workload.requests", "how many? or give duration_s")

    @property
    def label(self) -> str:
        """What rows call it."""
        shapes = "+".join(f"{prompt}-{output}" for prompt, output in self.shapes)
        return self.name or Path(self.file).name or f"fixed-{shapes}"

    def requests_at(self, rate_per_s: float) -> int:
        """How many requests a run at this rate has."""
        return self.requests or max(self.least_requests, round(rate_per_s * self.duration_s))


@dataclass(frozen=True, slots=True)
class SLOClass(Bounded, path="slo"):
    """Targets of a ``share`` of the requests, and what their quality is worth.

    The deadline is ``e2e_s``, or ``relative_deadline`` times ``setting.slo_multiple`` times
    ``setting.base_s`` where a base is known. ``tenant``: whose they are; tenants' weights are
    ``control.tenant_weights`` of a system.
    """

    name: str = ""
    tenant: str = ""
    share: FinitePositive = 1.0
    weight: FinitePositive = 1.0
    relative_deadline: FinitePositive = 1.0
    e2e_s: FinitePositive | None = None
    ttft_s: FinitePositive | None = None
    tbt_s: FinitePositive | None = None


@dataclass(frozen=True, slots=True)
class CapacitySearch(Bounded, path="capacity"):
    """Which systems' capacity is ``search``ed (``all``, ``none``, or one by name), and how.

    Capacity is the largest rate that is held: the share ``hold`` of the requests keep their
    deadline (diffusion), or of the gaps their target and of the requests get their whole answer,
    beginning within ``patience_s`` (autoregressive: without that a system that starves prefills
    would hold any rate for as long as a run lasts; DynaServe 3.10.5 asks for 99 % that finish,
    but not by when). It is searched to ``step_per_s``, or to ``share`` of it where that is more.
    Systems with a choice are tuned by it, on ``tuning_duration_s`` of requests of ``tuning_seed``.
    """

    search: str = NONE
    hold: FinitePositive = 0.99
    patience_s: FinitePositive = 30.0
    step_per_s: FiniteNotNegative = 0.1
    share: FinitePositive = 0.02
    tuning_seed: Whole = 100
    tuning_duration_s: FinitePositive = 300.0

    def __post_init__(self) -> None:
        """Raises FieldError naming what makes no sense."""
        Bounded.__post_init__(self)
        if self.hold >= 1.0:
            raise FieldError("capacity.hold", "must be below 1")


@dataclass(frozen=True, slots=True)
class RequestOptions(Bounded, path="request"):
    """What a system sets in every diffusion request: ``ThresholdBounds``, ``DiffusionOptions``."""

    preferred: float = 0.9
    floor: float = 0.5
    refresh_blocks: int = 1
    refresh_scope: Annotated[str, among(RefreshScope)] = "full"
    on_miss: Annotated[str, among(OnMiss)] = "degrade"


@dataclass(frozen=True, slots=True)
class System(Bounded, path="system"):
    """A named way to serve: policies, predictor, and what an instance can hold.

    ``predictor``: a forecast by name. Of diffusion steps: ``mean`` (yields of the model),
    ``boosted`` (trees trained on simulated step logs), ``oracle`` (the truth); of output lengths:
    ``known`` (the true length and noise of ``sigma_tokens``), ``class_mean`` (learnt from those
    that ended), ``longest`` (the limit). ``learn_steps``: whether schedulers correct their step
    table. ``kv_tokens``: positions of keys and values that fit beside the weights of one GPU; 0:
    as the model says. ``running_per_gpu``: ``max_running_requests`` are for each GPU,
    as the server's are, not for each instance.
    ``admitted_per_gpu`` sets ``control.admitted_limit`` from the cluster's size, at least 50
    (DiLaServe B1: 50 at 4 GPUs, 100 at 16); 0 for none. ``link_bytes_per_s``: in place of the
    setting's, if not 0. ``accuracy_points_lost``: percentage points that the request's refresh
    options cost where they are made use of throughout, measured elsewhere, taken off the
    accuracy proxy.
    """

    control: ControlConfig = field(default_factory=ControlConfig)
    request: RequestOptions = field(default_factory=RequestOptions)
    predictor: Choice = field(default_factory=lambda: Choice("boosted", {"healing_rate": 0.0}))
    learn_steps: bool = True
    kv_tokens: Whole = 0
    page_tokens: Count = 16
    max_running_requests: Count = 32
    running_per_gpu: bool = False
    admitted_per_gpu: FiniteNotNegative = 0.0
    accuracy_points_lost: FiniteNotNegative = 0.0
    link_bytes_per_s: FiniteNotNegative = 0.0

    def control_for(self, gpus: int) -> ControlConfig:
        """The policies on a cluster of this size."""
        if not self.admitted_per_gpu:
            return self.control
        return replace(self.control, admitted_limit=max(50, round(self.admitted_per_gpu * gpus)))

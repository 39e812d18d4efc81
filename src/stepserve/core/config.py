"""Configuration as frozen values, read from TOML tables. An unknown key is an error."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from stepserve.core.errors import FieldError
from stepserve.core.request import CacheMode, Family, RefreshScope


def _check(holds: bool, field: str, message: str) -> None:
    if not holds:
        raise FieldError(field, message)


@dataclass(frozen=True, slots=True)
class SLOClass:
    """Targets that fill what a request leaves open; ``None`` means no target.

    ``weight`` is also the most that a request of the class may ask for.
    """

    e2e_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    weight: float = 1.0
    tbt_s: float | None = None

    def __post_init__(self) -> None:
        """Raises FieldError for a target or weight that is not positive."""
        for name in ("e2e_s", "ttft_s", "tpot_s", "weight", "tbt_s"):
            value = getattr(self, name)
            _check(value is None or value > 0.0, f"slo_classes.{name}", "must be positive")


@dataclass(frozen=True, slots=True)
class TokenConfig:
    """How autoregressive requests are scheduled (DynaServe 3.3 to DynaServe 3.7).

    Batches: ``tbt_s`` is the target between two tokens where the request has none,
    ``safety`` the share of it that a batch may take after ``overhead_s``; ``budget`` says what
    bounds a batch: ``fixed``, that target (as published), ``age``, what is left of it since each
    request's last token, or ``none``: ``chunk_tokens`` of prefill whatever is decoded.
    A prefill left out for ``starved_s`` gets ``least_chunk_tokens``. ``order`` of prefills:
    fcfs, priority, shortest or deadline; ``ttft``: respect targets of it, or ignore (published).

    Placement: ``cost`` is occupancy or elapsed, ``probes`` bounds the search, which
    stops where both sides are within ``epsilon``; ``gain`` is the share of the request's own
    time that a cut must save (published: 0.05); ``margin_tokens`` are added to the predicted
    output length, ``least_segment_tokens`` bound a segment from below, ``pairs`` are looked at;
    ``cut``: at any token, at the prompt's end, or none. ``prefill_instances`` are those of
    ``disaggregated`` placement, where prompts that fit ``bypass_tokens`` are computed where they
    are decoded.

    ``push``: ``chunks`` while the predecessor computes, or ``serial``, all at the end.
    """

    tbt_s: float = 0.1
    safety: float = 0.95
    overhead_s: float = 0.001
    budget: str = "age"
    chunk_tokens: int = 2048
    least_chunk_tokens: int = 64
    starved_s: float = 0.4
    order: str = "fcfs"
    ttft: str = "respect"
    cost: str = "occupancy"
    probes: int = 6
    epsilon: float = 0.05
    gain: float = 0.6
    margin_tokens: int = 20
    least_segment_tokens: int = 64
    pairs: int = 4
    cut: str = "any"
    push: str = "chunks"
    prefill_instances: int = 1
    bypass_tokens: int = 0

    def __post_init__(self) -> None:
        """Raises FieldError naming the number or word that makes no sense."""
        for name in ("tbt_s", "starved_s", "safety"):
            _check(getattr(self, name) > 0.0, f"control.tokens.{name}", "must be positive")
        for name in ("chunk_tokens", "least_chunk_tokens", "probes", "pairs"):
            _check(getattr(self, name) >= 1, f"control.tokens.{name}", "must be at least 1")
        for name in ("overhead_s", "epsilon", "gain", "margin_tokens", "least_segment_tokens"):
            _check(getattr(self, name) >= 0, f"control.tokens.{name}", "must not be negative")
        for name in ("prefill_instances", "bypass_tokens"):
            _check(getattr(self, name) >= 0, f"control.tokens.{name}", "must not be negative")
        _check(self.safety <= 1.0, "control.tokens.safety", "must be at most 1")
        fits = self.least_chunk_tokens <= self.chunk_tokens
        _check(fits, "control.tokens.least_chunk_tokens", "must be at most chunk_tokens")
        for name, words in _TOKEN_WORDS.items():
            known = f"must be one of {', '.join(words)}"
            _check(getattr(self, name) in words, f"control.tokens.{name}", known)


_TOKEN_WORDS = {
    "budget": ("age", "fixed", "none"),
    "order": ("fcfs", "priority", "shortest", "deadline"),
    "ttft": ("respect", "ignore"),
    "cost": ("occupancy", "elapsed"),
    "cut": ("any", "prompt", "none"),
    "push": ("chunks", "serial"),
}


@dataclass(frozen=True, slots=True)
class ControlConfig:
    """Policies by name, and their numbers.

    ``family`` is the models' (``Family``); ``tokens``: what concerns autoregressive ones alone.

    ``margin``: share of a deadline that the threshold choice plans against (DiLaServe B1:
    0.9); ``early_margin``: the same at the start of a request, for ``early_fit``;
    ``infeasible``: what becomes of requests whose deadline cannot be met: ``lowest_threshold`` (as
    published), or ``preempt`` (they leave their place to others).
    ``refresh_margin``: the share that must suffice for everybody where ``when_slack``
    refreshes more than was asked.
    ``heavy_tokens``: most recompute tokens in one batch when no deadline asks for fewer.
    ``starvation_batches``: a running request left out that often goes first.
    ``predict_every_tokens``: newly settled tokens between forecasts (DiLaServe B5: 8).
    ``admitted_limit``: most requests placed at once (DiLaServe B1), ``running_tokens``: most
    full-length tokens placed on one instance (DiLaServe B7); 0: no such limit.
    ``caps_every_s``: least time between two updates of the threshold caps, ``utilisation``:
    share of the cluster's supply that they plan with.
    ``quality_points`` at ``quality_thresholds``: what ``marginal_caps`` weighs, linear in
    between; by default the published accuracy of LLaDA-8B on GSM8K, made monotone (DiLaServe B3).
    ``report_every_s``: how often an instance reports on its running requests. ``migration_gain``:
    share by which a step must be faster elsewhere (DiLaServe C6). ``plan_every_s``: how often the
    layout is planned, on the arrivals of that long.
    """

    placement: str = "step_completion"
    batching: str = "latency_budget"
    threshold: str = "deadline_fit"
    load_control: str = "load_caps"
    migration: str = "recompute_step"
    planner: str = "none"
    queue: str = "deadline"
    refresh: str = "as_asked"
    infeasible: str = "lowest_threshold"
    thresholds: tuple[float, ...] = (0.9, 0.8, 0.7, 0.6, 0.5)
    margin: float = 0.9
    early_margin: float = 0.75
    refresh_margin: float = 0.6
    queue_limit: int = 256
    admitted_limit: int = 0
    running_tokens: int = 0
    heavy_tokens: int = 8192
    starvation_batches: int = 4
    predict_every_tokens: int = 8
    caps_every_s: float = 1.0
    utilisation: float = 0.8
    quality_thresholds: tuple[float, ...] = (0.9, 0.8, 0.7, 0.6, 0.5)
    quality_points: tuple[float, ...] = (78.6, 78.6, 77.0, 71.7, 65.9)
    report_every_s: float = 0.25
    migration_gain: float = 0.05
    plan_every_s: float = 300.0
    tp_degrees: tuple[int, ...] = (1, 2, 4)
    family: str = Family.DIFFUSION.value
    tokens: TokenConfig = TokenConfig()

    def __post_init__(self) -> None:
        """Raises FieldError naming the number that makes no sense."""
        for name in ("queue_limit", "heavy_tokens", "starvation_batches", "predict_every_tokens"):
            _check(getattr(self, name) >= 1, f"control.{name}", "must be at least 1")
        for name in ("admitted_limit", "running_tokens", "migration_gain", "report_every_s"):
            _check(getattr(self, name) >= 0, f"control.{name}", "must not be negative")
        _check(self.caps_every_s >= 0.0, "control.caps_every_s", "must not be negative")
        _check(self.plan_every_s > 0.0, "control.plan_every_s", "must be positive")
        for name in ("margin", "early_margin", "refresh_margin", "utilisation"):
            _check(0.0 < getattr(self, name) <= 1.0, f"control.{name}", "must be in (0, 1]")
        for name in ("thresholds", "quality_thresholds"):
            grid = list(getattr(self, name))
            descends = bool(grid) and grid == sorted(set(grid), reverse=True)
            _check(descends, f"control.{name}", "must descend, at least one")
        points = list(self.quality_points)
        fits = len(points) == len(self.quality_thresholds)
        fits = fits and points == sorted(points, reverse=True)
        _check(fits, "control.quality_points", "must not rise, one per quality threshold")
        degrees = list(self.tp_degrees)
        ascends = bool(degrees) and degrees == sorted(set(degrees)) and degrees[0] >= 1
        _check(ascends, "control.tp_degrees", "must ascend from at least 1")
        families = ", ".join(Family)
        _check(self.family in list(Family), "control.family", f"must be one of {families}")
        known = self.queue in ("deadline", "fcfs", "fcfs_drop")
        _check(known, "control.queue", "must be deadline, fcfs or fcfs_drop")
        in_order = self.infeasible != "preempt" or self.queue == "deadline"
        _check(in_order, "control.infeasible", "preempt needs queue = deadline: it is an order")
        for threshold in self.thresholds:
            _check(0.0 < threshold <= 1.0, "control.thresholds", "must be in (0, 1]")


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Everything ``stepserve serve`` can be told."""

    model: str = "bundled"
    served_model_name: str = ""  # what clients call it; default: the model's own name
    host: str = "127.0.0.1"
    port: int = 8000
    instances: int = 2
    layout: str = ""  # tensor-parallel degree of each instance at the start: 2,1; default: all 1
    cluster: str = "local"  # where instances live: local, ray, ray://auto or ray://HOST:PORT
    threads_per_instance: int = 0  # a degree's: each of its shares; 0: even ones
    device: str = "cpu"
    dtype: str = "float32"
    profile: str = ""  # step-time table; default: the one in the model's folder
    keep_profile: str = (
        ""  # file of an autoregressive model's batch times: read at start, written at end
    )
    predictor: str = "auto"  # of remaining steps: mean, boosted; auto: boosted if there is one
    events: str = ""  # file for the event log; none by default
    log_steps: str = ""  # file for the step log; none by default
    cache_mode: str = "dual"  # what a request's `dlm.cache: auto` means
    refresh_scope: str = "full"  # what `dlm.refresh_scope: auto` means with a cache
    max_running_requests: int = 32
    kv_pages: int = 4096
    page_tokens: int = 16
    hang_s: float = 60.0  # an instance busy with one thing for longer is given up
    operator_api: bool = False  # serve /cluster, too: its state, and changes of the layout
    trust_slo_headers: bool = True
    strict_fields: bool = False
    default_slo_class: str = "standard"
    slo_classes: Mapping[str, SLOClass] = field(
        default_factory=lambda: {
            "interactive": SLOClass(e2e_s=4.0),
            "standard": SLOClass(),
            "batch": SLOClass(),
        }
    )
    control: ControlConfig = ControlConfig()

    @property
    def degrees(self) -> tuple[int, ...]:
        """The tensor-parallel degree of each instance at the start."""
        return tuple(map(int, self.layout.split(","))) if self.layout else (1,) * self.instances

    def __post_init__(self) -> None:
        """Raises FieldError naming the value that makes no sense."""
        words = [word.strip() for word in self.layout.split(",")]
        ok = not self.layout or all(word.isdecimal() and int(word) for word in words)
        _check(ok, "layout", f"{self.layout!r} is not a list of degrees, such as 2,1")
        for name in ("instances", "max_running_requests", "kv_pages", "page_tokens"):
            _check(getattr(self, name) >= 1, name, "must be at least 1")
        _check(self.threads_per_instance >= 0, "threads_per_instance", "must not be negative")
        _check(0 <= self.port < 65536, "port", "must be in 0 .. 65535")
        _check(self.hang_s > 0.0, "hang_s", "must be positive")
        kind, _, address = self.cluster.partition("://")
        known = self.cluster in ("local", "ray") or (kind == "ray" and address != "")
        _check(known, "cluster", "must be local, ray, ray://auto or ray://HOST:PORT")
        predictors = ("auto", "mean", "boosted")
        _check(self.predictor in predictors, "predictor", f"not in {', '.join(predictors)}")
        modes = ", ".join(CacheMode)
        _check(self.cache_mode in list(CacheMode), "cache_mode", f"must be one of {modes}")
        scopes = ", ".join(RefreshScope)
        known = self.refresh_scope in list(RefreshScope)
        _check(known, "refresh_scope", f"must be one of {scopes}")
        classes = ", ".join(self.slo_classes)
        _check(self.default_slo_class in self.slo_classes, "default_slo_class", f"not in {classes}")


T = TypeVar("T")


def from_table(cls: type[T], table: Mapping[str, Any], path: str = "") -> T:
    """Build config dataclass ``cls`` from a TOML table.

    Raises FieldError naming the dotted key for an unknown key or a value of a wrong type.
    """
    defaults = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in table.items():
        dotted = f"{path}.{key}" if path else key
        if key not in defaults:
            raise FieldError(dotted, f"unknown key; known: {', '.join(sorted(defaults))}")
        values[key] = _convert(value, _default(defaults[key]), dotted)
    return cls(**values)


def _default(spec: "dataclasses.Field[Any]") -> Any:
    if spec.default is not dataclasses.MISSING:
        return spec.default
    assert spec.default_factory is not dataclasses.MISSING, spec.name
    return spec.default_factory()


def _convert(value: Any, default: Any, path: str) -> Any:
    if dataclasses.is_dataclass(default):
        return from_table(type(default), _expect(value, Mapping, path), path)
    if isinstance(default, Mapping):
        rows = _expect(value, Mapping, path)
        given = {
            k: from_table(SLOClass, _expect(v, Mapping, path), f"{path}.{k}")
            for k, v in rows.items()
        }
        return {**default, **given}
    if isinstance(default, tuple):
        item = type(default[0]) if default else float
        kinds = (int, float) if item is float else item
        return tuple(item(_expect(v, kinds, path)) for v in _expect(value, list, path))
    if isinstance(default, bool) or default is None:
        return _expect(value, bool if isinstance(default, bool) else (int, float), path)
    if isinstance(default, float):
        return float(_expect(value, (int, float), path))
    return _expect(value, type(default), path)


def _expect(value: Any, kind: Any, path: str) -> Any:
    numeric = kind is int or kind == (int, float)
    if not isinstance(value, kind) or (numeric and isinstance(value, bool)):
        raise FieldError(path, f"unexpected value {value!r}")
    return value

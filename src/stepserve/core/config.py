"""Configuration as frozen values; ``stepserve.tables`` reads them from TOML."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from stepserve.core.bounds import (
    Bounded,
    Count,
    NotNegative,
    Positive,
    Share,
    Whole,
    among,
    ascends,
    descends,
)
from stepserve.core.errors import check, check_known
from stepserve.core.request import CacheMode, RefreshScope


@dataclass(frozen=True, slots=True)
class SLOClass(Bounded, path="slo_classes"):
    """Targets that fill what a request of the class leaves open. Without a value: no target."""

    e2e_s: Positive | None = None  # from arrival to the last token: the deadline
    ttft_s: Positive | None = None  # until the first token
    tpot_s: Positive | None = None  # mean time per token after the first
    weight: Positive = 1.0  # also the most that a request of the class may ask for
    tbt_s: Positive | None = None  # each gap between two tokens


@dataclass(frozen=True, slots=True)
class NoOptions:
    """What a part is configured with that has nothing to configure."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A part by name, and its options: plain values, checked by the part's ``Options``.

    ``use``: a registered name or ``package.module:Class``; empty: the default, with other options.
    In TOML a name, or a table of ``use`` and the options.
    """

    use: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def over(self, base: "Choice | None") -> "Choice":
        """This laid over another choice, whose options stay if it is of the same part."""
        if base is None or self.use not in ("", base.use):
            return self
        return Choice(base.use, {**base.options, **self.options})


@dataclass(frozen=True, slots=True)
class ControlConfig(Bounded, path="control"):
    """Policies, each with options of its own, and the numbers that are everybody's."""

    placement: Choice | None = None  # where a request goes
    batching: Choice | None = None  # which steps run together
    threshold: Choice | None = None  # confidence threshold of a step
    load_control: Choice | None = None  # caps on thresholds under load
    migration: Choice | None = None  # when a running request moves to another instance
    refresh: Choice | None = None  # when keys and values are computed anew
    segment_cost: Choice | None = None  # how long an instance is predicted to be busy
    planner: Choice | None = None  # of the layout
    queue: str = "deadline"  # of waiting requests; or fcfs, fcfs_drop (which drops late ones)
    tenant_order: str = "fair"  # of tenants: by machine time and weight; or together: one queue
    tenant_weights: Mapping[str, float] = field(default_factory=dict)  # shares; 1 of others
    infeasible: str = "lowest_threshold"  # of deadlines; or preempt: give up the place
    thresholds: tuple[Share, ...] = (0.9, 0.8, 0.7, 0.6, 0.5)  # candidates
    margin: Share = 0.9  # share of a deadline that is planned against (DiLaServe B1: 0.9)
    queue_limit: Count = 256  # most waiting requests; more are refused
    admitted_limit: Whole = 0  # most requests placed at once (DiLaServe B1); 0: any number
    running_tokens: Whole = 0  # most full-length tokens on an instance (DiLaServe B7); 0: any
    predict_every_tokens: Count | None = None  # settled between forecasts: 8 (diffusion), 64
    caps_every_s: NotNegative = 1.0  # least time between two updates of the threshold caps
    report_every_s: NotNegative = 0.25  # how often an instance reports on its running requests
    plan_every_s: Positive = 300.0  # how often the layout is planned, on the arrivals of that long
    tp_degrees: tuple[int, ...] = (1, 2, 4)  # that the planner and the operator may form
    tbt_s: Positive = 0.1  # autoregressive: target between two tokens where the request has none
    chunk_tokens: Count = 2048  # autoregressive: most prefill in one batch
    push_pages: Whole = 8  # autoregressive: sent together before the cut; 0: all at the cut

    @property
    def plans(self) -> bool:
        """Whether the layout is planned at all."""
        return self.planner is not None and self.planner.use != "none"

    def __post_init__(self) -> None:
        """Raises FieldError naming the value that makes no sense."""
        Bounded.__post_init__(self)
        check(descends(self.thresholds), "control.thresholds", "must descend, at least one")
        ascend = ascends(self.tp_degrees) and self.tp_degrees[0] >= 1
        check(ascend, "control.tp_degrees", "must ascend from at least 1")
        check_known(self.queue, ("deadline", "fcfs", "fcfs_drop"), "control.queue")
        check_known(self.tenant_order, ("fair", "together"), "control.tenant_order")
        for name, weight in self.tenant_weights.items():
            check(0.0 < weight < 1e9, f"control.tenant_weights.{name}", "must be positive")
        check_known(self.infeasible, ("lowest_threshold", "preempt"), "control.infeasible")
        in_order = self.infeasible != "preempt" or self.queue == "deadline"
        check(in_order, "control.infeasible", "preempt needs queue = deadline: it is an order")


@dataclass(frozen=True, slots=True)
class ServeConfig(Bounded):
    """Everything ``stepserve serve`` can be told."""

    model: str = "bundled"  # bundled, the folder of a checkpoint, or its name on the hub
    engine: Choice = Choice("torch")  # what runs the steps
    served_model_name: str = ""  # what clients call it; default: the model's own name
    host: str = "127.0.0.1"
    port: int = 8000
    gateways: Count = 1  # processes that speak HTTP, on the one port
    ssl_certfile: str = ""  # PEM; with it, TLS is spoken
    ssl_keyfile: str = ""  # PEM of its private key, if not in the same file
    tenants: str = ""  # file of API keys, limits and weights; without it everybody is let in
    instances: Count = 2
    layout: str = ""  # tensor-parallel degrees at the start, such as 2,1, in place of instances
    cluster: str = "local"  # where instances live: local (processes of this machine), threads
    # (of the one process that then does all), ray, ray://auto or ray://HOST:PORT
    threads_per_instance: Whole = 0  # CPU threads per share of an instance; 0: the cores evenly
    device: str = "cpu"
    dtype: str = "float32"
    profile: str = ""  # step-time table; default: the one in the model's folder
    keep_profile: str = ""  # file of autoregressive batch times: read at start, written at end
    predictor: Choice = field(default_factory=lambda: Choice("auto"))  # of steps; auto: the best
    events: str = ""  # file for the event log; none by default
    events_bytes: Whole = 1_000_000_000  # of a file of it, uncompressed, then the next; 0: any
    events_keep: Count = 4  # older files of it, of this run or of earlier ones, beside it: .1, ...
    log_steps: str = ""  # file for the step log; none by default
    cache_mode: Annotated[str, among(CacheMode)] = "dual"  # what `dlm.cache: auto` means
    refresh_scope: Annotated[str, among(RefreshScope)] = "full"  # what `auto` means, with a cache
    max_running_requests: Count = 32  # most requests that one instance steps at a time
    kv_pages: Count = 4096  # of each instance, times its degree
    page_tokens: Count = 16  # positions in a page
    hang_s: Positive = 60.0  # an instance busy with one thing for longer is given up
    drain_delay_s: NotNegative = 5.0  # after SIGTERM: not ready, but requests are still taken
    drain_s: Positive = 120.0  # then: how long accepted requests may take before they are cut off
    body_s: Positive = 30.0  # how long a request's body may take to come
    stall_s: Positive = 60.0  # a client that does not read its answer for longer is cut off
    operator_api: bool = False  # serve /cluster: the cluster's state, and changes of the layout
    operator_port: int = 0  # of /cluster alone; 0: the one after the clients' port
    operator_host: str = "127.0.0.1"
    trust_slo_headers: bool = True  # a request's headers go before its body
    strict_fields: bool = False  # refuse unknown fields of a request
    strict_limits: bool = False  # refuse a max_tokens that has no room; else it is lowered
    cors_origins: tuple[str, ...] = ()  # whose scripts browsers let call; ["*"]: everybody's
    log_format: str = "text"  # of standard error; or json: an object a line
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
        Bounded.__post_init__(self)
        words = [word.strip() for word in self.layout.split(",")]
        ok = not self.layout or all(word.isdecimal() and int(word) for word in words)
        check(ok, "layout", f"{self.layout!r} is not a list of degrees, such as 2,1")
        check(0 <= self.port < 65536, "port", "must be in 0 .. 65535")
        kind, _, address = self.cluster.partition("://")
        known = self.cluster in ("local", "threads", "ray") or (kind == "ray" and address != "")
        check(known, "cluster", "must be local, threads, ray, ray://auto or ray://HOST:PORT")
        one = self.gateways == 1 or self.cluster == "local"
        check(one, "gateways", "more than one needs --cluster local")
        check_known(self.log_format, ("text", "json"), "log_format")
        check_known(self.default_slo_class, self.slo_classes, "default_slo_class")

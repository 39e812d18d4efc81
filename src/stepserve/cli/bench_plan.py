"""What a benchmark will do, settled before the first request: arrivals, problems, bodies."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from stepserve.cli.jobs import Job, bundled_jobs, text_jobs
from stepserve.cli.options import check_numbers, merged
from stepserve.core.bounds import Count, NotNegative, Positive, Share, Whole, bounds
from stepserve.core.errors import FieldError, check_known
from stepserve.sim import workload
from stepserve.sim.workload import Arrival, RateCurve

Body = Mapping[str, Any]

PRESETS = ("fixed", "deadline_fit")
"""Policies that a request can ask for: a pinned threshold, or one that may be lowered."""

DEFAULT_REQUESTS = 100
DEFAULT_RATE = 4.0
"""Requests per second: the bundled model is busy with it, and far from overloaded."""


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """The options of ``stepserve bench`` under their own names; units are in the names.

    Raises FieldError for a number that makes no sense. Arrivals that are drawn have
    ``DEFAULT_RATE`` unless another is given; a trace has its own.
    """

    url: str
    model: str | None = None
    endpoint: Literal["chat", "completions"] = "chat"
    arrivals: str = "poisson"
    rate: Positive | None = None
    requests: Count | None = None
    duration_s: Positive | None = None
    burst: tuple[float, float, float] | None = None
    rescale: Literal["resample", "stretch"] = "resample"
    jitter_s: NotNegative = 0.0
    max_total_tokens: Count | None = None
    seed: Whole = 0
    warmup: Whole = 2
    timeout_s: Positive = 600.0
    dataset: Literal["bundled", "random"] = "bundled"
    prompt_tokens: Count | None = None
    long_prompts: tuple[float, int] | None = None
    max_tokens: Count | None = None
    temperature: NotNegative = 0.0
    ignore_eos: bool = False
    body: Body | None = None
    deadline_ms: Positive | None = None
    slo_multiple: Positive | None = None
    slo_per_token_ms: Positive | None = None
    tbt_ms: Positive | None = None
    base_requests: Count = 8
    slo_mode: Literal["body", "none"] = "body"
    on_miss: str | None = None
    threshold: Share | None = None
    min_threshold: Share | None = None
    compare: Sequence[str] = ()
    variant: Sequence[tuple[str, Body]] = ()

    def __post_init__(self) -> None:
        check_numbers(self, bounds(BenchConfig))
        if self.burst is not None and not all(0.0 <= number < np.inf for number in self.burst):
            raise FieldError("--burst", "must be three numbers that are not negative")
        if self.rate is None and not self.arrivals.startswith("trace:"):
            object.__setattr__(self, "rate", DEFAULT_RATE)


@dataclass(frozen=True, slots=True)
class Plan:
    """Arrivals and the job of each; jobs to warm up and to measure unloaded latency with."""

    arrivals: tuple[Arrival, ...]
    dropped: int  # longer than ``max_total_tokens``
    jobs: list[Job]
    warmup: list[Job]
    base: list[Job]
    variants: dict[str, Body]


def make_plan(config: BenchConfig) -> Plan:
    """Settle everything that does not depend on the server. Raises FieldError."""
    drawn = _arrivals(config)
    kept = drawn
    if config.max_total_tokens is not None:
        kept = workload.within(drawn, config.max_total_tokens)
    if not kept:
        raise FieldError("--arrivals", "no request is left to send")
    measured = config.base_requests if config.slo_multiple is not None else 0
    first = [kept[i % len(kept)] for i in range(config.warmup + measured)]
    extra = _jobs(config, first, config.seed + 1)
    return Plan(
        arrivals=kept,
        dropped=len(drawn) - len(kept),
        jobs=_jobs(config, kept, config.seed),
        warmup=extra[: config.warmup],
        base=extra[config.warmup :],
        variants=_variants(config),
    )


def _jobs(config: BenchConfig, arrivals: Sequence[Arrival], seed: int) -> list[Job]:
    if config.dataset == "bundled":
        if config.long_prompts is not None:
            raise FieldError("--long-prompts", "belongs to --dataset random")
        return bundled_jobs(len(arrivals), seed, config.max_tokens)
    lengths = config.prompt_tokens, config.max_tokens, config.long_prompts
    return text_jobs(arrivals, seed, *lengths)


def _arrivals(config: BenchConfig) -> tuple[Arrival, ...]:
    kind, _, argument = config.arrivals.partition(":")
    rng = np.random.default_rng(config.seed)
    if kind == "trace":
        return _trace(config, argument, rng)
    assert config.rate is not None, "drawn arrivals have one"
    requests = config.requests
    if requests is None and config.duration_s is None:
        requests = DEFAULT_REQUESTS
    curve = RateCurve.constant(config.rate)
    if config.burst is not None:
        curve = curve.burst(*config.burst)
    cv = _cv(kind, argument)
    return workload.renewal(curve, cv, rng, requests=requests, duration_s=config.duration_s)


def _cv(kind: str, argument: str) -> float:
    if kind == "gamma":
        try:
            cv = float(argument)
        except ValueError:
            cv = np.nan
        if not 0.0 <= cv < np.inf:
            raise FieldError("--arrivals", f"gamma:CV needs a number, not {argument!r}")
        return cv
    cvs = {"poisson": 1.0, "constant": 0.0}
    if kind not in cvs or argument:
        raise FieldError("--arrivals", "must be poisson, gamma:CV, constant or trace:FILE")
    return cvs[kind]


def _trace(config: BenchConfig, name: str, rng: np.random.Generator) -> tuple[Arrival, ...]:
    if config.burst is not None:
        raise FieldError("--burst", "changes drawn arrivals only, not a trace")
    arrivals = workload.read_trace(_find(name))
    arrivals = workload.jitter(arrivals, config.jitter_s, rng)
    if config.rate is not None:
        factor = config.rate / (workload.mean_rate_per_s(arrivals) or config.rate)
        if config.rescale == "stretch":
            arrivals = workload.stretch(arrivals, factor)
        else:
            arrivals = workload.resample(arrivals, factor, rng)
    limit_s = np.inf if config.duration_s is None else config.duration_s
    return tuple(a for a in arrivals if a.at_s < limit_s)[: config.requests]


def _find(name: str) -> Path:
    """A trace by its path, or by its path below the data folder."""
    data = Path(os.environ.get("STEPSERVE_DATA", "../shared/data"))
    for path in (Path(name), data / name):
        if path.is_file():
            return path
    raise FieldError("--arrivals", f"no trace {name!r} here or in {data} (STEPSERVE_DATA)")


def _variants(config: BenchConfig) -> dict[str, Body]:
    """The runs to make, by name, each with what it changes in the request bodies."""
    preferred = 0.9 if config.threshold is None else config.threshold
    floor = 0.5 if config.min_threshold is None else config.min_threshold
    floors = {"fixed": preferred, "deadline_fit": floor}
    variants: dict[str, Body] = {}
    for name in config.compare:
        check_known(name, PRESETS, "--compare")
        variants[name] = {
            "dlm": {"confidence_threshold": preferred, "min_confidence_threshold": floors[name]}
        }
    variants.update(config.variant)
    return variants or {"run": {}}


def request_fields(config: BenchConfig, job: Job, deadline_s: float | None) -> dict[str, Any]:
    """The body of a loaded request, less its text; fields that were not asked for are absent."""
    fields = _common_fields(config, job)
    slo: dict[str, Any] = {}
    if deadline_s is not None:
        slo["e2e_ms"] = round(1e3 * deadline_s, 3)
    if config.tbt_ms is not None:
        slo["tbt_ms"] = config.tbt_ms
    if config.on_miss is not None:
        slo["on_miss"] = config.on_miss
    if slo and config.slo_mode == "body":
        fields = merged(fields, {"slo": slo})
    return merged(fields, _thresholds(config.threshold, config.min_threshold))


def base_fields(config: BenchConfig, job: Job) -> dict[str, Any]:
    """The body of an unloaded request: no deadline, and the preferred threshold pinned."""
    return merged(_common_fields(config, job), _thresholds(config.threshold, config.threshold))


def _thresholds(preferred: float | None, floor: float | None) -> Body:
    named = {"confidence_threshold": preferred, "min_confidence_threshold": floor}
    given = {name: value for name, value in named.items() if value is not None}
    return {"dlm": given} if given else {}


def _common_fields(config: BenchConfig, job: Job) -> dict[str, Any]:
    fields = {"max_tokens": job.max_tokens, "temperature": config.temperature}
    if config.ignore_eos:
        fields["ignore_eos"] = True
    return merged(fields, config.body or {})


def deadlines_s(
    config: BenchConfig, jobs: Sequence[Job], base_s: float | None
) -> list[float | None]:
    """The deadline of each job in seconds after its arrival, or ``None`` for all of them."""
    if config.slo_per_token_ms is not None:
        return [1e-3 * config.slo_per_token_ms * job.expected_tokens for job in jobs]
    if config.slo_multiple is not None and base_s is not None:
        return [config.slo_multiple * base_s] * len(jobs)
    one = None if config.deadline_ms is None else 1e-3 * config.deadline_ms
    return [one] * len(jobs)

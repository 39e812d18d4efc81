"""The metrics of a running server in Prometheus' text format.

``vllm:`` names are aliases that routers and dashboards already read; ``stepserve:`` names say
what they cannot: slack, service levels by class, and how denoising went.
"""

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from stepserve.core.frontend import RequestReport
from stepserve.core.request import Family, FinishReason, Request

from .control import ControlCollector, ControlReading
from .tenants import TenantMetrics, series

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_SLACK_SECONDS = (-60, -10, -5, -2, -1, -0.5, -0.1, 0, 0.1, 0.5, 1, 2, 5, 10, 60)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
_PER_BLOCK = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_THRESHOLDS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)


# Series by name: what they say, and their labels after ``model_name``.
_COUNTERS: dict[str, tuple[str, *tuple[str, ...]]] = {
    "vllm:prompt_tokens": ("Prompt tokens.",),
    "vllm:generation_tokens": ("Output tokens.",),
    "vllm:request_success": ("Whole answers.", "finished_reason"),
    "stepserve:requests": ("Requests ended, by how.", "slo_class", "outcome"),
    "stepserve:slo_requests": ("Whole answers by SLO status.", "slo_class", "status"),
    "stepserve:forced_commits": ("Tokens settled at or below the threshold.", "slo_class"),
    "stepserve:migrations": ("Moves of requests whose answer is whole.", "slo_class"),
    "stepserve:paused_seconds": ("Between two instances, of whole answers.", "slo_class"),
    "stepserve:requests_by_cache": ("Whole answers by cache mode.", "slo_class", "cache"),
    "stepserve:ignored_headers": ("SLO headers that could not be used.", "header"),
}
_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...], *tuple[str, ...]]] = {
    "vllm:time_to_first_token_seconds": ("Arrival to first text.", _SECONDS),
    "vllm:inter_token_latency_seconds": (
        "Gap before a text event over its tokens, once per token.",
        _TOKEN_SECONDS,
    ),
    "vllm:request_time_per_output_token_seconds": (
        "(E2E - queue) / output tokens.",
        _TOKEN_SECONDS,
    ),
    "vllm:e2e_request_latency_seconds": ("Arrival to end.", _SECONDS),
    "vllm:request_queue_time_seconds": ("Arrival to first step.", _SECONDS),
    "vllm:request_inference_time_seconds": ("First step to end.", _SECONDS),
    "vllm:request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    "vllm:request_generation_tokens": ("Output tokens of a request.", _TOKENS),
    "vllm:request_params_max_tokens": ("Output limit of a request.", _TOKENS),
    "stepserve:slack_seconds": (
        "Time left to the deadline at admission and at completion.",
        _SLACK_SECONDS,
        "slo_class",
        "at",
    ),
    "stepserve:e2e_seconds": ("E2E.", _SECONDS, "slo_class"),
    "stepserve:ttft_seconds": ("TTFT.", _SECONDS, "slo_class"),
    "stepserve:text_event_gap_seconds": ("Between text events.", _SECONDS, "slo_class"),
    "stepserve:text_event_tokens": ("Tokens of a text event.", _PER_BLOCK, "slo_class"),
    "stepserve:steps_per_block": ("Denoising steps per block.", _PER_BLOCK, "slo_class"),
    "stepserve:tokens_per_forward": ("Output tokens per step.", _PER_BLOCK, "slo_class"),
    "stepserve:block_seconds": ("(E2E - queue) / blocks.", _SECONDS, "slo_class"),
    "stepserve:effective_threshold": ("Mean threshold of a request.", _THRESHOLDS, "slo_class"),
}


@dataclass(frozen=True, slots=True)
class LoadGauges:
    """Asked at each scrape: requests in steps, requests waiting, share of KV pages in use.

    ``control``: what the control plane decided, if there is one to ask.
    """

    running: Callable[[], float]
    waiting: Callable[[], float]
    kv_usage: Callable[[], float]
    control: Callable[[], ControlReading] | None = None


class PrometheusMetrics:
    """An observer of the gateway with a registry of its own."""

    def __init__(self, model: str, load: LoadGauges, page_tokens: int, pages: int) -> None:
        self._model = model
        self._registry = CollectorRegistry()
        self._install_load(load, page_tokens, pages)
        model_name, registry = "model_name", self._registry
        self._tenants = TenantMetrics(model, registry)
        self._in_flight = Gauge(
            "stepserve:requests_in_flight",
            "Not yet ended.",
            (model_name, "slo_class"),
            registry=registry,
        )
        counters = {
            name: Counter(name, text, (model_name, *labels), registry=registry)
            for name, (text, *labels) in _COUNTERS.items()
        }
        histograms = {
            name: Histogram(name, text, (model_name, *labels), registry=registry, buckets=buckets)
            for name, (text, buckets, *labels) in _HISTOGRAMS.items()
        }
        self._series = series({**counters, **histograms}, model)

    def started(self, request: Request) -> None:
        """A sample was handed to the frontend."""
        slo_class = request.slo.slo_class
        self._in_flight.labels(self._model, slo_class).inc()
        self._tenants.started(request)
        self._observe("stepserve:slack_seconds", request.slo.e2e_s, slo_class, "admission")

    def emitted(self, request: Request, tokens: int, gap_s: float | None) -> None:
        """A text event came; its gap is also shared out over its tokens."""
        slo_class = request.slo.slo_class
        self._count("vllm:generation_tokens", tokens)
        self._tenants.emitted(request, tokens)
        self._observe("stepserve:text_event_tokens", tokens, slo_class)
        self._observe("stepserve:text_event_gap_seconds", gap_s, slo_class)
        if gap_s is not None:
            observe = self._series("vllm:inter_token_latency_seconds").observe
            for _ in range(tokens):
                observe(gap_s / tokens)

    def rejected(self, request: Request) -> None:
        """A sample was refused at admission."""
        self._end(request, "rejected")

    def finished(
        self, request: Request, reason: FinishReason, output_tokens: int, report: RequestReport
    ) -> None:
        """A sample ended. Latencies count only answers that are whole."""
        self._end(request, reason.value)
        self._tenants.finished(request, reason, report)
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        self._count("vllm:request_success", 1, reason.value)
        self._observe_latency(request, output_tokens, report)
        self._observe_slo(request, report)
        if request.family is Family.DIFFUSION:
            self._observe_denoising(request, output_tokens, report)

    def limited(self, tenant: str, why: str) -> None:
        """A rule of a tenant refused a request."""
        self._tenants.limited(tenant, why)

    def header_ignored(self, name: str) -> None:
        """An SLO header could not be used."""
        self._count("stepserve:ignored_headers", 1, name)

    def render(self) -> bytes:
        """All metrics, as text."""
        return generate_latest(self._registry)

    def _count(self, name: str, amount: float, *labels: str) -> None:
        self._series(name, *labels).inc(amount)

    def _observe(self, name: str, value: float | None, *labels: str) -> None:
        if value is not None:
            self._series(name, *labels).observe(value)

    def _end(self, request: Request, outcome: str) -> None:
        slo_class = request.slo.slo_class
        self._in_flight.labels(self._model, slo_class).dec()
        self._tenants.ended(request, outcome)
        self._count("stepserve:requests", 1, slo_class, outcome)

    def _observe_latency(self, request: Request, output_tokens: int, report: RequestReport) -> None:
        served_s = report.e2e_s - report.queue_s
        per_token_s = served_s / output_tokens if output_tokens else None
        self._count("vllm:prompt_tokens", request.prompt_tokens)
        self._observe("vllm:e2e_request_latency_seconds", report.e2e_s)
        self._observe("vllm:request_queue_time_seconds", report.queue_s)
        self._observe("vllm:request_inference_time_seconds", served_s)
        self._observe("vllm:request_prompt_tokens", request.prompt_tokens)
        self._observe("vllm:request_generation_tokens", output_tokens)
        self._observe("vllm:request_params_max_tokens", request.max_output_tokens)
        self._observe("vllm:time_to_first_token_seconds", report.ttft_s)
        self._observe("vllm:request_time_per_output_token_seconds", per_token_s)

    def _observe_slo(self, request: Request, report: RequestReport) -> None:
        slo_class = request.slo.slo_class
        self._count("stepserve:slo_requests", 1, slo_class, report.slo_status)
        self._count("stepserve:migrations", report.migrations, slo_class)
        self._count("stepserve:paused_seconds", report.paused_s, slo_class)
        self._observe("stepserve:e2e_seconds", report.e2e_s, slo_class)
        self._observe("stepserve:ttft_seconds", report.ttft_s, slo_class)
        self._observe("stepserve:slack_seconds", report.slack_s, slo_class, "completion")

    def _observe_denoising(
        self, request: Request, output_tokens: int, report: RequestReport
    ) -> None:
        slo_class = request.slo.slo_class
        self._count("stepserve:requests_by_cache", 1, slo_class, request.diffusion.cache_mode.value)
        self._count("stepserve:forced_commits", report.forced, slo_class)
        self._observe("stepserve:effective_threshold", report.threshold_mean, slo_class)
        if report.forwards:
            per_forward = output_tokens / report.forwards
            self._observe("stepserve:tokens_per_forward", per_forward, slo_class)
        if report.blocks:
            served_s = report.e2e_s - report.queue_s
            self._observe("stepserve:steps_per_block", report.forwards / report.blocks, slo_class)
            self._observe("stepserve:block_seconds", served_s / report.blocks, slo_class)

    def _install_load(self, load: LoadGauges, page_tokens: int, pages: int) -> None:
        def gauge(name: str, text: str, read: Callable[[], float]) -> None:
            family = Gauge(name, text, ["model_name"], registry=self._registry)
            family.labels(self._model).set_function(read)

        gauge("vllm:num_requests_running", "Requests in steps.", load.running)
        gauge("vllm:num_requests_waiting", "Requests waiting for a place.", load.waiting)
        gauge("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", load.kv_usage)
        labels = ["model_name", "block_size", "num_gpu_blocks"]
        cache = Gauge(
            "vllm:cache_config_info", "KV pages of one instance.", labels, registry=self._registry
        )
        cache.labels(self._model, str(page_tokens), str(pages)).set(1)
        if load.control is not None:
            self._registry.register(ControlCollector(self._model, load.control))

"""The metrics of a running server in Prometheus' text format.

``vllm:`` names are aliases that routers and dashboards already read; ``stepserve:`` names say
what they cannot: slack, service levels by class, and how denoising went.
"""

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from stepserve.core.protocols import RequestReport
from stepserve.core.request import Family, FinishReason, Request

from .control import ControlCollector, ControlReading

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_SLACK_SECONDS = (-60, -10, -5, -2, -1, -0.5, -0.1, 0, 0.1, 0.5, 1, 2, 5, 10, 60)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
_PER_BLOCK = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_THRESHOLDS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)


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
        self._install_vllm()
        self._install_stepserve()

    def started(self, request: Request) -> None:
        """A sample was handed to the frontend."""
        slo_class = request.slo.slo_class
        self._in_flight.labels(self._model, slo_class).inc()
        if request.slo.e2e_s is not None:
            self._slack.labels(self._model, slo_class, "admission").observe(request.slo.e2e_s)

    def emitted(self, request: Request, tokens: int, gap_s: float | None) -> None:
        """A text event came; its gap is also shared out over its tokens."""
        slo_class = request.slo.slo_class
        self._generation_tokens.labels(self._model).inc(tokens)
        self._event_tokens.labels(self._model, slo_class).observe(tokens)
        if gap_s is None:
            return
        self._event_gap.labels(self._model, slo_class).observe(gap_s)
        for _ in range(tokens):
            self._itl.labels(self._model).observe(gap_s / tokens)

    def rejected(self, request: Request) -> None:
        """A sample was refused at admission."""
        self._end(request, "rejected")

    def finished(
        self, request: Request, reason: FinishReason, output_tokens: int, report: RequestReport
    ) -> None:
        """A sample ended. Latencies count only answers that are whole."""
        self._end(request, reason.value)
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        self._observe_vllm(request, reason, output_tokens, report)
        self._observe_slo(request, report)
        if request.family is Family.DIFFUSION:
            self._observe_denoising(request, output_tokens, report)

    def header_ignored(self, name: str) -> None:
        """An SLO header could not be used."""
        self._ignored_headers.labels(self._model, name).inc()

    def render(self) -> bytes:
        """All metrics, as text."""
        return generate_latest(self._registry)

    def _end(self, request: Request, outcome: str) -> None:
        slo_class = request.slo.slo_class
        self._in_flight.labels(self._model, slo_class).dec()
        self._requests.labels(self._model, slo_class, outcome).inc()

    def _observe_vllm(
        self, request: Request, reason: FinishReason, output_tokens: int, report: RequestReport
    ) -> None:
        model = self._model
        served_s = report.e2e_s - report.queue_s
        self._prompt_tokens.labels(model).inc(request.prompt_tokens)
        self._success.labels(model, reason.value).inc()
        self._e2e.labels(model).observe(report.e2e_s)
        self._queue.labels(model).observe(report.queue_s)
        self._inference.labels(model).observe(served_s)
        self._prompt_length.labels(model).observe(request.prompt_tokens)
        self._output_length.labels(model).observe(output_tokens)
        self._max_tokens.labels(model).observe(request.max_output_tokens)
        if report.ttft_s is not None:
            self._ttft.labels(model).observe(report.ttft_s)
        if output_tokens:
            self._tpot.labels(model).observe(served_s / output_tokens)

    def _observe_slo(self, request: Request, report: RequestReport) -> None:
        slo_class = request.slo.slo_class
        status = "none"
        if report.slo_met is not None:
            met = "degraded" if report.degraded else "met"
            status = met if report.slo_met else "missed"
        self._slo_status.labels(self._model, slo_class, status).inc()
        self._class_e2e.labels(self._model, slo_class).observe(report.e2e_s)
        self._migrations.labels(self._model, slo_class).inc(report.migrations)
        self._paused.labels(self._model, slo_class).inc(report.paused_s)
        if report.ttft_s is not None:
            self._class_ttft.labels(self._model, slo_class).observe(report.ttft_s)
        if report.slack_s is not None:
            self._slack.labels(self._model, slo_class, "completion").observe(report.slack_s)

    def _observe_denoising(
        self, request: Request, output_tokens: int, report: RequestReport
    ) -> None:
        labels = (self._model, request.slo.slo_class)
        mode = request.diffusion.cache_mode.value
        self._cache_modes.labels(self._model, request.slo.slo_class, mode).inc()
        self._forced.labels(*labels).inc(report.forced)
        if report.threshold_mean is not None:
            self._threshold.labels(*labels).observe(report.threshold_mean)
        if report.forwards:
            self._per_forward.labels(*labels).observe(output_tokens / report.forwards)
        if report.blocks:
            self._steps_per_block.labels(*labels).observe(report.forwards / report.blocks)
            served_s = report.e2e_s - report.queue_s
            self._block_seconds.labels(*labels).observe(served_s / report.blocks)

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

    def _install_vllm(self) -> None:
        model = ("model_name",)
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens.", model)
        self._generation_tokens = self._counter("vllm:generation_tokens", "Output tokens.", model)
        self._success = self._counter(
            "vllm:request_success", "Whole answers.", (*model, "finished_reason")
        )
        self._ttft = self._histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first text.", model, _SECONDS
        )
        self._itl = self._histogram(
            "vllm:inter_token_latency_seconds",
            "Gap before a text event over its tokens, once per token.",
            model,
            _TOKEN_SECONDS,
        )
        self._tpot = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "(E2E - queue) / output tokens.",
            model,
            _TOKEN_SECONDS,
        )
        self._e2e = self._histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to end.", model, _SECONDS
        )
        self._queue = self._histogram(
            "vllm:request_queue_time_seconds", "Arrival to first step.", model, _SECONDS
        )
        self._inference = self._histogram(
            "vllm:request_inference_time_seconds", "First step to end.", model, _SECONDS
        )
        self._prompt_length = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request.", model, _TOKENS
        )
        self._output_length = self._histogram(
            "vllm:request_generation_tokens", "Output tokens of a request.", model, _TOKENS
        )
        self._max_tokens = self._histogram(
            "vllm:request_params_max_tokens", "Output limit of a request.", model, _TOKENS
        )

    def _install_stepserve(self) -> None:
        labels = ("model_name", "slo_class")
        self._requests = self._counter(
            "stepserve:requests", "Requests ended, by how.", (*labels, "outcome")
        )
        self._in_flight = Gauge(
            "stepserve:requests_in_flight", "Not yet ended.", labels, registry=self._registry
        )
        self._slo_status = self._counter(
            "stepserve:slo_requests", "Whole answers by SLO status.", (*labels, "status")
        )
        self._slack = self._histogram(
            "stepserve:slack_seconds",
            "Time left to the deadline at admission and at completion.",
            (*labels, "at"),
            _SLACK_SECONDS,
        )
        self._class_e2e = self._histogram("stepserve:e2e_seconds", "E2E.", labels, _SECONDS)
        self._class_ttft = self._histogram("stepserve:ttft_seconds", "TTFT.", labels, _SECONDS)
        self._event_gap = self._histogram(
            "stepserve:text_event_gap_seconds", "Between text events.", labels, _SECONDS
        )
        self._event_tokens = self._histogram(
            "stepserve:text_event_tokens", "Tokens of a text event.", labels, _PER_BLOCK
        )
        self._steps_per_block = self._histogram(
            "stepserve:steps_per_block", "Denoising steps per block.", labels, _PER_BLOCK
        )
        self._per_forward = self._histogram(
            "stepserve:tokens_per_forward", "Output tokens per step.", labels, _PER_BLOCK
        )
        self._block_seconds = self._histogram(
            "stepserve:block_seconds", "(E2E - queue) / blocks.", labels, _SECONDS
        )
        self._threshold = self._histogram(
            "stepserve:effective_threshold", "Mean threshold of a request.", labels, _THRESHOLDS
        )
        self._forced = self._counter(
            "stepserve:forced_commits", "Tokens settled at or below the threshold.", labels
        )
        self._migrations = self._counter(
            "stepserve:migrations", "Moves of requests whose answer is whole.", labels
        )
        self._paused = self._counter(
            "stepserve:paused_seconds", "Between two instances, of whole answers.", labels
        )
        self._cache_modes = self._counter(
            "stepserve:requests_by_cache", "Whole answers by cache mode.", (*labels, "cache")
        )
        self._ignored_headers = self._counter(
            "stepserve:ignored_headers",
            "SLO headers that could not be used.",
            ("model_name", "header"),
        )

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def _histogram(
        self, name: str, text: str, labels: tuple[str, ...], buckets: tuple[float, ...]
    ) -> Histogram:
        return Histogram(name, text, labels, registry=self._registry, buckets=buckets)

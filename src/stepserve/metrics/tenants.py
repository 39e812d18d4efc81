"""What each tenant asked for and got, as series of ``/metrics``: of 100 tenants by name."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from stepserve.core.frontend import RequestReport
from stepserve.core.request import FinishReason, Request

MOST_NAMED = 100
"""Tenants that have series of their own; what came first stays. All others are ``OTHER``."""

OTHER = "other"

_COUNTERS: dict[str, tuple[str, *tuple[str, ...]]] = {
    "stepserve:tenant_requests": ("Requests ended, by how.", "outcome"),
    "stepserve:tenant_met": ("Whole answers that kept every target, or had none.",),
    "stepserve:tenant_limited": ("Refused by a rule of the tenant, by which.", "limit"),
    "stepserve:tenant_prompt_tokens": ("Prompt tokens of whole answers.",),
    "stepserve:tenant_generation_tokens": ("Output tokens.",),
}


def series(metrics: Mapping[str, Any], model: str) -> Callable[..., Any]:
    """Finds the series of a metric's name and labels: looking one up costs more than counting."""
    return functools.cache(lambda name, *labels: metrics[name].labels(model, *labels))


class TenantMetrics:
    """Told what an observer is, tenant by tenant."""

    def __init__(self, model: str, registry: CollectorRegistry) -> None:
        self._model = model
        self._named: set[str] = set()
        labels = ("model_name", "tenant")
        counters = {
            name: Counter(name, text, (*labels, *more), registry=registry)
            for name, (text, *more) in _COUNTERS.items()
        }
        self._series = series(counters, model)
        name, text = "stepserve:tenant_requests_in_flight", "Not yet ended."
        self._in_flight = Gauge(name, text, labels, registry=registry)

    def _label(self, tenant: str) -> str:
        if tenant not in self._named:
            if len(self._named) >= MOST_NAMED:
                return OTHER
            self._named.add(tenant)
        return tenant

    def _count(self, name: str, tenant: str, amount: float, *labels: str) -> None:
        self._series(f"stepserve:tenant_{name}", self._label(tenant), *labels).inc(amount)

    def started(self, request: Request) -> None:
        """A sample was handed to the frontend."""
        self._in_flight.labels(self._model, self._label(request.tenant)).inc()

    def emitted(self, request: Request, tokens: int) -> None:
        """Tokens came."""
        self._count("generation_tokens", request.tenant, tokens)

    def ended(self, request: Request, outcome: str) -> None:
        """A sample that was started is over."""
        self._in_flight.labels(self._model, self._label(request.tenant)).dec()
        self._count("requests", request.tenant, 1, outcome)

    def finished(self, request: Request, reason: FinishReason, report: RequestReport) -> None:
        """An answer came to its end."""
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._count("prompt_tokens", request.tenant, request.prompt_tokens)
            self._count("met", request.tenant, report.slo_met is not False)

    def limited(self, tenant: str, limit: str) -> None:
        """A rule of the tenant refused a request."""
        self._count("limited", tenant, 1, limit)

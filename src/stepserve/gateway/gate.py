"""What stands between a tenant's request and the frontend: what it may ask for, and how much."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from stepserve.core.config import ServeConfig
from stepserve.core.request import SLO
from stepserve.gateway.contract import Observer
from stepserve.gateway.errors import APIError
from stepserve.gateway.generation import Choice
from stepserve.gateway.limits import Limits
from stepserve.gateway.schemas import GenerationRequest, SLOFields
from stepserve.gateway.slo import TIERS
from stepserve.gateway.tenants import Tenant, check_allowed
from stepserve.gateway.translate import Sample


class Gate:
    """Lets requests in, as far as their tenants' rules go, and counts them while they run."""

    def __init__(self, config: ServeConfig, observer: Observer, clock: Callable[[], float]) -> None:
        """``clock``: of limits per minute, in seconds."""
        self._config, self._observer = config, observer
        self._limits = Limits(clock)

    def fields(self, tenant: Tenant, body: GenerationRequest) -> SLOFields | None:
        """Its targets; a tenant that may not have the default class has its first by default."""
        fields = body.slo or SLOFields()
        says = fields.slo_class or body.service_tier in TIERS
        if says or not tenant.classes or self._config.default_slo_class in tenant.classes:
            return body.slo
        return fields.model_copy(update={"slo_class": tenant.classes[0]})

    def check(self, tenant: Tenant, body: GenerationRequest, slo: SLO) -> None:
        """Raises APIError (403) for what the tenant may not ask for."""
        by_tier = body.service_tier in TIERS and not (body.slo and body.slo.slo_class)
        param = "service_tier" if by_tier else "slo.class"
        try:
            check_allowed(tenant, slo, self._config.slo_classes, param)
        except APIError:
            self._observer.limited(tenant.name, "not_allowed")
            raise

    def admit(self, tenant: Tenant, samples: Sequence[Sample]) -> tuple[Sample, ...]:
        """The samples as the tenant's, counted until ``ended``. Raises APIError: see ``Limits``."""
        own = [replace(s, request=replace(s.request, tenant=tenant.name)) for s in samples]
        try:
            self._limits.admit(tenant, [sample.request for sample in own])
        except APIError as error:
            limit = "not_allowed" if error.status == 403 else error.message.partition(":")[0]
            self._observer.limited(tenant.name, limit)
            raise
        return tuple(own)

    def ended(self, choice: Choice) -> None:
        """A sample that was admitted is over."""
        refused = choice.failure is not None and choice.failure.status == 429
        self._limits.end(choice.sample.request, len(choice.text.tokens), refused)

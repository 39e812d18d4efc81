"""Whose the requests of a run are: as their SLO classes say."""

from collections.abc import Sequence
from dataclasses import replace

from stepserve.core.request import Request

from .config import SLOClass


def with_tenants(requests: Sequence[Request], classes: Sequence[SLOClass]) -> Sequence[Request]:
    """The requests, each its class's tenant's; of classes without one, nobody's."""
    tenants = {one.name: one.tenant for one in classes if one.tenant}
    if not tenants:
        return requests
    return [replace(r, tenant=tenants.get(r.slo.slo_class, "")) for r in requests]

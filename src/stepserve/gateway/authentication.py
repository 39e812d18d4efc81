"""ASGI layers that ask for a key before a request's body is read."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from stepserve.gateway.errors import APIError
from stepserve.gateway.keys import bearer
from stepserve.gateway.tenants import DEFAULT, Tenant, Tenants

TENANT_KEY = "stepserve.tenant"
"""Where a request's tenant is in the ASGI scope."""

OPEN = ("/health", "/live", "/ping", "/ready", "/version")
OPERATORS = ("/metrics", "/cluster")


def tenant_of(scope: Scope) -> Tenant:
    """Whose request it is."""
    found: Tenant = scope.get(TENANT_KEY, DEFAULT)
    return found


class Authentication:
    """Answers 401 without a key that is known, and says whose request it is."""

    def __init__(self, app: ASGIApp, tenants: Tenants) -> None:
        self._app, self._tenants = app, tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        path = scope.get("path", "")
        if scope["type"] != "http" or path in OPEN:
            await self._app(scope, receive, send)
            return
        key = bearer(Headers(scope=scope).get("authorization", ""))
        if path.startswith(OPERATORS):
            known = self._tenants.is_operator(key)
        else:
            tenant = self._tenants.tenant(key)
            scope[TENANT_KEY], known = tenant, tenant is not None
        if not known:
            await _refusal(key).response()(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _refusal(key: str) -> APIError:
    said = "this key is not known" if key else "no API key: send Authorization: Bearer KEY"
    return APIError(401, said, headers={"WWW-Authenticate": "Bearer"})

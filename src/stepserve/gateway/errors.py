"""Every error a client sees has one shape: ``{"error": {message, type, param, code}}``."""

import logging
import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from stepserve.core.errors import FieldError
from stepserve.core.frontend import RequestRejected

_LOG = logging.getLogger(__name__)

# status: (OpenAI error type, code)
_KINDS = {
    400: ("invalid_request_error", None),
    401: ("invalid_request_error", "invalid_api_key"),
    403: ("permission_error", "not_allowed"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("invalid_request_error", "body_too_slow"),
    409: ("conflict_error", "busy"),
    413: ("invalid_request_error", "body_too_large"),
    429: ("rate_limit_error", "overloaded"),
    499: ("client_closed_request", "client_closed_request"),
    503: ("service_unavailable_error", "not_ready"),
}
REQUEST_ID_KEY = "stepserve.request_id"
"""Where the request's id is in the ASGI scope."""
NO_JSON = "the body must be a JSON object, sent as application/json"
_INTERNAL = ("server_error", "internal_error")


class APIError(Exception):
    """An answer other than success; ``param`` names the request field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON body, also sent as the last event of a stream that fails."""
        kind, code = _KINDS.get(self.status, _INTERNAL)
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code or code,
            }
        }

    def response(self) -> JSONResponse:
        """The HTTP response."""
        return JSONResponse(self.body(), self.status, self.headers)


def rejected(refused: RequestRejected) -> APIError:
    """429 for a request refused at admission: why, and when to come back if that can help.

    The official clients obey ``x-should-retry``. The dropped-reason header is llm-d's, with its
    word where it has one, since routers branch on it.
    """
    headers = {
        "x-llm-d-request-dropped-reason": f"rejected-{refused.reason.replace('_', '-')}",
        "x-should-retry": "false",
    }
    if refused.retry_after_s is not None:
        headers |= try_again(refused.retry_after_s)
    message = f"request refused: {refused.why}"
    return APIError(429, message, code=refused.reason.value, headers=headers)


def try_again(after_s: float) -> Mapping[str, str]:
    """Headers that say when to ask again: for everybody in seconds, for some exactly."""
    return {
        "Retry-After": str(max(1, math.ceil(after_s))),
        "retry-after-ms": str(math.ceil(after_s * 1e3)),
        "x-should-retry": "true",
    }


def check_model(name: str | None, served: str) -> None:
    """Raises APIError (404) unless a request names the served model, or none."""
    if name is not None and name != served:
        message = f"model {name!r} is not served here; {served!r} is"
        raise APIError(404, message, param="model", code="model_not_found")


def install_error_handlers(app: FastAPI) -> None:
    """Make the app answer every failure in the one shape."""

    async def api_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, APIError)
        return error.response()

    async def field_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, FieldError)
        return APIError(400, str(error), param=error.field).response()

    async def http_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        phrase = HTTPStatus(error.status_code).phrase
        return APIError(error.status_code, error.detail or phrase, headers=error.headers).response()

    async def validation_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return from_validation(error.errors(), skipped=1).response()

    async def bug(request: Request, error: Exception) -> JSONResponse:
        request_id = request.scope.get(REQUEST_ID_KEY, "")
        _LOG.error("request %s failed", request_id, exc_info=error)
        headers = {"x-request-id": request_id}
        return APIError(500, "internal error", headers=headers).response()

    app.add_exception_handler(APIError, api_error)
    app.add_exception_handler(FieldError, field_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(Exception, bug)


def from_validation(errors: Sequence[Mapping[str, Any]], skipped: int = 0) -> APIError:
    """400, and not FastAPI's 422, naming the first field at fault.

    ``skipped``: how many names of a path are not the body's.
    """
    first = errors[0]
    cause = first.get("ctx", {}).get("error")
    message = str(cause) if isinstance(cause, Exception) else str(first["msg"])
    if first["type"] == "json_invalid":
        return APIError(400, f"the body is not valid JSON: {cause or message}")
    path = first["loc"][skipped:]
    if skipped and not path:
        return APIError(400, NO_JSON)
    param = ".".join(str(part) for part in path) or None
    return APIError(400, f"{param}: {message}" if param else message, param=param)

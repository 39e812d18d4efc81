"""Generation without a framework's layers: a body is decoded and checked, a stream is written."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stepserve.gateway.errors import NO_JSON, APIError, from_validation

Body = TypeVar("Body", bound=BaseModel)


class Direct:
    """An ASGI endpoint that takes a JSON body; FastAPI's own takes several times as long."""

    def __init__(
        self, model: type[BaseModel], call: Callable[[Request, Any], Awaitable[Response]]
    ) -> None:
        self._model, self.call = model, call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Raises APIError for a body that is none."""
        http = Request(scope, receive)
        kind = http.headers.get("content-type", "application/json").partition(";")[0]
        if not kind.endswith("json"):
            raise APIError(400, NO_JSON)
        body = decoded(self._model, await http.body())
        response = await self.call(http, body)
        await response(scope, receive, send)


def decoded(model: type[Body], data: bytes) -> Body:
    """A body that has been checked. Raises APIError naming the first field at fault."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        what = error.msg if isinstance(error, json.JSONDecodeError) else "it cannot be read"
        raise APIError(400, f"the body is not valid JSON: {what}") from error
    if not isinstance(value, dict):
        raise APIError(400, NO_JSON)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise from_validation(error.errors()) from error


class EventStream(Response):
    """Server-sent events. Who made them watches for the client's end, too."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], headers: Mapping[str, str]) -> None:
        super().__init__(None, 200, headers, self.media_type)
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write events as they come."""
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(head)
        async for text in self._events:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

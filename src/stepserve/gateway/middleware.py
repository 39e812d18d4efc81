"""ASGI layers around the application: request ids, HEAD, the size of bodies, slow clients."""

import asyncio
import logging
import uuid
from math import inf

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stepserve.gateway.errors import REQUEST_ID_KEY, APIError

_LOG = logging.getLogger(__name__)

_MAX_ID = 128


class RequestIds:
    """Echoes ``X-Request-Id`` on every response, or makes one up."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        usable = given.isascii() and given.isprintable() and 0 < len(given) <= _MAX_ID
        request_id = given if usable else uuid.uuid4().hex

        scope[REQUEST_ID_KEY] = request_id  # for the error handler outside all middleware

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class HeadAsGet:
    """Answers HEAD as GET, on every path, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._app({**scope, "method": "GET"}, receive, send_head)


class BodyLimit:
    """Answers 413 to bodies above ``max_bytes``, announced or not."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, counting its body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        message = f"the body exceeds {self._max_bytes} bytes"
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await APIError(413, message).response()(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            event = await receive()
            received += len(event.get("body", b""))
            if received > self._max_bytes:
                raise HTTPException(413, message)
            return event

        await self._app(scope, counted, send)


class Patience:
    """Answers 408 to a body that takes longer than ``body_s``; cuts off who does not read.

    ``stall_s``: how long a client may leave a full buffer unread.
    """

    def __init__(self, app: ASGIApp, body_s: float, stall_s: float) -> None:
        self._app = app
        self._body_s, self._stall_s = body_s, stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "a request is a task"
        until_s = loop.time() + self._body_s
        whole, stalled, sending_since_s = False, False, inf
        timer: asyncio.TimerHandle

        async def timely() -> Message:
            nonlocal whole
            if whole:
                return await receive()
            try:
                async with asyncio.timeout_at(until_s):
                    event = await receive()
            except TimeoutError:
                what = f"the body did not come within {self._body_s:g} s"
                raise HTTPException(408, what) from None
            whole = not event.get("more_body", False)
            return event

        async def flowing(message: Message) -> None:
            nonlocal sending_since_s
            sending_since_s = loop.time()
            await send(message)
            sending_since_s = inf

        def look() -> None:
            """Now and then: a timer for each message would cost more than the message."""
            nonlocal timer, stalled
            if loop.time() - sending_since_s >= self._stall_s:
                stalled = task.cancel()
            else:
                timer = loop.call_later(self._stall_s, look)

        timer = loop.call_later(self._stall_s, look)
        try:
            await self._app(scope, timely, flowing)
        except BaseException:
            if not stalled:
                raise
            task.uncancel()
            _LOG.warning("%s: the client does not read", scope.get(REQUEST_ID_KEY, ""))
        finally:
            timer.cancel()

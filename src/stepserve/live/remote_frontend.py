"""A gateway's view of a global scheduler in another process: ``core.frontend.Frontend``.

It keeps what a new scheduler has to know of each request, and tells it when the one before is gone:
a request goes on, without a repeated or a missing token (see ``control.recovery``).
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from stepserve.core.errors import StepserveError
from stepserve.core.events import RequestCancelled
from stepserve.core.frontend import RequestEnded, RequestRejected, TokensEmitted, Update
from stepserve.core.ids import RequestId
from stepserve.core.payload import Payload, SettledToken
from stepserve.core.request import FinishReason, Request
from stepserve.metrics.control import ControlReading

from .channel import Channel
from .messages import Hello, Standing, Submit

logger = logging.getLogger(__name__)

RETRY_S = 0.02
"""How long to wait before the next attempt to reach a scheduler."""

GRACE_S = 5.0
"""For so long without a scheduler all is well: the next one is on its way."""

ACCEPTS_S = 30.0
"""For so long without a scheduler requests are still taken: the next one will have them."""


@dataclass(slots=True)
class _Open:
    """A request without an end, and what its client was given."""

    request: Request
    payload: Payload
    updates: "asyncio.Queue[Update]" = field(default_factory=asyncio.Queue)
    emitted: list[SettledToken] = field(default_factory=list)
    forwards: int = 0
    cancelled: FinishReason | None = None

    def submit(self) -> Submit:
        """What a scheduler has to know of it."""
        return Submit(
            self.request, self.payload, tuple(self.emitted), self.forwards, self.cancelled
        )


class RemoteFrontend:
    """Speaks to whatever scheduler listens at ``path``. All methods run on the event loop."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._open: dict[RequestId, _Open] = {}
        self._channel: Channel | None = None
        self._standing = Standing(False, True, 0, 0, 0.0, ControlReading())
        self._heard_s = time.monotonic()
        self._leaving = self._draining = False
        self._ended = asyncio.Event()
        self.told = asyncio.Event()  # that the cluster serves, at least once
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to connect."""
        self._task = asyncio.get_running_loop().create_task(self._keep_connected())

    async def stop(self) -> None:
        """End the connection."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._channel is not None:
            self._channel.close()

    def leave(self) -> None:
        """See ``server.Drains``."""
        self._leaving = True

    def drain(self) -> None:
        """See ``server.Drains``."""
        self._leaving = self._draining = True

    async def _keep_connected(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._ended.clear()
            try:
                _, channel = await loop.create_unix_connection(
                    lambda: Channel(self._take, self._lose), self._path
                )
            except OSError:
                await asyncio.sleep(RETRY_S)
                continue
            channel.send(Hello(tuple(row.submit() for row in self._open.values())))
            self._channel = channel
            await self._ended.wait()

    def _lose(self, channel: Channel) -> None:
        self._channel = None
        self._ended.set()
        if self._open:
            logger.warning("the scheduler is gone: %d requests wait for the next", len(self._open))

    def _take(self, channel: Channel, items: list[Any]) -> None:
        self._heard_s = time.monotonic()
        for item in items:
            if isinstance(item, Standing):
                self._standing = item
                if item.serves:
                    self.told.set()
                continue
            request_id, update = item
            row = self._open.get(request_id)
            if row is None:
                continue
            if isinstance(update, TokensEmitted):
                row.emitted += update.tokens
                row.forwards = update.forwards
            else:
                del self._open[request_id]
            row.updates.put_nowait(update)

    def now_s(self) -> float:
        """See ``Frontend.now_s``: the clock of all processes of this machine."""
        return time.monotonic()

    async def submit(self, request: Request, payload: Payload) -> AsyncIterator[Update]:
        """See ``Frontend.submit``. Closing the iterator early cancels the request."""
        if request.id in self._open:
            raise StepserveError(f"request id {request.id} is in use")
        row = self._open[request.id] = _Open(request, payload)
        if self._channel is not None:
            self._channel.send(row.submit())
        try:
            while True:
                update = await row.updates.get()
                yield update
                if isinstance(update, RequestEnded | RequestRejected):
                    return
        finally:
            self.cancel(request.id, FinishReason.CANCELLED)

    def cancel(self, request_id: RequestId, reason: FinishReason) -> None:
        """See ``Frontend.cancel``."""
        row = self._open.get(request_id)
        if row is None or row.cancelled is not None:
            return
        row.cancelled = reason
        if self._channel is not None:
            self._channel.send(RequestCancelled(request_id, reason))

    def _silent_s(self) -> float:
        return time.monotonic() - self._heard_s

    def accepts(self) -> bool:
        """See ``Frontend.accepts``."""
        serves = self._standing.serves and self._silent_s() < ACCEPTS_S
        return serves and not self._draining

    def ready(self) -> bool:
        """See ``Frontend.ready``."""
        return self._standing.serves and self._silent_s() < GRACE_S and not self._leaving

    def healthy(self) -> bool:
        """See ``Frontend.healthy``."""
        return self._standing.healthy and self._silent_s() < GRACE_S

    def running(self) -> int:
        """Requests placed on an instance."""
        return self._standing.running

    def waiting(self) -> int:
        """Accepted requests that are not placed."""
        return self._standing.waiting

    def kv_usage(self) -> float:
        """Share of all KV pages that is reserved."""
        return self._standing.kv_usage

    def control_reading(self) -> ControlReading:
        """What the control plane decided so far."""
        return self._standing.reading

"""What the gateway talks to: ``core.frontend.Frontend`` over the control loop."""

import asyncio
import logging
from collections.abc import AsyncIterator

from stepserve.core.frontend import RequestEnded, RequestRejected, Update
from stepserve.core.ids import RequestId
from stepserve.core.payload import Payload
from stepserve.core.request import FinishReason, Request

from .loop import ControlLoop
from .transport import Transport

logger = logging.getLogger(__name__)

LOOK_FOR_LOST_S = 0.05
"""Period of the search for lost instances: an upper bound on how long a loss goes unseen."""


class LiveFrontend:
    """Serves requests on a control loop whose transport hosts the instances."""

    def __init__(self, loop: ControlLoop, transport: Transport) -> None:
        self.loop = loop
        self._transport = transport
        self._watch: asyncio.Task[None] | None = None
        self._leaving = self._draining = False

    def start(self) -> None:
        """Begin to watch over the instances. Call on the asyncio thread."""
        self._watch = asyncio.get_running_loop().create_task(self._look_for_lost())

    async def stop(self) -> None:
        """Stop watching, then stop every instance after the batch it runs."""
        self.drain()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None
        await asyncio.to_thread(self._transport.close)

    def leave(self) -> None:
        """See ``server.Drains``."""
        self._leaving = True

    def drain(self) -> None:
        """See ``server.Drains``."""
        self._leaving = self._draining = True

    async def _look_for_lost(self) -> None:
        while True:
            try:
                self.loop.find_lost()
            except Exception:
                logger.exception("lost instances cannot be dealt with")
                self.loop.broken = True
            await asyncio.sleep(LOOK_FOR_LOST_S)

    def now_s(self) -> float:
        """See ``Frontend.now_s``."""
        return self.loop.now_s()

    async def submit(self, request: Request, payload: Payload) -> AsyncIterator[Update]:
        """See ``Frontend.submit``. Closing the iterator early cancels the request."""
        updates: asyncio.Queue[Update] = asyncio.Queue()
        self.loop.submit(request, payload, updates)
        try:
            while True:
                update = await updates.get()
                yield update
                if isinstance(update, RequestEnded | RequestRejected):
                    return
        finally:
            self.loop.cancel(request.id, FinishReason.CANCELLED)

    def cancel(self, request_id: RequestId, reason: FinishReason) -> None:
        """See ``Frontend.cancel``."""
        self.loop.cancel(request_id, reason)

    def serves(self) -> bool:
        """Whether there are instances. While the layout changes, requests wait in the queue."""
        status = self.loop.status()
        return bool(status.instances) or status.changing or status.recovering

    def accepts(self) -> bool:
        """See ``Frontend.accepts``."""
        return self.serves() and not self._draining

    def ready(self) -> bool:
        """See ``Frontend.ready``."""
        return self.serves() and not self._leaving

    def healthy(self) -> bool:
        """Whether losses are being looked for and no event failed to be handled."""
        return self._watch is not None and not self._watch.done() and not self.loop.broken

    def running(self) -> int:
        """Requests placed on an instance."""
        return self.loop.status().running

    def waiting(self) -> int:
        """Accepted requests that are not placed."""
        return len(self.loop.records) - self.running()

    def kv_usage(self) -> float:
        """Share of all KV pages that is reserved."""
        instances = self.loop.status().instances
        capacity = sum(i.spec.page_capacity for i in instances)
        return 1.0 - sum(i.free_pages for i in instances) / capacity if capacity else 0.0

"""Where gateways of other processes reach the control loop."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from stepserve.core.events import RequestCancelled
from stepserve.core.frontend import RequestEnded, RequestRejected, RequestReport, Update
from stepserve.core.ids import RequestId
from stepserve.core.request import FinishReason

from .channel import Channel
from .loop import ControlLoop
from .messages import Hello, Standing, Submit

logger = logging.getLogger(__name__)

STANDING_S = 0.1
"""How often gateways are told of the cluster."""


class Outbox:
    """Where a record puts its updates: on the way to the gateway that has the request."""

    def __init__(self, port: "GatewayPort", channel: Channel, request_id: RequestId) -> None:
        self._port, self._channel, self._request_id = port, channel, request_id

    def put_nowait(self, update: Update) -> None:
        """Send an update; after the last one the request is nobody's."""
        self._channel.send((self._request_id, update))
        if isinstance(update, RequestEnded | RequestRejected):
            self._port.forget(self._channel, self._request_id)


class GatewayPort:
    """The gateways of a control loop. All methods run on its event loop.

    Until ``open``, what gateways say waits: a new scheduler first hears of the requests they have.
    """

    def __init__(self, loop: ControlLoop, standing: Callable[[], Standing]) -> None:
        self._loop, self._standing = loop, standing
        self._requests: dict[Channel, set[RequestId]] = {}
        self._waiting: list[tuple[Channel, Submit | RequestCancelled]] = []
        self._found: list[tuple[Channel, Submit]] = []
        self._opened = False
        self._server: asyncio.AbstractServer | None = None
        self._telling: asyncio.Task[None] | None = None

    async def listen(self, path: str) -> None:
        """Let gateways connect."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: Channel(self._take, self._lose), path, backlog=1024
        )
        self._telling = loop.create_task(self._keep_telling())

    @property
    def gateways(self) -> int:
        """How many have said what they have."""
        return len(self._requests)

    @property
    def found(self) -> list[tuple[Submit, Outbox]]:
        """Requests that gateways had before ``open``, and where their updates go."""
        return [(one, Outbox(self, c, one.request.id)) for c, one in self._found]

    def open(self) -> None:
        """Begin to carry out what gateways say."""
        self._opened = True
        waiting, self._waiting = self._waiting, []
        for channel, item in waiting:
            self._carry_out(channel, item)

    async def close(self) -> None:
        """End all connections."""
        if self._telling is not None:
            self._telling.cancel()
        if self._server is not None:
            self._server.close()
        for channel in list(self._requests):
            channel.close()

    def tell(self) -> None:
        """Tell all gateways of the cluster."""
        if self._requests:
            standing = self._standing()
            for channel in self._requests:
                channel.send(standing)

    async def _keep_telling(self) -> None:
        while True:
            self.tell()
            await asyncio.sleep(STANDING_S)

    def _take(self, channel: Channel, items: list[Any]) -> None:
        for item in items:
            match item:
                case Hello(requests):
                    self._requests[channel] = {one.request.id for one in requests}
                    channel.send(self._standing())
                    if self._opened:  # too late for the take-over: as if it were new
                        for one in requests:
                            self._carry_out(channel, one)
                    else:
                        self._found += [(channel, one) for one in requests]
                case _ if self._opened:
                    self._carry_out(channel, item)
                case _:
                    self._waiting.append((channel, item))

    def _carry_out(self, channel: Channel, item: Submit | RequestCancelled) -> None:
        if channel not in self._requests:
            return  # gone while this waited
        match item:
            case Submit():
                self._submit(channel, item)
            case RequestCancelled(request_id, reason):
                self._loop.cancel(request_id, reason)

    def _submit(self, channel: Channel, item: Submit) -> None:
        request_id = item.request.id
        self._requests[channel].add(request_id)
        outbox = Outbox(self, channel, request_id)
        if item.emitted:
            _fail(outbox, "the scheduler was replaced, and did not hear of this request in time")
            return
        try:
            self._loop.submit(item.request, item.payload, outbox)
        except Exception:
            logger.exception("request %s cannot be taken", request_id)
            _fail(outbox, "the scheduler failed on this request")
        if item.cancelled is not None:
            self._loop.cancel(request_id, item.cancelled)

    def _lose(self, channel: Channel) -> None:
        """A gateway is gone, and with it who waits for its requests."""
        requests = self._requests.pop(channel, set())
        self._found = [row for row in self._found if row[0] is not channel]
        if requests:
            logger.warning("a gateway is gone: %d requests end", len(requests))
        for request_id in list(requests):
            self._loop.cancel(request_id, FinishReason.CANCELLED)

    def forget(self, channel: Channel, request_id: RequestId) -> None:
        """The request is over."""
        self._requests.get(channel, set()).discard(request_id)


def _fail(outbox: Outbox, error: str) -> None:
    outbox.put_nowait(RequestEnded(FinishReason.ERROR, RequestReport(), error))

"""A connection between two event loops of one machine: values in order, many in one message.

What is said within one turn of the event loop is one message: a batch of an engine is one, however
many requests were in it. Both ends are processes of one server, behind a socket that only its
user can open: values are pickled.
"""

import asyncio
import logging
import pickle
import struct
from collections.abc import Callable
from typing import Any, cast

from .wire import packed

logger = logging.getLogger(__name__)

BACKLOG_BYTES = 64 << 20
"""An end that has not read so much does not read: the connection is given up."""

_SIZE = struct.Struct("!I")


class Channel(asyncio.Protocol):
    """One end. ``take`` is called with the values of a message, ``ended`` once, on the loop."""

    def __init__(
        self,
        take: Callable[["Channel", list[Any]], None],
        ended: Callable[["Channel"], None],
    ) -> None:
        self._take, self._ended = take, ended
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._came = bytearray()
        self._queue: list[Any] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        came = self._came
        came += data
        while len(came) >= _SIZE.size:
            end = _SIZE.size + _SIZE.unpack_from(came)[0]
            if len(came) < end:
                return
            items = pickle.loads(memoryview(came)[_SIZE.size : end].tobytes())
            del came[:end]
            self._take(self, items)

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        self._transport = None
        self._ended(self)

    def send(self, item: object) -> None:
        """Say something, with all else that is said in this turn. Vanishes after the end."""
        self._queue.append(item)
        if len(self._queue) == 1:
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        items, self._queue = self._queue, []
        if self._transport is None:
            return
        data = packed(items)
        self._transport.write(_SIZE.pack(len(data)) + data)
        if self._transport.get_write_buffer_size() > BACKLOG_BYTES:
            logger.error("the other end does not read")
            self._transport.abort()

    def close(self) -> None:
        """End the connection, once what was said is written."""
        if self._queue:
            self._flush()
        if self._transport is not None:
            self._transport.close()

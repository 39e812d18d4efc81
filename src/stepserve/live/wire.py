"""One connection to another process: numbered messages in both directions.

What is queued while a message is being written goes with the next one, as one pickle. The
numbers leave nothing to trust in the carrier: a message that comes twice is dropped, one that
overtook others waits for them, and a gap that stays is for the owner to judge.
"""

import contextlib
import dataclasses
import io
import itertools
import logging
import pickle
import queue
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol

logger = logging.getLogger(__name__)

BEAT_S = 1.0
"""After so long without anything to say, an empty message shows that this end lives."""

CLOCK_READINGS = 8

LOOK_S = 0.1
"""How often a receiver looks whether its own end has been closed."""


class Carrier(Protocol):
    """What ``Link`` needs of a ``multiprocessing.connection.Connection``."""

    def send_bytes(self, data: bytes, /) -> None:
        """Send a message."""
        ...

    def recv_bytes(self) -> bytes:
        """The next message. Raises EOFError at the end."""
        ...

    def poll(self, timeout: float, /) -> bool:
        """Whether there is a message, or the end, within ``timeout`` seconds."""
        ...

    def close(self) -> None:
        """End the connection."""
        ...


class _Reducers(dict[type, Callable[[Any], tuple[Any, ...]]]):
    """How values are taken apart: to their fields. Python's own way is four times as slow."""

    def __missing__(self, cls: type) -> Callable[[Any], tuple[Any, ...]]:
        if hasattr(cls, "_fields"):  # a named tuple
            self[cls] = lambda value: (cls, tuple(value))
        elif dataclasses.is_dataclass(cls) and "__slots__" in vars(cls):
            names = [field.name for field in dataclasses.fields(cls)]
            self[cls] = lambda value: (cls, tuple([getattr(value, name) for name in names]))
        else:
            raise KeyError(cls)
        return self[cls]


class _Pickler(pickle.Pickler):
    dispatch_table = _Reducers()


def packed(message: object) -> bytes:
    """A pickle of it; dataclasses with slots are made anew by calling them."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(message)
    return buffer.getvalue()


class Sequencer:
    """Puts numbered messages back into the order they were sent in."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, Any] = {}

    def take(self, number: int, message: Any) -> list[Any]:
        """What is in turn now: nothing for a repeated message or one after a gap."""
        if number < self._next:
            return []
        self._early[number] = message
        ready = []
        while self._next in self._early:
            ready.append(self._early.pop(self._next))
            self._next += 1
        return ready

    @property
    def has_gap(self) -> bool:
        """Whether a message is missing that a later one overtook."""
        return bool(self._early)


class Link:
    """One end of a connection. ``send`` from any thread; ``take`` is called on that of ``run``."""

    def __init__(self, carrier: Carrier, take: Callable[[Any], None], name: str) -> None:
        self._carrier = carrier
        self._take = take
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._sequencer = Sequencer()
        self._sender = threading.Thread(target=self._send_all, name=f"{name}.send", daemon=True)
        self._ended = threading.Event()
        self._heard_s = time.monotonic()
        self._complete_s = self._heard_s  # when the last message came that left no gap

    def send(self, item: Any) -> None:
        """Queue something for the other end; at the end of the connection it vanishes."""
        self._queue.put(item)

    def run(self) -> None:
        """Receive until either end closes the connection."""
        self._sender.start()
        try:
            while not self._ended.is_set():
                if self._carrier.poll(LOOK_S):
                    self._receive()
        except (EOFError, OSError):
            logger.debug("%s: the other end is gone", self._sender.name)
        finally:
            self.close()
            self._sender.join()
            self._carrier.close()

    def _receive(self) -> None:
        number, items = pickle.loads(self._carrier.recv_bytes())
        in_turn = self._sequencer.take(number, items)
        self._heard_s = time.monotonic()
        if not self._sequencer.has_gap:
            self._complete_s = self._heard_s
        for message in in_turn:
            for item in message:
                self._take(item)

    def _send_all(self) -> None:
        try:
            for number in itertools.count():
                items = self._queued()
                ends = any(item is None for item in items)
                message = number, [item for item in items if item is not None]
                self._carrier.send_bytes(packed(message))
                if ends:
                    break
        except OSError:
            logger.debug("%s: the other end is gone", self._sender.name)
        except Exception:
            logger.exception("%s: cannot send", self._sender.name)
        finally:
            self._ended.set()

    def _queued(self) -> list[Any]:
        """Everything queued; waits for the first of it, but not for longer than a beat."""
        items = []
        with contextlib.suppress(queue.Empty):
            items.append(self._queue.get(timeout=BEAT_S))
            while True:
                items.append(self._queue.get_nowait())
        return items

    def is_broken(self, hang_s: float) -> bool:
        """Whether for ``hang_s``, and a beat, nothing was heard or something has been missing."""
        since_s = self._complete_s if self._sequencer.has_gap else self._heard_s
        return time.monotonic() - since_s > hang_s + BEAT_S

    def close(self) -> None:
        """End the connection once what is queued has been sent."""
        self._queue.put(None)


def set_clock(carrier: Connection) -> None:
    """Tell the other end how far its clock is behind this one: to half a round trip."""
    offsets = []
    for _ in range(CLOCK_READINGS):
        asked_s = time.monotonic()
        carrier.send(None)
        theirs_s = carrier.recv()
        heard_s = time.monotonic()
        offsets.append((heard_s - asked_s, (asked_s + heard_s) / 2 - theirs_s))
    carrier.send(min(offsets)[1])


def take_clock(carrier: Connection) -> float:
    """What ``set_clock`` tells: seconds to add to this process's monotonic clock."""
    while (offset_s := carrier.recv()) is None:
        carrier.send(time.monotonic())
    return float(offset_s)

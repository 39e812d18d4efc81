"""How the control loop's process and an instance's come to be connected, and nobody else.

Whoever connects must know a word within a time limit, each on a thread of its own: who hangs
up, talks nonsense or stays silent keeps nobody else waiting.
"""

import contextlib
import logging
import queue
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from .wire import LOOK_S, set_clock, take_clock

logger = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
"""For how long one end waits for each word of the other, until they know each other."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where an instance waits for the control loop, and the word that opens."""

    host: str
    port: int
    key: bytes = field(repr=False)


class Listener:
    """The instance's side of a ``Address``; it lets one in."""

    def __init__(self, host: str) -> None:
        """``host``: the address to listen on."""
        self._listener = socket.create_server((host, 0))
        self.address = Address(host, self._listener.getsockname()[1], secrets.token_bytes(32))
        self._came: queue.SimpleQueue[tuple[Connection, float]] = queue.SimpleQueue()

    def wait(self) -> tuple[Connection, float]:
        """The first who knows the word, and seconds from this clock to theirs (``take_clock``)."""
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError as error:  # ended by ``_ask``; or there are too many open files
                try:
                    return self._came.get(timeout=LOOK_S)
                except queue.Empty:
                    logger.warning("nobody can come in: %s", error)
            else:
                carrier = Connection(link.detach())
                threading.Thread(target=self._ask, args=(carrier,), daemon=True).start()

    def _ask(self, carrier: Connection) -> None:
        try:
            with _in_bounded_time(carrier):
                deliver_challenge(carrier, self.address.key)
                answer_challenge(carrier, self.address.key)
                offset_s = take_clock(carrier)
        except Exception as error:  # whatever a stranger brings about
            logger.warning("somebody else was at the address: %r", error)
            return
        self._came.put((carrier, offset_s))
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends ``accept``, as ``close`` would not

    def close(self) -> None:
        """Nobody else can connect any more."""
        self._listener.close()


def connect(address: Address) -> Connection:
    """Connect to a ``RemoteInstance``. Raises what stands in the way, in bounded time."""
    link = socket.create_connection((address.host, address.port), timeout=HANDSHAKE_S)
    link.settimeout(None)
    carrier = Connection(link.detach())
    with _in_bounded_time(carrier):
        answer_challenge(carrier, address.key)
        deliver_challenge(carrier, address.key)
        set_clock(carrier)
    return carrier


@contextlib.contextmanager
def _in_bounded_time(carrier: Connection) -> Iterator[None]:
    """Within, silence raises OSError after ``HANDSHAKE_S``; whatever is raised closes."""
    try:
        _prepare(carrier, HANDSHAKE_S)
        yield
        _prepare(carrier, 0.0)
    except BaseException:
        carrier.close()
        raise


def _prepare(carrier: Connection, silence_s: float) -> None:
    """Small messages go at once; reading ends after ``silence_s`` (0: never)."""
    limit = struct.pack("ll", int(silence_s), int(silence_s % 1 * 1e6))
    with socket.socket(fileno=carrier.fileno()) as held:
        held.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        held.detach()

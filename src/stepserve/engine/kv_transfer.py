"""Moves chunks of keys and values between instances (DynaServe 3.7).

One interface, three backends: within a process, through shared memory, over TCP. Every
instance has one end, owned by one thread. Nothing here waits or starts threads: bytes move
while the two ends are in ``write`` and ``poll``. Nor is anything verified or sent again here:
chunks come out as they arrived, ``KvPages.import_kv`` says by their checksums whether they are
intact, and what never arrives is computed anew by the receiver. NIXL is not served yet.
"""

import contextlib
import logging
import mmap
import os
import secrets
import socket
from abc import ABC, abstractmethod
from collections import deque
from functools import partial
from hashlib import blake2s
from multiprocessing import shared_memory
from pathlib import Path

from torch import Tensor

from stepserve.core.errors import CapacityError
from stepserve.core.ids import RequestId
from stepserve.core.payload import KvChunk
from stepserve.engine.kv_frames import Inbox, Key, Outbox, Ring

_CONNECT_S = 0.5
_SECRET_BYTES = 16

logger = logging.getLogger(__name__)


class KvTransport(ABC):
    """One instance's end of the links to its peers."""

    def __init__(self) -> None:
        self._room: dict[Key, int] = {}
        self._landed: deque[KvChunk] = deque()

    @abstractmethod
    def register(self) -> str:
        """Become reachable; returns the address that peers write to. Called first, once."""

    def reserve(self, request_id: RequestId, epoch: int, size_bytes: int) -> None:
        """Take the chunks of a hand-over, none above ``size_bytes``; others are dropped.

        Raises CapacityError without room for them.
        """
        self._room[request_id, epoch] = size_bytes

    @abstractmethod
    def write(self, address: str, chunk: KvChunk) -> None:
        """Send a chunk. A peer that is gone or did not reserve is the receiver's to notice."""

    def poll(self) -> list[KvChunk]:
        """Move what can be moved now; returns what has landed, each chunk once.

        Chunks of one hand-over land in the order they were written. One that was cut off by
        the end of its link has ``data`` None.
        """
        self._move()
        landed = [self._landed.popleft() for _ in range(len(self._landed))]
        return [chunk for chunk in landed if (chunk.request_id, chunk.epoch) in self._room]

    def abort(self, request_id: RequestId, epoch: int) -> None:
        """Forget a hand-over, given up or done: its room, and chunks on their way here or out."""
        self._room.pop((request_id, epoch), None)
        self._drop((request_id, epoch))

    def close(self) -> None:
        """Forget everything and be reachable no longer."""
        for key in list(self._room):
            self.abort(*key)
        self._landed.clear()

    def _move(self) -> None:  # noqa: B027  (a backend may have nothing to move)
        """Move bytes, without waiting."""

    def _drop(self, key: Key) -> None:  # noqa: B027  (nor to free)
        """Free what links hold of a hand-over."""


class InProcess(KvTransport):
    """Between threads of one process: the very tensor. All ends share one ``peers``."""

    def __init__(self, peers: dict[str, "InProcess"]) -> None:
        super().__init__()
        self._peers = peers
        self._address = ""

    def register(self) -> str:
        """The address means something among ``peers`` alone."""
        self._address = secrets.token_hex(8)
        self._peers[self._address] = self
        return self._address

    def write(self, address: str, chunk: KvChunk) -> None:
        """It has landed on return."""
        assert isinstance(chunk.data, Tensor)
        peer, key = self._peers.get(address), (chunk.request_id, chunk.epoch)
        if peer is not None and chunk.data.nbytes <= peer._room.get(key, 0):
            peer._landed.append(chunk)

    def close(self) -> None:
        """Leave ``peers``."""
        self._peers.pop(self._address, None)
        super().close()


class SharedMemory(KvTransport):
    """Between processes of one machine: a ring of bytes per hand-over.

    The receiver makes it and removes it; if its process is killed, Python's resource tracker
    does, or, if that is killed with it, the next one to ``register``. Senders map its file
    (Linux), as a second ``SharedMemory`` object would take the ring for its own before Python
    3.13 and remove it with the sender's process.
    """

    def __init__(self, ring_bytes: int = 1 << 20) -> None:
        super().__init__()
        self._ring_bytes = ring_bytes
        self._address = ""
        self._incoming: dict[Key, tuple[shared_memory.SharedMemory, Ring, Inbox]] = {}
        self._outgoing: dict[Key, tuple[mmap.mmap, Ring, Outbox]] = {}

    def register(self) -> str:
        """The address begins the names of the rings. Removes rings of processes that are gone."""
        for path in Path("/dev/shm").glob("stepserve-*-*-*"):
            if not Path(f"/proc/{path.name.split('-')[1]}").exists():
                path.unlink(missing_ok=True)
        self._address = f"stepserve-{os.getpid()}-{secrets.token_hex(4)}"
        return self._address

    def reserve(self, request_id: RequestId, epoch: int, size_bytes: int) -> None:
        """Make the ring: before the sender hears of the reservation."""
        name = _ring_name(self._address, (request_id, epoch))
        size = Ring.COUNTS + self._ring_bytes
        segment = shared_memory.SharedMemory(name, create=True, size=size)
        try:  # an access to memory that is not there would kill the process
            with open(f"/dev/shm/{name}", "r+b") as file:
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            segment.close()
            segment.unlink()
            raise CapacityError(f"no shared memory for {request_id}: {error}") from error
        super().reserve(request_id, epoch, size_bytes)
        memory, inbox = segment.buf, Inbox(self._room, self._landed)
        assert memory is not None
        self._incoming[request_id, epoch] = segment, Ring(memory), inbox

    def write(self, address: str, chunk: KvChunk) -> None:
        """A ring that is full takes the rest when it is polled."""
        key = (chunk.request_id, chunk.epoch)
        if key not in self._outgoing:
            try:
                file = os.open(f"/dev/shm/{_ring_name(address, key)}", os.O_RDWR)
            except FileNotFoundError:
                return
            mapped = mmap.mmap(file, 0)
            os.close(file)
            self._outgoing[key] = mapped, Ring(memoryview(mapped)), Outbox()
        _, ring, outbox = self._outgoing[key]
        outbox.add(chunk)
        outbox.pump(ring.send)

    def _move(self) -> None:
        for key, (_, ring, outbox) in list(self._outgoing.items()):
            outbox.pump(ring.send)
            if ring.ended:
                self._detach(key)
        for _, ring, inbox in self._incoming.values():
            ended = ring.ended  # before the last look: nothing is written after it
            with contextlib.suppress(ConnectionError):
                inbox.pump(ring.receive)
            if ended:
                inbox.end()

    def _detach(self, key: Key) -> None:
        mapped, ring, _ = self._outgoing.pop(key)
        ring.leave()
        mapped.close()

    def _drop(self, key: Key) -> None:
        if key in self._outgoing:
            self._detach(key)
        if key in self._incoming:
            segment, ring, _ = self._incoming.pop(key)
            ring.leave()
            segment.close()
            segment.unlink()

    def close(self) -> None:
        """Remove all rings made here."""
        for key in list(self._outgoing):
            self._detach(key)
        super().close()


def _ring_name(address: str, key: Key) -> str:
    """What sender and receiver call the ring of a hand-over."""
    return f"{address}-{blake2s(repr(key).encode(), digest_size=8).hexdigest()}"


class Tcp(KvTransport):
    """Between machines: one connection per pair and direction. Nothing is encrypted.

    A connection begins with a secret of the receiver, which its address contains.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        """``host``: the interface to listen on, by the name that peers reach it under."""
        super().__init__()
        self._host = host
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._listener: socket.socket | None = None
        self._incoming: list[tuple[socket.socket, Inbox]] = []
        self._outgoing: dict[str, tuple[socket.socket, Outbox]] = {}

    def register(self) -> str:
        """Listen at a free port; the address is ``secret@host:port``."""
        self._listener = socket.create_server((self._host, 0))
        self._listener.setblocking(False)
        return f"{self._secret.hex()}@{self._host}:{self._listener.getsockname()[1]}"

    def write(self, address: str, chunk: KvChunk) -> None:
        """The first one to an address connects, for half a second at most."""
        if address not in self._outgoing:
            secret, _, place = address.partition("@")
            host, _, port = place.rpartition(":")
            try:
                link = socket.create_connection((host, int(port)), timeout=_CONNECT_S)
            except OSError:
                return
            try:
                link.sendall(bytes.fromhex(secret))
            except OSError:
                link.close()
                return
            link.setblocking(False)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._outgoing[address] = link, Outbox()
        self._outgoing[address][1].add(chunk)
        self._flush(address)

    def _flush(self, address: str) -> None:
        link, outbox = self._outgoing[address]
        try:
            outbox.pump(partial(_send, link))
        except OSError:
            link.close()
            del self._outgoing[address]

    def _move(self) -> None:
        for address in list(self._outgoing):
            self._flush(address)
        with contextlib.suppress(OSError):  # nobody is there, or too many files are open
            while self._listener is not None:
                link, _ = self._listener.accept()
                link.setblocking(False)
                self._incoming.append((link, Inbox(self._room, self._landed, self._secret)))
        for link, inbox in list(self._incoming):
            try:
                inbox.pump(partial(_receive, link))
            except Exception as error:  # whatever a stranger brings about ends with it
                logger.debug("a link of keys and values ends: %r", error)
                inbox.end()
                link.close()
                self._incoming.remove((link, inbox))

    def _drop(self, key: Key) -> None:
        for _, outbox in self._outgoing.values():
            outbox.drop(key)

    def close(self) -> None:
        """Cut all connections."""
        for link, _ in [*self._incoming, *self._outgoing.values()]:
            link.close()
        self._incoming.clear()
        self._outgoing.clear()
        if self._listener is not None:
            self._listener.close()
        super().close()


def _send(link: socket.socket, source: memoryview) -> int:
    try:
        return link.send(source)
    except BlockingIOError:
        return 0


def _receive(link: socket.socket, target: memoryview) -> int:
    try:
        count = link.recv_into(target)
    except BlockingIOError:
        return 0
    if count == 0:
        raise ConnectionError("closed")
    return count

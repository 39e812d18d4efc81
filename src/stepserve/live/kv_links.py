"""Keys and values between instances in different processes.

Messages of a hand-over go by way of the control loop; its bytes go from one instance to the
other: through shared memory on one node, over TCP between nodes. The receiver makes room when
it says that it is prepared, and lets go when it has begun; the sender when its segment ends.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from stepserve.core.errors import CapacityError
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.payload import KvChunk
from stepserve.engine.kv_frames import Key
from stepserve.engine.kv_transfer import KvTransport, SharedMemory, Tcp

logger = logging.getLogger(__name__)

MOVE_S = 0.001
"""How often bytes are moved while a hand-over is under way."""


@dataclass(frozen=True, slots=True)
class KvAddress:
    """Where an instance takes chunks: its node, and its ends of both transports.

    ``tcp`` contains a secret; it is empty where keys and values are never handed over.
    """

    node: str
    memory: str
    tcp: str = field(repr=False)


class KvLinks:
    """One instance's links to all others, and the thread that moves bytes while it computes."""

    def __init__(self, node: str, host: str, landed: Callable[[KvChunk], None]) -> None:
        """``host``: this node's address among the nodes; empty: nothing listens there.

        ``landed`` is called on the thread.
        """
        self._memory, self._tcp = SharedMemory(), Tcp(host)
        tcp = self._tcp.register() if host else ""
        self.address = KvAddress(node, self._memory.register(), tcp)
        self.peers: Mapping[InstanceId, KvAddress] = {}
        self._landed = landed
        self._lock = threading.Lock()
        self._open: dict[Key, KvTransport] = {}
        self._any_open = threading.Event()
        self._closed = threading.Event()
        self._mover = threading.Thread(target=self._move, name="kv", daemon=True)
        self._mover.start()

    def _to(self, peer: InstanceId) -> tuple[KvTransport, str] | None:
        address = self.peers.get(peer)
        if address is None:
            return None
        if address.node == self.address.node:
            return self._memory, address.memory
        return self._tcp, address.tcp

    def prepare(self, source: InstanceId, request_id: RequestId, epoch: int, most: int) -> None:
        """Make room for a hand-over from ``source``, of at most ``most`` bytes a chunk.

        Without room its chunks are lost, and computed anew.
        """
        link = self._to(source)
        if link is None:
            return
        with self._lock:
            try:
                link[0].reserve(request_id, epoch, most)
            except CapacityError as error:
                logger.warning("%s is computed anew: %s", request_id, error)
                return
            self._note(request_id, epoch, link[0])

    def push(self, to: InstanceId, chunk: KvChunk) -> None:
        """Send a chunk. The first one to another node may wait half a second for a connection."""
        link = self._to(to)
        if link is None:
            return
        with self._lock:
            link[0].write(link[1], chunk)
            self._note(chunk.request_id, chunk.epoch, link[0])

    def _note(self, request_id: RequestId, epoch: int, transport: KvTransport) -> None:
        self._open[request_id, epoch] = transport
        self._any_open.set()

    def forget(self, request_id: RequestId, epoch: int) -> None:
        """Hand-overs of a request up to an epoch are done or given up."""
        with self._lock:
            done = [key for key in self._open if key[0] == request_id and key[1] <= epoch]
            for key in done:
                self._open.pop(key).abort(*key)
            if not self._open:
                self._any_open.clear()

    def _move(self) -> None:
        while not self._closed.wait(MOVE_S):
            self._any_open.wait()
            with self._lock:
                chunks = self._memory.poll() + self._tcp.poll()
            for chunk in chunks:
                self._landed(chunk)

    def close(self) -> None:
        """Remove what is shared; nothing lands any more."""
        self._closed.set()
        self._any_open.set()
        self._mover.join()
        self._memory.close()
        self._tcp.close()

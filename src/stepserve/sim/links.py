"""The network between instances, as chunks of keys and values see it.

Source: DynaServe 2.3 (one 200 Gbps card per instance: 25 GB/s) and DynaServe 3.7. Every instance
has one card that sends and receives at full rate at once. Chunks between two instances go one after
the other, in the order of their sending; those of different pairs share the cards.

Deviations from a real network: a transfer gets the equal share of the busier of its two cards,
so a share that another transfer cannot use is lost (max-min fairness would pass it on); rates
change at once when a transfer begins or ends; messages between schedulers are so small that
they neither wait for chunks nor slow them down.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from stepserve.core.errors import FieldError
from stepserve.core.ids import InstanceId

T = TypeVar("T")
Pair = tuple[InstanceId, InstanceId]


@dataclass(slots=True)
class _Transfer(Generic[T]):
    """What one instance sends to another: the chunk on its way and those behind it."""

    item: T
    left_bytes: float
    since_s: float  # when the rate was set
    bytes_per_s: float = 0.0
    ends_s: float = math.inf
    behind: deque[tuple[float, T]] = field(default_factory=deque)


class Links(Generic[T]):
    """Chunks under way. Its owner pushes, and asks at ``next_s`` what has arrived."""

    def __init__(self, bytes_per_s: float = 25e9, rtt_s: float = 50e-6) -> None:
        """``bytes_per_s``: of each card, each way. ``rtt_s``: from the last byte sent until the
        receiver knows. Raises FieldError for numbers that make no sense.
        """
        if not 0.0 < bytes_per_s < math.inf:
            raise FieldError("links.bytes_per_s", "must be positive and finite")
        if not 0.0 <= rtt_s < math.inf:
            raise FieldError("links.rtt_s", "must be finite and not negative")
        self.bytes_per_s = bytes_per_s
        self.rtt_s = rtt_s
        self._transfers: dict[Pair, _Transfer[T]] = {}

    @property
    def next_s(self) -> float:
        """When the next chunk has been sent, if nothing changes; infinite if none is under way."""
        return min((t.ends_s for t in self._transfers.values()), default=math.inf)

    def push(
        self, now_s: float, source: InstanceId, target: InstanceId, size_bytes: float, item: T
    ) -> None:
        """Send a chunk; ``take`` returns its ``item`` once it is through."""
        transfer = self._transfers.get((source, target))
        if transfer is not None:
            transfer.behind.append((size_bytes, item))
            return
        self._transfers[source, target] = _Transfer(item, size_bytes, now_s)
        self._share(now_s)

    def take(self, now_s: float) -> list[T]:
        """The chunks that are through by now and were not taken yet, the oldest pair first."""
        taken: list[T] = []
        for pair, transfer in list(self._transfers.items()):
            if transfer.ends_s > now_s:
                continue
            taken.append(transfer.item)
            if transfer.behind:
                transfer.left_bytes, transfer.item = transfer.behind.popleft()
                transfer.since_s = now_s
                transfer.ends_s = now_s + transfer.left_bytes / transfer.bytes_per_s
            else:
                del self._transfers[pair]
        self._share(now_s)
        return taken

    def drop(self, now_s: float, instance: InstanceId) -> int:
        """Forget what is under way from and to an instance; how many chunks that were."""
        gone = [pair for pair in self._transfers if instance in pair]
        chunks = sum(1 + len(self._transfers.pop(pair).behind) for pair in gone)
        self._share(now_s)
        return chunks

    def _share(self, now_s: float) -> None:
        """Give every transfer the rate it has now that one has begun or ended."""
        sends: dict[InstanceId, int] = {}
        receives: dict[InstanceId, int] = {}
        for source, target in self._transfers:
            sends[source] = sends.get(source, 0) + 1
            receives[target] = receives.get(target, 0) + 1
        for (source, target), transfer in self._transfers.items():
            bytes_per_s = self.bytes_per_s / max(sends[source], receives[target])
            if bytes_per_s != transfer.bytes_per_s:  # else its end stays exactly what it was
                sent = transfer.bytes_per_s * (now_s - transfer.since_s)
                transfer.left_bytes = max(0.0, transfer.left_bytes - sent)
                transfer.since_s, transfer.bytes_per_s = now_s, bytes_per_s
                transfer.ends_s = now_s + transfer.left_bytes / bytes_per_s

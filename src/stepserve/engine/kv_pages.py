"""The pool of key/value pages of one instance. A page belongs to one request or to nobody."""

import zlib
from itertools import pairwise

import torch
from torch import Tensor

from stepserve.core.errors import CapacityError
from stepserve.engine.models.transformer import ModelConfig


class PagePool:
    """Keys and values of all layers, in pages of ``page_tokens`` positions.

    ``kv`` is ``[layers, slots, 2, kv_heads, head_dim]``: the key and the value of a slot lie
    side by side, so one gather reads both. Page ``p`` owns the slots from ``p * page_tokens``
    on. Memory is not cleared: whoever gets a page writes before reading. One more page, number
    ``capacity``, is never given to anybody: padding reads and writes there (``graphs``).
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        page_tokens: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.page_tokens = page_tokens
        self.capacity = capacity
        slots = (capacity + 1) * page_tokens
        self.kv = torch.empty(
            (config.layers, slots, 2, config.kv_heads, config.head_dim), device=device, dtype=dtype
        )
        self.kv[:, capacity * page_tokens :] = 0.0
        self._free = list(range(capacity))

    @property
    def free(self) -> int:
        """Pages that belong to nobody; ``free + used == capacity`` always."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages that belong to a request."""
        return self.capacity - len(self._free)

    def allocate(self, tokens: int) -> list[int]:
        """Take the pages that hold ``tokens`` positions, or raise CapacityError and take none."""
        count = -(-tokens // self.page_tokens)
        if count > self.free:
            raise CapacityError(f"{count} pages needed, {self.free} of {self.capacity} free")
        taken = self._free[self.free - count :]
        del self._free[self.free - count :]
        return taken

    def release(self, pages: list[int]) -> None:
        """Give pages back."""
        self._free.extend(pages)

    def slots(self, pages: list[int], tokens: int) -> Tensor:
        """Slot of each of the first ``tokens`` positions kept in ``pages``: int64 ``[tokens]``."""
        numbers = torch.tensor(pages, dtype=torch.int64).to(self.kv.device, non_blocking=True)
        first = numbers[:, None] * self.page_tokens
        within = torch.arange(self.page_tokens, device=self.kv.device)
        return (first + within).flatten()[:tokens]


def checksums(kv: Tensor, start: int, page_tokens: int) -> tuple[int, ...]:
    """CRC-32 of what each page holds of ``kv``: the positions from ``start`` on.

    ``kv`` is ``[layers, n, 2, kv_heads, head_dim]``; the layers of a page follow each other.
    The position is the initial value, so pages that change places show as well.
    """
    layers, tokens = kv.shape[:2]
    rows = kv.cpu().contiguous().view(layers, -1).view(torch.uint8).numpy()
    token_bytes = rows.shape[1] // tokens
    edges = [*range(-(start % page_tokens), tokens, page_tokens), tokens]
    edges[0] = 0
    sums = []
    for begin, end in pairwise(edges):
        crc = start + begin
        for layer in rows:
            crc = zlib.crc32(layer[begin * token_bytes : end * token_bytes], crc)
        sums.append(crc)
    return tuple(sums)

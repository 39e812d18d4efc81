"""Forward passes over cached keys and values, captured once per size and replayed.

A step of few tokens takes a GPU less time than the host needs to launch its thousand kernels. A
CUDA graph launches them all at once, but with shapes and addresses of its own. So rows and
contexts are padded up to a bucket, and everything that differs from step to step lies in one
table of integers, from which the captured pass works out the rest. Padded rows and queries
read and write the spare page of the pool, which nobody owns.

Without CUDA the same code runs over the same table, uncaptured: that is what the tests compare.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stepserve.engine.attention import Group, PackedAttention
from stepserve.engine.kv_pages import PagePool
from stepserve.engine.models.transformer import DecoderModel

MOST_GRAPHS = 96
"""Graphs of one executor."""

IDLE_PASSES = 1000
"""Passes without a graph's bucket before another may take its place. Capturing costs several
passes: buckets in turns, more than there is room for, must not capture each other away."""

LEAST_CONTEXT = 64
PADDING = 3
"""A bucket may hold so many times the tokens, or positions of context, that a batch has ..."""

FREE_CONTEXT = 4096
"""... or up to so many positions of context, and a sixteenth of that in tokens."""

_PAD = -1
"""Position of a padded query."""

_capturing = threading.Lock()
logger = logging.getLogger(__name__)


class CachedRow(NamedTuple):
    """A row that executes ``token_ids`` at positions from ``first`` on.

    It attends over its first ``context`` positions, whose keys and values lie in ``pages``.
    """

    token_ids: Sequence[int]
    first: int
    pages: Sequence[int]
    context: int


class Bucket(NamedTuple):
    """Sizes of a captured pass: rows, tokens that each executes, pages that each reads."""

    rows: int
    queries: int
    pages: int


@dataclass(slots=True)
class _Captured:
    """``table`` is read by ``graph``, which writes ``hidden``; no graph, no ``hidden``.

    ``used`` is the number of the latest pass over it.
    """

    table: Tensor
    graph: torch.cuda.CUDAGraph | None = None
    hidden: Tensor | None = None
    used: int = 0


def bucketed(n: int) -> int:
    """The least of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is not below ``n``."""
    power = 1 << (n - 1).bit_length()
    return 3 * power // 4 if n <= 3 * power // 4 else power


class Replay:
    """The captured passes of one executor. Not thread-safe, as the executor is not."""

    def __init__(self, model: DecoderModel, pool: PagePool) -> None:
        self._model = model
        self._pool = pool
        self._device = pool.kv.device
        self._captured: OrderedDict[Bucket, _Captured] = OrderedDict()  # latest used last
        self._passes = 0
        self._failed = False
        if self._device.type == "cuda":
            self._memory = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @property
    def captured(self) -> int:
        """CUDA graphs held."""
        return sum(captured.graph is not None for captured in self._captured.values())

    def hidden(self, rows: Sequence[CachedRow]) -> Tensor | None:
        """Final hidden states ``[bucket.rows * queries, hidden]``; valid until the next call.

        ``queries`` is the most that a row executes; those of the i-th begin at ``i * queries``.
        ``None``, and nothing is run, for rows too unlike each other and for one bucket too many.
        """
        bucket = self._bucket(rows)
        if bucket is None:
            return None
        captured = self._pass_over(bucket)
        if captured is None:
            return None
        captured.table.copy_(self._filled(bucket, rows), non_blocking=True)
        if captured.graph is None:
            return self._forward(bucket, captured.table)
        captured.graph.replay()
        return captured.hidden

    def _pass_over(self, bucket: Bucket) -> _Captured | None:
        """The bucket's captured pass, now the latest used; made if there is room for it."""
        self._passes += 1
        captured = self._captured.get(bucket)
        if captured is None:
            if self._failed or not self._has_room():
                return None
            captured = self._prepare(bucket)
            if captured is None:
                self._failed = True
                return None
            # not before: capturing waits for the device, so the oldest does not run any more
            if len(self._captured) >= MOST_GRAPHS:
                self._captured.popitem(last=False)
            self._captured[bucket] = captured
        captured.used = self._passes
        self._captured.move_to_end(bucket)
        return captured

    def _has_room(self) -> bool:
        if len(self._captured) < MOST_GRAPHS:
            return True
        oldest = next(iter(self._captured.values()))
        return self._passes - oldest.used > IDLE_PASSES

    def _bucket(self, rows: Sequence[CachedRow]) -> Bucket | None:
        queries = max(len(row.token_ids) for row in rows)
        context = bucketed(max(LEAST_CONTEXT, *(row.context for row in rows)))
        bucket = Bucket(bucketed(len(rows)), queries, -(-context // self._pool.page_tokens))
        tokens = sum(len(row.token_ids) for row in rows)
        if bucket.rows * queries > max(FREE_CONTEXT // 16, PADDING * tokens):
            return None
        held = sum(row.context for row in rows)
        return bucket if bucket.rows * context <= max(FREE_CONTEXT, PADDING * held) else None

    def _filled(self, bucket: Bucket, rows: Sequence[CachedRow]) -> Tensor:
        """The table: int64 ``[rows, 1 + queries + queries + pages]``, on the host.

        Of each row its context, token ids, positions and pages.
        """
        spare = self._pool.capacity
        table = []
        for token_ids, first, pages, context in rows:
            blank = bucket.queries - len(token_ids)
            read = pages[: bucket.pages]
            positions = range(first, first + len(token_ids))
            table.append(
                [context, *token_ids, *[0] * blank, *positions, *[_PAD] * blank, *read]
                + [spare] * (bucket.pages - len(read))
            )
        nobody = [1, *[0] * bucket.queries, *[_PAD] * bucket.queries, *[spare] * bucket.pages]
        table += [nobody] * (bucket.rows - len(rows))
        return torch.tensor(table, dtype=torch.int64)

    def _forward(self, bucket: Bucket, table: Tensor) -> Tensor:
        """The pass over a table. No value of it is looked at by the host."""
        rows, queries, pages = bucket
        size, kv = self._pool.page_tokens, self._pool.kv
        context, numbers = table[:, :1], table[:, 1 + 2 * queries :]
        ids, positions = table[:, 1 : 1 + queries], table[:, 1 + queries : 1 + 2 * queries]
        within = torch.arange(size, device=self._device)
        slots = (numbers[:, :, None] * size + within).flatten(1)
        beyond = torch.arange(pages * size, device=self._device) >= context
        # what lies behind a row's context is replaced by its own first slot: it may hold NaNs
        slots = torch.where(beyond, slots[:, :1], slots)
        bias = torch.zeros(slots.shape, dtype=kv.dtype, device=self._device)
        bias = bias.masked_fill_(beyond, float("-inf"))[:, None, None, :]
        at = positions.clamp(min=0)
        write = slots.gather(1, at).masked_fill_(positions < 0, self._pool.capacity * size)
        group = Group(0, rows, queries, slots, bias)
        attend = PackedAttention(self._pool, [group], write.flatten())
        return self._model.hidden(ids.flatten(), at.flatten(), attend)

    def _prepare(self, bucket: Bucket) -> _Captured | None:
        """A table of its own for the bucket and, on CUDA, the graph of a pass over it.

        ``None`` if it cannot be captured; no more are tried then.
        """
        table = self._filled(bucket, []).to(self._device)
        if self._device.type != "cuda":
            return _Captured(table)
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        try:
            # one at a time in this process; the others may go on with what they do meanwhile
            with _capturing, torch.cuda.device(self._device):
                self._stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self._stream):  # libraries allocate at their first use
                    self._forward(bucket, table)
                torch.cuda.current_stream().wait_stream(self._stream)
                capture = torch.cuda.graph(
                    graph, self._memory, self._stream, capture_error_mode="thread_local"
                )
                with capture:
                    hidden = self._forward(bucket, table)
        except RuntimeError as error:
            torch.cuda.set_stream(current)  # a capture that fails at its end leaves its own
            logger.warning("no CUDA graph of %s, and none further: %s", bucket, error)
            return None
        return _Captured(table, graph, hidden)

"""Attention over packed rows whose context lies in their own queries or in pages.

Rows never see each other. Rows of one shape share a call; a context that is shorter than
its group's is padded with slots of the row itself, hidden by a bias of minus infinity, so
even a row of NaNs cannot reach its neighbours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from stepserve.engine.kv_pages import PagePool

QUERIES_PER_BIAS = 256
"""Most queries of one row that share a causal bias."""


@dataclass(frozen=True, slots=True)
class Group:
    """Rows next to each other in the packed batch that execute equally many tokens.

    ``slots`` ``[rows, context]`` are where their keys and values lie in the pool, ``None``
    when each row attends over exactly what it executes. ``bias`` ``[rows, 1, 1, context]``
    hides padding, or ``[1, 1, queries, context]`` what lies ahead of each query; ``None`` when
    there is nothing to hide.
    """

    start: int
    rows: int
    queries: int
    slots: Tensor | None = None
    bias: Tensor | None = None

    @property
    def own(self) -> slice:
        """Its tokens in the packed batch."""
        return slice(self.start, self.start + self.rows * self.queries)


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows next to each other, each of which attends over exactly what it executes.

    ``ends`` int32 ``[rows + 1]``: where they end, counted from ``start`` of the packed batch; the
    first is 0. ``tokens`` they have together, ``longest`` is the most that one has.
    """

    start: int
    tokens: int
    longest: int
    ends: Tensor

    @property
    def own(self) -> slice:
        """Its tokens in the packed batch."""
        return slice(self.start, self.start + self.tokens)


def whole_groups(
    start: int, lengths: Sequence[int], dtype: torch.dtype, device: torch.device
) -> list[Group | Ragged]:
    """Groups of rows of these lengths, each of which attends over exactly what it executes.

    Rows that differ take one call where there is a kernel for it, else one for each length (of
    neighbours).
    """
    if len(set(lengths)) > 1 and takes_ragged(dtype, device):
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        ends = ends.to(device, non_blocking=True)
        return [Ragged(start, sum(lengths), max(lengths), ends)]
    groups: list[Group | Ragged] = []
    for queries, alike in groupby(lengths):
        rows = len(list(alike))
        groups.append(Group(start, rows, queries))
        start += rows * queries
    return groups


def takes_ragged(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether PyTorch has attention over rows of several lengths: 16 bits, CUDA from Ampere on."""
    half = dtype in (torch.bfloat16, torch.float16)
    return half and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def cached_group(start: int, queries: int, slots: Sequence[Tensor], dtype: torch.dtype) -> Group:
    """Group of rows whose contexts are the int64 ``[context_i]`` slots in the pool."""
    if len({len(row) for row in slots}) == 1:
        return Group(start, len(slots), queries, torch.stack(list(slots)))
    padded = pad_sequence(list(slots), batch_first=True, padding_value=-1)
    padding = padded < 0
    bias = torch.zeros(padded.shape, dtype=dtype, device=padded.device)
    bias = bias.masked_fill_(padding, float("-inf"))[:, None, None, :]
    return Group(start, len(slots), queries, torch.where(padding, padded[:, :1], padded), bias)


def causal_groups(
    start: int, first: int, slots: Tensor, dtype: torch.dtype, block: int = 1
) -> list[Group]:
    """Groups of one row that executes its positions from ``first`` to the end of ``slots``.

    A position sees its own block of ``block`` positions and all before it; ``first`` and the end
    are edges of blocks. ``start`` is where the row is in the packed batch. Each group takes about
    ``QUERIES_PER_BIAS`` of them and sees the context up to its own last one, which bounds the
    bias and spares most of what a causal mask would hide. The keys and values of the whole
    batch are written before any group reads, so a later group finds those of an earlier one.
    """
    groups = []
    most = max(1, QUERIES_PER_BIAS // block) * block
    positions = torch.arange(len(slots), device=slots.device)
    for begin in range(first, len(slots), most):
        end = min(begin + most, len(slots))
        seen = (positions[begin:end, None] // block + 1) * block
        bias = torch.zeros((end - begin, end), dtype=dtype, device=slots.device)
        bias.masked_fill_(positions[:end] >= seen, float("-inf"))
        at = start + begin - first
        groups.append(Group(at, 1, end - begin, slots[None, :end], bias[None, None]))
    return groups


class PackedAttention:
    """``Attend`` of one batch: writes fresh keys and values to pages, then attends."""

    def __init__(self, pool: PagePool, groups: Sequence[Group | Ragged], write: Tensor) -> None:
        """``write`` int64 ``[W]``: the slots of the first W packed tokens; the rest keep none."""
        self._pool = pool
        self._groups = groups
        self._write = write

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries ``[N, heads, head_dim]``, k and v ``[N, kv_heads, head_dim]``; returns as q."""
        kept, pages = len(self._write), self._pool.kv[layer]
        if kept:
            pages[:, 0].index_copy_(0, self._write, k[:kept])
            pages[:, 1].index_copy_(0, self._write, v[:kept])
        if len(self._groups) == 1:
            return _attended(self._groups[0], q, k, v, pages)
        out = torch.empty_like(q)
        for group in self._groups:
            out[group.own] = _attended(group, q, k, v, pages)
        return out


def _attended(group: Group | Ragged, q: Tensor, k: Tensor, v: Tensor, pages: Tensor) -> Tensor:
    """What the queries of a group take, ``[tokens, heads, head_dim]``."""
    own = group.own
    if isinstance(group, Ragged):
        return ragged(q[own], k[own], v[own], group)
    shape = (group.rows, group.queries, -1, q.shape[-1])
    if group.slots is None:
        keys, values = k[own].view(shape), v[own].view(shape)
    else:
        gathered = pages.index_select(0, group.slots.flatten())
        keys, values = gathered.view(*group.slots.shape, *pages.shape[1:]).unbind(2)
    return attend(q[own].view(shape), keys, values, group.bias).flatten(0, 1)


def ragged(q: Tensor, k: Tensor, v: Tensor, group: Ragged) -> Tensor:
    """Attention of each row of ``group`` over itself: as ``attend``, but ``[tokens, ...]``."""
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - imports for seconds, on GPUs only

    ends, longest = group.ends, group.longest
    shared = q.shape[1] != k.shape[1]
    out = varlen_attn(q, k, v, ends, ends, longest, longest, enable_gqa=shared)
    assert isinstance(out, Tensor)  # nothing beside it was asked for
    return out


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Attention. q ``[rows, queries, heads, head_dim]``; returns the same shape.

    k and v are ``[rows, context, kv_heads, head_dim]``, bias ``[rows, 1, 1 or queries, context]``.
    Query heads that share a KV head are laid side by side as more queries.
    """
    rows, queries, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    split = (rows, queries, kv_heads, heads // kv_heads, head_dim)
    side_by_side = q.view(split).permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, head_dim)
    if bias is not None and bias.shape[2] > 1:
        bias = bias.repeat(1, 1, heads // kv_heads, 1)  # the same for each of these heads
    out = F.scaled_dot_product_attention(
        side_by_side, k.transpose(1, 2), v.transpose(1, 2), attn_mask=bias
    )
    out = out.view(rows, kv_heads, -1, queries, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(q.shape)

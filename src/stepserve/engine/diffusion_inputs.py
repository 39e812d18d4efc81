"""Packs the steps of a batch into the flat tensors of one forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from stepserve.core.payload import SamplingParams
from stepserve.core.request import CacheMode, Request
from stepserve.core.step import Step, StepKind
from stepserve.engine.attention import Group, Ragged, cached_group, causal_groups, whole_groups
from stepserve.engine.canvas import Canvas
from stepserve.engine.graphs import CachedRow
from stepserve.engine.sampling import Position


@dataclass(slots=True)
class Row:
    """What the executor holds of one request.

    ``slots`` ``[prompt + canvas]``: where keys and values of each position lie, ``None``
    without a cache. ``before`` ``[hidden]``: for models whose logits are shifted, the hidden
    state at the position before the current block, as of its last execution.
    """

    request: Request
    prompt: tuple[int, ...]
    sampling: SamplingParams
    canvas: Canvas
    steps: int
    pages: list[int] = field(default_factory=list)
    slots: Tensor | None = None
    block_steps: int = 0
    has_state: bool = False
    before: Tensor | None = None

    @property
    def length(self) -> int:
        """Positions of prompt and canvas."""
        return len(self.prompt) + len(self.canvas.tokens)

    def executed(self, step: Step) -> range | str:
        """Positions that a step would execute, or why it cannot be run now.

        The step decides, whatever the request's refresh options: a recompute step may execute
        everything or the canvas alone, a cached one may execute the block before, too.
        """
        mode = self.request.diffusion.cache_mode
        if step.kind not in (StepKind.RECOMPUTE, StepKind.CACHED):
            return f"a diffusion request has no {step.kind} steps"
        if mode is CacheMode.BLOCK:
            return self._blocks(step)
        output = range(len(self.prompt), self.length)
        if step.kind is StepKind.RECOMPUTE and step.query_tokens != len(output):
            return range(self.length)
        if mode is CacheMode.NONE:
            return f"{step.kind} step over cached keys and values of a request without a cache"
        if not self.has_state:
            return f"{step.kind} step, but no keys and values of the prompt on this instance"
        if step.kind is StepKind.RECOMPUTE:
            return output
        block = self.canvas.block
        span = (
            output[block.start :] if mode is CacheMode.PREFIX else output[block.start : block.stop]
        )
        if block.start > 0 and step.query_tokens == len(span) + len(block):
            return range(span.start - len(block), span.stop)
        return span

    def _blocks(self, step: Step) -> range | str:
        """Of a block-causal model: all up to the current block, or it alone.

        A block that was just opened is executed with the one before it, whose keys and values
        are not final yet: they are of the step that filled its last mask.
        """
        stop = len(self.prompt) + self.canvas.block.stop
        if step.kind is StepKind.RECOMPUTE:
            return range(stop)
        if not self.has_state:
            return f"{step.kind} step, but no keys and values of the prompt on this instance"
        return range(stop - self.canvas.block_tokens * (1 if self.block_steps else 2), stop)

    def context_tokens(self, span: range) -> int:
        """Positions that a step over ``span`` attends to."""
        return span.stop if self.block_causal else self.length

    @property
    def block_causal(self) -> bool:
        """Whether nothing behind a block is seen from it."""
        return self.request.diffusion.cache_mode is CacheMode.BLOCK

    def forbidden(self, offset: int, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Token ids that this request rules out at an output offset."""
        if offset < self.sampling.min_tokens:
            return (*eos_token_ids, *self.sampling.stop_token_ids)
        return eos_token_ids if self.sampling.ignore_eos else ()


@dataclass(slots=True)
class Work:
    """One row's share of a batch: a valid step and the positions it executes.

    ``base`` is where these positions start in the packed batch; ``offsets`` are the masked
    output positions that the step asks the model about.
    """

    row: Row
    step: Step
    span: range
    offsets: list[int]
    base: int = 0

    @property
    def whole(self) -> bool:
        """Whether it executes all that it attends to."""
        return len(self.span) == self.row.context_tokens(self.span)

    @property
    def contexts(self) -> list[Tensor]:
        """Slots that its queries attend to: all the same, or of a block-causal model by block."""
        row = self.row
        assert row.slots is not None
        if not row.block_causal:
            return [row.slots]
        size = row.canvas.block_tokens
        return [row.slots[:end] for end in range(self.span.start + size, self.span.stop + 1, size)]

    def cached(self) -> CachedRow | None:
        """What a captured forward pass needs of it; ``None`` if it is no cached step.

        Neither is one that opens a block of a block-causal model: its queries see unequal contexts.
        """
        row = self.row
        opens = row.block_causal and len(self.span) > row.canvas.block_tokens
        if self.step.kind is not StepKind.CACHED or opens:
            return None
        context = row.context_tokens(self.span)
        return CachedRow(_tokens(row, self.span), self.span.start, row.pages, context)


@dataclass(frozen=True, slots=True)
class Packed:
    """Inputs of one forward pass over N tokens.

    ``token_ids`` and ``positions`` are int64 ``[N]``; ``write`` int64 ``[W]`` are the slots of
    the first W of them.
    """

    token_ids: Tensor
    positions: Tensor
    groups: list[Group | Ragged]
    write: Tensor


def new_work(row: Row, step: Step, span: range) -> Work:
    """A step and what it asks about: all of the output if it executes that, else the block."""
    canvas = row.canvas
    everything = step.kind is StepKind.RECOMPUTE and not row.block_causal
    return Work(row, step, span, canvas.masked(range(canvas.limit) if everything else canvas.block))


def pack(works: Sequence[Work], *, dtype: torch.dtype, device: torch.device) -> Packed:
    """Lay the works out side by side, equal shapes next to each other; sets their ``base``.

    Whole rows come last, so those that differ in length are neighbours, too.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    groups: list[Group | Ragged] = []
    write: list[Tensor] = []
    whole: list[int] = []
    for _, members in groupby(sorted(works, key=_shape), key=_shape):
        rows = list(members)
        start = len(token_ids)
        for work in rows:
            work.base = len(token_ids)
            token_ids += _tokens(work.row, work.span)
            positions += work.span
            if work.row.slots is not None:
                write.append(work.row.slots[work.span.start : work.span.stop])
        if rows[0].whole and not rows[0].row.block_causal:
            whole += [len(rows[0].span)] * len(rows)
        else:
            groups += _groups(rows, start, dtype)
    groups += whole_groups(len(token_ids) - sum(whole), whole, dtype, device)

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)

    return Packed(
        tensor(token_ids), tensor(positions), groups, torch.cat(write) if write else tensor([])
    )


def questions(works: Sequence[Work], eos_token_ids: tuple[int, ...]) -> list[Position]:
    """The output positions that the works ask about, in their order."""
    return [
        Position(k, work.row.steps, work.row.sampling, work.row.forbidden(k, eos_token_ids))
        for work in works
        for k in work.offsets
    ]


def _shape(work: Work) -> tuple[bool, bool, int, int]:
    """Sort and group key: rows that write pages first, then rows of one attention shape.

    Contexts that lie in pages are alike within a factor of two, which bounds the padding.
    """
    row = work.row
    if work.whole:
        return row.slots is None, True, len(work.span), 0
    queries = row.canvas.block_tokens if row.block_causal else len(work.span)
    return row.slots is None, False, queries, (row.context_tokens(work.span) - 1).bit_length()


def _groups(rows: Sequence[Work], start: int, dtype: torch.dtype) -> list[Group]:
    """How works of one shape attend that are packed from ``start`` on.

    Whole ones only of a block-causal model.
    """
    first = rows[0].row
    size = first.canvas.block_tokens
    if rows[0].whole:
        return [
            group
            for work in rows
            for group in causal_groups(work.base, 0, work.contexts[-1], dtype, size)
        ]
    contexts = [slots for work in rows for slots in work.contexts]
    queries = size if first.block_causal else len(rows[0].span)
    return [cached_group(start, queries, contexts, dtype)]


def _tokens(row: Row, span: range) -> Sequence[int]:
    prompt, canvas = row.prompt, row.canvas.tokens
    if span.start >= len(prompt):
        return canvas[span.start - len(prompt) : span.stop - len(prompt)]
    return (*prompt[span.start :], *canvas[: span.stop - len(prompt)])


def read_at(works: Sequence[Work], packed_tokens: int, shift_logits: bool) -> list[int]:
    """Index of the hidden state that predicts each asked position.

    Behind the states of the packed tokens come the ``before`` states, if logits are shifted.
    """
    read: list[int] = []
    for index, work in enumerate(works):
        first = work.base + len(work.row.prompt) - work.span.start - shift_logits
        for k in work.offsets:
            # the state before the first executed position is not in this batch
            at = first + k
            read.append(at if at >= work.base else packed_tokens + index)
    return read

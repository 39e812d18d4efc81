"""Packs chunks of prompts and single decoded tokens into one forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from stepserve.core.request import Request
from stepserve.engine.attention import Group, Ragged, cached_group, causal_groups
from stepserve.engine.diffusion_inputs import Packed
from stepserve.engine.graphs import CachedRow
from stepserve.engine.sampling import Position
from stepserve.engine.sequence import TokenSequence


@dataclass(slots=True)
class AutoregressiveRow:
    """What the executor holds of one request.

    ``held``: inputs whose keys and values lie in ``pages``, without a gap. ``slots`` int64: of
    each position that the pages have room for. ``landed``: ranges computed elsewhere.
    ``started``: a step has run here.
    """

    request: Request
    sequence: TokenSequence
    slots: Tensor
    pages: list[int] = field(default_factory=list)
    held: int = 0
    landed: list[tuple[int, int]] = field(default_factory=list)
    started: bool = False


@dataclass(slots=True)
class Chunk:
    """One row's share of a batch: the inputs it executes, never none.

    ``base`` is where they start in the packed batch. A chunk that ends at the last known
    input samples the token after it.
    """

    row: AutoregressiveRow
    span: range
    base: int = 0

    @property
    def samples(self) -> bool:
        """Whether the next token is asked for."""
        return self.span.stop == len(self.row.sequence)

    def cached(self) -> CachedRow | None:
        """What a captured forward pass needs of it; ``None`` if it executes several tokens."""
        if len(self.span) > 1:
            return None
        row, first = self.row, self.span.start
        return CachedRow((row.sequence.tokens[first],), first, row.pages, self.span.stop)

    @property
    def context(self) -> Tensor:
        """Slots of everything its last query attends to."""
        return self.row.slots[: self.span.stop]


def pack_ar(chunks: Sequence[Chunk], *, dtype: torch.dtype, device: torch.device) -> Packed:
    """Lay chunks out side by side; sets their ``base``.

    Single tokens of similar contexts attend together, each longer chunk by itself.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    groups: list[Group | Ragged] = []
    write: list[Tensor] = []
    for shape, members in groupby(sorted(chunks, key=_shape), key=_shape):
        rows = list(members)
        for chunk in rows:
            chunk.base = len(token_ids)
            token_ids += chunk.row.sequence.tokens[chunk.span.start : chunk.span.stop]
            positions += chunk.span
            write.append(chunk.context[chunk.span.start :])
            if shape == 0:
                groups += causal_groups(chunk.base, chunk.span.start, chunk.context, dtype)
        if shape > 0:
            groups.append(cached_group(rows[0].base, 1, [c.context for c in rows], dtype))

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)

    return Packed(tensor(token_ids), tensor(positions), groups, torch.cat(write))


def _shape(chunk: Chunk) -> int:
    """0: a chunk of its own; else single tokens whose contexts are alike within a factor of 2."""
    return 0 if len(chunk.span) > 1 else chunk.span.stop.bit_length()


def question(sequence: TokenSequence) -> Position:
    """What asks for the next token.

    Step 0 always: a draw depends on seed and offset, not on how the inputs were cut.
    """
    return Position(sequence.emitted, 0, sequence.sampling, sequence.forbidden())

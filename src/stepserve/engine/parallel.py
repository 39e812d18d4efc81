"""Tensor parallelism: which share of a model each rank of a group holds, and what ranks exchange.

Query, key, value, gate and up projections are split by columns (whole heads), output and down
projections by rows, whose partial results are summed over the ranks: two sums a layer. Every
rank has its columns of every expert, and chooses the same ones: sums are the same everywhere. The
embedding and the head are split by rows of the vocabulary; how tokens are chosen without
gathering it is in ``vocabulary``.

Source: Megatron-LM (Shoeybi et al., 2019), sections 3 and 4.1. Deviations: what does not divide
is split unevenly, by whole heads, instead of being refused; key/value heads that are fewer than
the ranks are held by several of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from stepserve.core.errors import FieldError, StepserveError
from stepserve.engine.models.transformer import DecoderModel, ModelConfig

T = TypeVar("T")

COLUMNS = {"q_proj": "heads", "k_proj": "kv_heads", "v_proj": "kv_heads"} | dict.fromkeys(
    ("gate_proj", "up_proj"), "mlp"
)
ROWS = {"o_proj": "heads", "down_proj": "mlp"}
VOCABULARY = ("embed", "head")
WHOLE = ("router",)


class WorkerLostError(StepserveError):
    """A rank of a group died or does not answer; the group is of no more use."""


class Group:
    """The ranks that hold one model together. This class itself: a rank that holds all of it."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks; x may be overwritten."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """``[size, *shape]`` of every rank's x ``[*shape]``."""
        return x[None]

    def broadcast(self, value: T) -> T:
        """Rank 0's value, at every rank."""
        return value


ALONE = Group()


class ProcessGroup(Group):
    """Ranks in processes of their own. Tensors go through ``torch.distributed``, values by pipe."""

    def __init__(
        self, rank: int, size: int, pg: dist.ProcessGroup, lines: Sequence["Connection[Any, Any]"]
    ) -> None:
        """``lines`` lead from rank 0 to every other rank, from those to rank 0."""
        self.rank = rank
        self.size = size
        self._pg = pg
        self._lines = lines

    def all_reduce(self, x: Tensor) -> Tensor:
        """See ``Group``. Raises WorkerLostError if a rank is gone or late."""
        x = x.contiguous()
        self._wait(self._pg.allreduce([x]))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """See ``Group``. Raises WorkerLostError if a rank is gone or late."""
        out = [torch.empty_like(x) for _ in range(self.size)]
        self._wait(self._pg.allgather([out], [x.contiguous()]))
        return torch.stack(out)

    def broadcast(self, value: T) -> T:
        """See ``Group``. Rank 0 does not wait for the others."""
        if self.rank:
            received: T = self._lines[0].recv()
            return received
        try:
            for line in self._lines:
                line.send(value)
        except OSError as error:
            raise WorkerLostError(f"a tensor-parallel worker is gone: {error}") from error
        return value

    def _wait(self, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            where = f"rank {self.rank} of {self.size}"
            raise WorkerLostError(f"{where}: a tensor-parallel worker is gone: {error}") from error


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank holds. ``vocab`` may pass the end of the vocabulary: those rows are padding.

    ``expert`` are the MLP columns that it has of each expert, ``shared`` of the shared one.
    """

    heads: range
    kv_heads: range
    mlp: range
    expert: range
    shared: range
    vocab: range
    head_dim: int

    @classmethod
    def of(cls, config: ModelConfig, rank: int, size: int) -> "Share":
        """Shares differ by one KV head (with its query heads) and one MLP column at most.

        Raises FieldError (``tp_degree``) where a rank would be left without a head, or ranks
        that share a KV head without equally many of its query heads.
        """
        heads, kv_heads = config.heads, config.kv_heads
        if size <= kv_heads:
            kv = _part(kv_heads, rank, size)
            queries = heads // kv_heads
            own = range(kv.start * queries, kv.stop * queries)
        elif heads % size == 0 and size % kv_heads == 0:
            own, first = _part(heads, rank, size), rank * kv_heads // size
            kv = range(first, first + 1)
        else:
            what = f"{size} ranks cannot share {heads} heads with {kv_heads} of keys and values"
            raise FieldError("tp_degree", what)
        experts = config.experts
        widths = (
            config.mlp_size,
            0 if experts is None else experts.mlp_size,
            0 if experts is None else experts.shared_size,
        )
        for width in widths:
            if 0 < width < size:
                raise FieldError("tp_degree", f"{size} ranks, but {width} MLP columns")
        mlp, expert, shared = (_part(width, rank, size) for width in widths)
        rows = -(-config.vocab_size // size)
        vocab = range(rank * rows, (rank + 1) * rows)
        return cls(own, kv, mlp, expert, shared, vocab, config.head_dim)

    def cut(self, name: str) -> tuple[int, range] | None:
        """The dimension of a parameter that is split, and this rank's part; None: all of it.

        Of a stacked parameter it is that of each expert's. Raises FieldError (``tp_degree``) for
        a parameter that nobody taught to be split.
        """
        *above, part, kind = name.split(".")
        if part == "experts":  # they are parameters themselves
            above, part, kind = [*above, part], kind, "weight"
        if "norm" in part or part in WHOLE:
            return None
        if part in VOCABULARY:
            return 0, self.vocab
        unit = (COLUMNS if part in COLUMNS else ROWS).get(part)
        if unit is None or (part in ROWS and kind == "bias"):
            raise FieldError("tp_degree", f"{name} is not made to be split over ranks")
        if unit == "mlp" and above:
            unit = {"experts": "expert", "shared": "shared"}.get(above[-1], unit)
        own = getattr(self, unit)
        width = self.head_dim if unit in ("heads", "kv_heads") else 1
        return int(part in ROWS), range(own.start * width, own.stop * width)

    def shape(self, name: str, full: Sequence[int]) -> list[int]:
        """The shape of this rank's part of a parameter, vocabulary padded."""
        shape, cut = list(full), self.cut(name)
        if cut is not None:
            stacked = len(full) == 3  # of all experts
            shape[cut[0] + stacked] = len(cut[1])
        return shape

    def read(self, name: str, tensor: Any, rows: slice = slice(None)) -> Tensor:
        """This rank's part of a parameter, of one expert's if they are stacked.

        ``rows`` of the tensor are the parameter. Of a ``safe_open`` slice nothing else is read.
        """
        cut = self.cut(name)
        if cut is None:
            whole: Tensor = tensor[rows]
            return whole
        (dim, own), first = cut, rows.start or 0
        part: Tensor = (
            tensor[first + own.start : first + own.stop]
            if dim == 0
            else tensor[rows, own.start : own.stop]
        )
        missing = len(own) - part.shape[dim]
        if missing:  # the vocabulary ends here
            part = F.pad(part, (0, 0, 0, missing))
        return part.contiguous()


def _part(count: int, rank: int, size: int) -> range:
    """The rank's part of so many, all parts equal but for one."""
    return range(rank * count // size, (rank + 1) * count // size)


class VocabularyEmbedding(nn.Module):
    """An embedding of which each rank has some rows; the others add zeros."""

    def __init__(self, weight: nn.Parameter, group: Group, vocab: range) -> None:
        super().__init__()
        self.weight = weight
        self.group = group
        self.vocab = vocab

    def forward(self, token_ids: Tensor) -> Tensor:
        """Map token_ids ``[*shape]`` to ``[*shape, hidden]``."""
        own = (token_ids >= self.vocab.start) & (token_ids < self.vocab.stop)
        rows = F.embedding((token_ids - self.vocab.start) * own, self.weight)
        return self.group.all_reduce(rows * own[..., None])


def parallelize(model: DecoderModel, group: Group) -> None:
    """Make a model without weights yet (on the meta device) that of one rank, to be loaded.

    Its ``logits`` are then those of the rank's rows of the vocabulary, padding included.
    """
    share = Share.of(model.config, group.rank, group.size)
    for name, weight in list(model.named_parameters(remove_duplicate=False)):
        owner, _, kind = name.rpartition(".")
        own = torch.empty(share.shape(name, weight.shape), device="meta", dtype=weight.dtype)
        setattr(model.get_submodule(owner), kind, nn.Parameter(own, requires_grad=False))

    def total(module: nn.Module, given: object, partial: Tensor) -> Tensor:
        return group.all_reduce(partial)

    for name, module in list(model.named_modules()):
        *above, part = name.split(".")
        if part == "embed":
            embed = VocabularyEmbedding(module.get_parameter("weight"), group, share.vocab)
            model.set_submodule(name, embed)
        elif part == "experts" or (part in ROWS and "experts" not in above):
            module.register_forward_hook(total)  # of experts together

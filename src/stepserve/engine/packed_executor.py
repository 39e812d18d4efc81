"""What the executors of all model families share: one packed forward pass for a batch.

Follow ``run`` from top to bottom: each step is checked (``_plan``), the valid ones go through
the model together (``_execute``), and a row that fails is freed while its neighbours go on.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from stepserve.core.errors import FieldError, StepserveError
from stepserve.core.ids import RequestId
from stepserve.core.payload import Payload, SettledToken
from stepserve.core.protocols import BatchResult
from stepserve.core.request import Family, FinishReason, Request
from stepserve.core.step import Batch, Step, StepOutcome
from stepserve.engine.attention import PackedAttention
from stepserve.engine.confidence import LOGITS_PER_SLICE, in_order, modes, wants_mode
from stepserve.engine.diffusion_inputs import Packed
from stepserve.engine.graphs import CachedRow, Replay
from stepserve.engine.kv_pages import PagePool
from stepserve.engine.loader import LoadedModel
from stepserve.engine.parallel import Share
from stepserve.engine.sampling import Answers, Position, answer
from stepserve.engine.vocabulary import answer_apart

RowResult = tuple[StepOutcome, tuple[SettledToken, ...]]


class HeldRow(Protocol):
    """What is held of a request: at least its pages."""

    pages: list[int]


class RowWork(Protocol):
    """One row's share of a batch; ``base`` is where its tokens start among the hidden states."""

    base: int

    def cached(self) -> CachedRow | None:
        """What a captured forward pass needs of it, if it can be part of one."""


RowT = TypeVar("RowT", bound=HeldRow)
WorkT = TypeVar("WorkT", bound=RowWork)


class PackedExecutor(ABC, Generic[RowT, WorkT]):
    """Holds requests and their pages, and runs batches of their steps.

    Not thread-safe: one thread calls ``add``, ``run`` and ``remove``. Of a model that is split
    over ranks, each has an executor that is told the same (``workers``); the tokens chosen are
    rank 0's, so that no rounding can part them.
    """

    FAMILY: Family

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        page_tokens: int = 16,
        page_capacity: int = 4096,
        device: torch.device | str | None = None,
        threads: int | None = None,
        graphs: str = "auto",
    ) -> None:
        """``device``: move the model there, if given. ``threads``: CPU threads of ``run``.

        ``graphs``: ``on`` pads batches of cached steps or decodes to a few sizes, replayed as CUDA
        graphs on such a device (``engine/graphs.py``); ``auto``: there only; ``off``: never.
        Raises FieldError (field ``model``) for a model of another family, or ``graphs``.
        """
        if graphs not in ("auto", "on", "off"):
            raise FieldError("graphs", f"must be auto, on or off, not {graphs!r}")
        if loaded.family is not self.FAMILY:
            raise FieldError("model", f"{loaded.name} is {loaded.family}, not {self.FAMILY}")
        self.model = loaded.model if device is None else loaded.model.to(device)
        self.config = loaded.config
        weight = self.model.embed.weight
        self._device, self._dtype = weight.device, weight.dtype
        suppressed = {*loaded.suppressed_token_ids, self.config.mask_token_id} - {None}
        self._suppressed = torch.tensor(sorted(suppressed), dtype=torch.int64, device=self._device)
        self._group = loaded.group
        self._own_heads = Share.of(self.config, self._group.rank, self._group.size).kv_heads
        self._pool = PagePool(
            replace(self.config, kv_heads=len(self._own_heads)),
            page_tokens=page_tokens,
            capacity=page_capacity,
            device=self._device,
            dtype=self._dtype,
        )
        self._never = torch.zeros(self.config.vocab_size, dtype=torch.bool, device=self._device)
        self._never[self._suppressed] = True
        on = graphs == "on" or (graphs == "auto" and self._device.type == "cuda")
        # a router reads on the host which experts were chosen: that cannot be captured
        on = on and self.config.experts is None
        self._replay = Replay(self.model, self._pool) if on else None
        self._threads = threads
        self._rows: dict[RequestId, RowT] = {}

    @property
    def used_pages(self) -> int:
        """Pages that held requests own; 0 when nothing is held."""
        return self._pool.used

    @property
    def captured_graphs(self) -> int:
        """CUDA graphs held: one for each size of batch that has been seen."""
        return 0 if self._replay is None else self._replay.captured

    def _check(
        self, request: Request, payload: Payload, settled: Mapping[int, int], again: bool = False
    ) -> None:
        if request.id in self._rows and not again:
            raise StepserveError(f"request {request.id} is already held")
        vocab = range(self.config.vocab_size)
        if not payload.prompt_ids:
            raise FieldError("prompt", "must not be empty")
        if len(payload.prompt_ids) != request.prompt_tokens:
            raise FieldError("prompt", f"{len(payload.prompt_ids)} tokens, not as announced")
        named: tuple[tuple[str, Iterable[int]], ...] = (
            ("prompt", payload.prompt_ids),
            ("stop_token_ids", payload.sampling.stop_token_ids),
            ("settled", settled.values()),
        )
        for name, ids in named:
            if any(token not in vocab for token in ids):
                raise FieldError(name, f"token id outside of the vocabulary of {len(vocab)}")

    def remove(self, request_id: RequestId) -> None:
        """Drop a request and free its pages. Unknown ids are ignored."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._pool.release(row.pages)

    def close(self) -> None:
        """Nothing is to be ended: that is for executors of several processes."""

    @torch.inference_mode()
    def run(self, batch: Batch) -> BatchResult:
        """Run one step of each row in one forward pass; outcomes in the order of the steps.

        A step that its row cannot take, or whose logits are not finite, ends that row with an
        error outcome and frees it; the others go on. A step of a finished row executes nothing
        and reports the end again.
        """
        began = time.perf_counter()
        if self._threads is not None:
            torch.set_num_threads(self._threads)  # per calling thread, so not in __init__
        outcomes: dict[int, StepOutcome] = {}
        settled: dict[RequestId, tuple[SettledToken, ...]] = {}
        works: dict[int, WorkT] = {}
        seen: set[RequestId] = set()
        for index, step in enumerate(batch.steps):
            again = step.request_id in seen
            planned = failed(step.request_id, "twice in one batch") if again else self._plan(step)
            seen.add(step.request_id)
            if isinstance(planned, StepOutcome):
                outcomes[index] = planned
            else:
                works[index] = planned
        executed = self._execute(list(works.values())) if works else []
        for index, (outcome, tokens) in zip(works, executed, strict=True):
            outcomes[index] = outcome
            settled[outcome.request_id] = tokens
        for outcome in outcomes.values():
            if outcome.error is not None:
                self.remove(outcome.request_id)
        if self._device.type == "cuda":  # most often it has just been waited for: tokens were read
            torch.cuda.current_stream(self._device).synchronize()
        ordered = tuple(outcomes[index] for index in range(len(batch.steps)))
        return BatchResult(ordered, settled, time.perf_counter() - began)

    @abstractmethod
    def _plan(self, step: Step) -> WorkT | StepOutcome:
        """The work of a valid step, else the outcome that says why there is none."""

    @abstractmethod
    def _execute(self, works: list[WorkT]) -> list[RowResult]:
        """Run works, at least one, in one forward pass; results in their order."""

    @abstractmethod
    def _pack(self, works: list[WorkT]) -> Packed:
        """The inputs of a forward pass over works; sets their ``base``."""

    def _hidden(self, works: list[WorkT]) -> Tensor:
        """Final hidden states of one forward pass, padding included; sets the ``base`` of works."""
        cached = [] if self._replay is None else [work.cached() for work in works]
        rows = [row for row in cached if row is not None]
        if self._replay is not None and len(rows) == len(works):
            hidden = self._replay.hidden(rows)
            if hidden is not None:
                queries = max(len(row.token_ids) for row in rows)
                for index, work in enumerate(works):
                    work.base = index * queries
                return hidden
        packed = self._pack(works)
        attend = PackedAttention(self._pool, packed.groups, packed.write)
        return self.model.hidden(packed.token_ids, packed.positions, attend)

    def _answers(self, hidden: Tensor, read: Sequence[int], asked: Sequence[Position]) -> Answers:
        """Tokens at the asked positions, from slices of logits of bounded size.

        ``read`` has the index in ``hidden`` of the state that answers each of them. Of a model that
        is split, a rank's logits are a slice of the vocabulary as they are.
        """
        answers, split = Answers(), self._group.size > 1
        simple = [] if split else [i for i, position in enumerate(asked) if wants_mode(position)]
        if simple:
            states, positions = self._states(hidden, read, simple), [asked[i] for i in simple]
            answers.extend(modes(self.model, states, positions, self._never))
        if len(simple) == len(asked):
            return answers
        other = sorted(set(range(len(asked))) - set(simple))
        size = max(1, LOGITS_PER_SLICE // self.config.vocab_size)
        for start in range(0, len(other), size):
            some = other[start : start + size]
            logits = self.model.logits(self._states(hidden, read, some))
            answers.extend(self._chosen(logits, [asked[i] for i in some]))
        return self._group.broadcast(in_order(answers, simple + other))

    def _chosen(self, logits: Tensor, asked: Sequence[Position]) -> Answers:
        """From the logits of all tokens, or of those that this rank has a share of."""
        if self._group.size == 1:
            return answer(logits, asked, self._suppressed)
        return answer_apart(logits, asked, self._suppressed, self.config.vocab_size, self._group)

    def _states(self, hidden: Tensor, read: Sequence[int], some: Sequence[int]) -> Tensor:
        index = torch.tensor([read[i] for i in some], dtype=torch.int64)
        return hidden[index.to(hidden.device, non_blocking=True)]


def failed(request_id: RequestId, error: str) -> StepOutcome:
    """The outcome of a row that cannot go on."""
    return StepOutcome(request_id, 0, 0, FinishReason.ERROR, error=error)

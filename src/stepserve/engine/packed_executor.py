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
from stepserve.engine.kv_pages import PagePool
from stepserve.engine.loader import LoadedModel
from stepserve.engine.parallel import Share
from stepserve.engine.sampling import Answers, Position, answer
from stepserve.engine.vocabulary import answer_apart

LOGITS_PER_SLICE = 1 << 24
"""Most logits that exist at once (64 MB of float32): few rows of a large vocabulary."""

RowResult = tuple[StepOutcome, tuple[SettledToken, ...]]


class HeldRow(Protocol):
    """What is held of a request: at least its pages."""

    pages: list[int]


RowT = TypeVar("RowT", bound=HeldRow)
WorkT = TypeVar("WorkT")


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
    ) -> None:
        """``device``: move the model there, if given. ``threads``: CPU threads of ``run``.

        Raises FieldError (field ``model``) for a model of another family.
        """
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
        self._threads = threads
        self._rows: dict[RequestId, RowT] = {}

    @property
    def used_pages(self) -> int:
        """Pages that held requests own; 0 when nothing is held."""
        return self._pool.used

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
        ordered = tuple(outcomes[index] for index in range(len(batch.steps)))
        return BatchResult(ordered, settled, time.perf_counter() - began)

    @abstractmethod
    def _plan(self, step: Step) -> WorkT | StepOutcome:
        """The work of a valid step, else the outcome that says why there is none."""

    @abstractmethod
    def _execute(self, works: list[WorkT]) -> list[RowResult]:
        """Run works, at least one, in one forward pass; results in their order."""

    def _answers(self, hidden: Tensor, read: Tensor, asked: Sequence[Position]) -> Answers:
        """Tokens at the asked positions, in slices of bounded size.

        ``read`` int64 ``[n]`` indexes ``hidden`` for the n asked positions.
        """
        vocab, group = self.config.vocab_size, self._group
        size = max(1, LOGITS_PER_SLICE // vocab)
        answers = Answers()
        for start in range(0, len(asked), size):
            logits = self.model.logits(hidden[read[start : start + size]])
            part = asked[start : start + size]
            if group.size == 1:
                answers.extend(answer(logits, part, self._suppressed))
            else:
                answers.extend(answer_apart(logits, part, self._suppressed, vocab, group))
        return group.broadcast(answers)


def failed(request_id: RequestId, error: str) -> StepOutcome:
    """The outcome of a row that cannot go on."""
    return StepOutcome(request_id, 0, 0, FinishReason.ERROR, error=error)

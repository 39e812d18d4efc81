"""The diffusion executor: one packed forward pass for a batch of denoising steps.

Follow ``run`` from top to bottom: check the steps, pack them (``inputs``), run the model
(``attention``, ``kv_pages``), choose tokens (``sampling``), settle some of them
(``unmasking``, ``canvas``), report.
"""

import math
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from stepserve.core.errors import FieldError, StepserveError
from stepserve.core.ids import RequestId
from stepserve.core.payload import Payload, SettledToken
from stepserve.core.protocols import BatchResult
from stepserve.core.request import CacheMode, FinishReason, Progress, Request
from stepserve.core.step import Batch, Step, StepOutcome
from stepserve.engine.attention import PackedAttention
from stepserve.engine.canvas import Canvas
from stepserve.engine.inputs import Packed, Row, Work, new_work, pack
from stepserve.engine.kv_pages import PagePool
from stepserve.engine.loader import LoadedModel
from stepserve.engine.sampling import Answers, answer
from stepserve.engine.unmasking import choose

LOGITS_PER_SLICE = 1 << 24
"""Most logits that exist at once (64 MB of float32): few rows of a large vocabulary."""


class DiffusionExecutor:
    """Runs denoising steps of a masked diffusion model; implements ``core.protocols.Executor``.

    Not thread-safe: one thread calls ``add``, ``run`` and ``remove``.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        page_tokens: int = 16,
        page_capacity: int = 4096,
        device: torch.device | str | None = None,
        threads: int | None = None,
    ) -> None:
        """``device``: move the model there, if given. ``threads``: CPU threads of ``run``."""
        self.model = loaded.model if device is None else loaded.model.to(device)
        self.config = loaded.config
        weight = self.model.embed.weight
        self._device, self._dtype = weight.device, weight.dtype
        self._suppressed = torch.tensor(
            sorted({*loaded.suppressed_token_ids, self.config.mask_token_id}), device=self._device
        )
        self._pool = PagePool(
            self.config,
            page_tokens=page_tokens,
            capacity=page_capacity,
            device=self._device,
            dtype=self._dtype,
        )
        self._threads = threads
        self._rows: dict[RequestId, Row] = {}

    @property
    def used_pages(self) -> int:
        """Pages that held requests own; 0 when nothing is held."""
        return self._pool.used

    def add(
        self,
        request: Request,
        payload: Payload,
        progress: Progress,
        settled: Mapping[int, int],
    ) -> None:
        """Hold a request, with all pages that its prompt and canvas will ever need.

        ``settled`` maps output offsets to token ids already final. Steps in the current block
        count from here against ``max_steps_per_block``. Raises CapacityError if the pages do
        not exist, FieldError for a request that the model cannot run.
        """
        if request.id in self._rows:
            raise StepserveError(f"request {request.id} is already held")
        self._check(request, payload, settled)
        canvas = Canvas(
            request,
            payload.sampling,
            mask_token_id=self.config.mask_token_id,
            eos_token_id=self.config.eos_token_id,
            settled=settled,
        )
        row = Row(request, payload.prompt_ids, payload.sampling, canvas, progress.steps)
        if row.length > self.config.max_positions:
            raise FieldError(
                "max_tokens",
                f"prompt and output canvas take {row.length} positions, "
                f"the model has {self.config.max_positions}",
            )
        if request.diffusion.cache_mode is not CacheMode.NONE:
            row.pages = self._pool.allocate(row.length)
            row.slots = self._pool.slots(row.pages, row.length)
        self._rows[request.id] = row

    def _check(self, request: Request, payload: Payload, settled: Mapping[int, int]) -> None:
        vocab = range(self.config.vocab_size)
        if not payload.prompt_ids:
            raise FieldError("prompt", "must not be empty")
        if len(payload.prompt_ids) != request.prompt_tokens:
            raise FieldError("prompt", f"{len(payload.prompt_ids)} tokens, not as announced")
        for name, ids in (
            ("prompt", payload.prompt_ids),
            ("stop_token_ids", payload.sampling.stop_token_ids),
            ("settled", settled.values()),
        ):
            if any(token not in vocab for token in ids):
                raise FieldError(name, f"token id outside of the vocabulary of {len(vocab)}")

    def remove(self, request_id: RequestId) -> None:
        """Drop a request and free its pages. Unknown ids are ignored."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._pool.release(row.pages)

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
        works: dict[int, Work] = {}
        seen: set[RequestId] = set()
        for index, step in enumerate(batch.steps):
            again = step.request_id in seen
            planned = _failed(step.request_id, "twice in one batch") if again else self._plan(step)
            seen.add(step.request_id)
            if isinstance(planned, Work):
                works[index] = planned
            else:
                outcomes[index] = planned
        for index, (outcome, tokens) in zip(
            works, self._execute(list(works.values())), strict=True
        ):
            outcomes[index] = outcome
            settled[outcome.request_id] = tokens
        for outcome in outcomes.values():
            if outcome.error is not None:
                self.remove(outcome.request_id)
        ordered = tuple(outcomes[index] for index in range(len(batch.steps)))
        return BatchResult(ordered, settled, time.perf_counter() - began)

    def _plan(self, step: Step) -> Work | StepOutcome:
        """The work of a valid step, else the outcome that says why there is none."""
        row = self._rows.get(step.request_id)
        if row is None:
            return _failed(step.request_id, "request is not held on this instance")
        if row.canvas.finished is not None:
            return _outcome(row, settled=0, forced=0)
        span = row.executed(step)
        if isinstance(span, str):
            return _failed(step.request_id, span)
        if (len(span), row.length) != (step.query_tokens, step.context_tokens):
            return _failed(
                step.request_id,
                f"{step.kind} step executes {len(span)} of {row.length} tokens here, "
                f"not {step.query_tokens} of {step.context_tokens}",
            )
        if step.threshold is None:
            return _failed(step.request_id, "a denoising step needs a threshold")
        return new_work(row, step, span)

    def _execute(self, works: list[Work]) -> list[tuple[StepOutcome, tuple[SettledToken, ...]]]:
        if not works:
            return []
        config = self.config
        packed = pack(
            works,
            eos_token_id=config.eos_token_id,
            shift_logits=config.shift_logits,
            dtype=self._dtype,
            device=self._device,
        )
        attend = PackedAttention(self._pool, packed.groups, packed.write)
        hidden = self.model.hidden(packed.token_ids, packed.positions, attend)
        answers = self._answers(works, packed, hidden)
        results = []
        first = 0
        for work in works:
            work.row.has_state |= work.row.slots is not None
            results.append(_settle(work, answers, first))
            first += len(work.offsets)
            if config.shift_logits:
                _keep_state_before_block(work, hidden)
        return results

    def _answers(self, works: list[Work], packed: Packed, hidden: Tensor) -> Answers:
        """Tokens and confidences at the asked positions, in slices of bounded size."""
        if self.config.shift_logits:
            before = [hidden[0] if w.row.before is None else w.row.before for w in works]
            hidden = torch.cat([hidden, torch.stack(before)])
        size = max(1, LOGITS_PER_SLICE // self.config.vocab_size)
        answers = Answers()
        for start in range(0, len(packed.asked), size):
            logits = self.model.logits(hidden[packed.read[start : start + size]])
            answers.extend(answer(logits, packed.asked[start : start + size], self._suppressed))
        return answers


def _settle(
    work: Work, answers: Answers, first: int
) -> tuple[StepOutcome, tuple[SettledToken, ...]]:
    """Apply the unmasking rule to one row; its answers start at index ``first``."""
    row, canvas, limits = work.row, work.row.canvas, work.row.request.diffusion
    row.steps += 1
    row.block_steps += 1
    confidence = answers.confidence[first : first + len(work.offsets)]
    if not all(map(math.isfinite, confidence)):
        return _failed(row.request.id, "logits are not finite"), ()
    for offset, value in zip(work.offsets, confidence, strict=True):
        canvas.confidence[offset] = value
    candidates = [i for i, k in enumerate(work.offsets) if canvas.candidate(k)]
    capped = row.block_steps >= (limits.max_steps_per_block or math.inf)
    capped |= row.steps >= (limits.max_forwards or math.inf)
    assert work.step.threshold is not None
    chosen, forced = choose([confidence[i] for i in candidates], work.step.threshold, capped)
    tokens = []
    for i in (candidates[c] for c in chosen):
        at = first + i
        logprob = None if row.sampling.logprobs is None else answers.logprobs[at]
        tokens.append(
            SettledToken(work.offsets[i], answers.tokens[at], logprob, answers.top.get(at, ()))
        )
    block = canvas.block
    canvas.settle({token.offset: token.token_id for token in tokens})
    if canvas.block != block:
        row.block_steps = 0
    return _outcome(row, settled=len(tokens), forced=forced), tuple(tokens)


def _keep_state_before_block(work: Work, hidden: Tensor) -> None:
    """Keep the hidden state that will predict the first position of the current block."""
    position = len(work.row.prompt) + work.row.canvas.block.start - 1
    if position in work.span:
        work.row.before = hidden[work.base + position - work.span.start].clone()


def _outcome(row: Row, *, settled: int, forced: int) -> StepOutcome:
    canvas = row.canvas
    return StepOutcome(
        row.request.id, settled, canvas.emitted, canvas.finished, canvas.summary(), forced
    )


def _failed(request_id: RequestId, error: str) -> StepOutcome:
    return StepOutcome(request_id, 0, 0, FinishReason.ERROR, error=error)

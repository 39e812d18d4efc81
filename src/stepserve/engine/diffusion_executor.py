"""The diffusion executor: one packed forward pass for a batch of denoising steps.

``PackedExecutor.run`` leads through it: check the steps, pack them (``inputs``), run the model
(``attention``, ``kv_pages``), choose tokens (``sampling``), settle some of them
(``unmasking``, ``canvas``), report.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from stepserve.core.errors import FieldError
from stepserve.core.payload import Payload, SettledToken
from stepserve.core.request import CacheMode, DiffusionOptions, Family, Progress, Request
from stepserve.core.step import Step, StepOutcome
from stepserve.engine.canvas import Canvas
from stepserve.engine.diffusion_inputs import Packed, Row, Work, new_work, pack, questions, read_at
from stepserve.engine.packed_executor import PackedExecutor, RowResult, failed
from stepserve.engine.sampling import Answers
from stepserve.engine.unmasking import choose


class DiffusionExecutor(PackedExecutor[Row, Work]):
    """Runs denoising steps of a masked diffusion model; implements ``core.protocols.Executor``."""

    FAMILY = Family.DIFFUSION

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
        self._check(request, payload, settled)
        self._check_blocks(request.diffusion)
        assert self.config.mask_token_id is not None
        canvas = Canvas(
            request,
            payload.sampling,
            mask_token_id=self.config.mask_token_id,
            eos_token_ids=self.config.eos_token_ids,
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

    def _check_blocks(self, options: DiffusionOptions) -> None:
        """Blocks are a block-causal model's own; only there are finished ones final."""
        block = self.config.attention_block
        if (options.cache_mode is CacheMode.BLOCK) != (block is not None):
            kind = "not a block-causal model" if block is None else "a block-causal model"
            raise FieldError("dlm.cache", f"{options.cache_mode} cache, and this is {kind}")
        if block not in (None, options.block_tokens):
            raise FieldError("dlm.block_length", f"is {block} in this model")

    def _plan(self, step: Step) -> Work | StepOutcome:
        """The work of a valid step, else the outcome that says why there is none."""
        row = self._rows.get(step.request_id)
        if row is None:
            return failed(step.request_id, "request is not held on this instance")
        if row.canvas.finished is not None:
            return _outcome(row, settled=0, forced=0)
        span = row.executed(step)
        if isinstance(span, str):
            return failed(step.request_id, span)
        context = row.context_tokens(span)
        if (len(span), context) != (step.query_tokens, step.context_tokens):
            return failed(
                step.request_id,
                f"{step.kind} step executes {len(span)} of {context} tokens here, "
                f"not {step.query_tokens} of {step.context_tokens}",
            )
        if step.threshold is None:
            return failed(step.request_id, "a denoising step needs a threshold")
        return new_work(row, step, span)

    def _pack(self, works: list[Work]) -> Packed:
        return pack(works, dtype=self._dtype, device=self._device)

    def _execute(self, works: list[Work]) -> list[RowResult]:
        shift = self.config.shift_logits
        states = hidden = self._hidden(works)
        if shift:
            before = [hidden[0] if w.row.before is None else w.row.before for w in works]
            states = torch.cat([hidden, torch.stack(before)])
        asked = questions(works, self.config.eos_token_ids)
        answers = self._answers(states, read_at(works, len(hidden), shift), asked)
        results = []
        first = 0
        for work in works:
            work.row.has_state |= work.row.slots is not None
            results.append(_settle(work, answers, first))
            first += len(work.offsets)
            if shift:
                _keep_state_before_block(work, hidden)
        return results


def _settle(work: Work, answers: Answers, first: int) -> RowResult:
    """Apply the unmasking rule to one row; its answers start at index ``first``."""
    row, canvas, limits = work.row, work.row.canvas, work.row.request.diffusion
    row.steps += 1
    row.block_steps += 1
    confidence = answers.confidence[first : first + len(work.offsets)]
    if not all(map(math.isfinite, confidence)):
        return failed(row.request.id, "logits are not finite"), ()
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

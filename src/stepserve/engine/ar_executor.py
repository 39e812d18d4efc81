"""The autoregressive executor: chunks of prompts and decoded tokens in one forward pass.

There are no phases. A step executes the next inputs of a row, and one that reaches the last
known input samples the token after it (DynaServe 3.1), be that input the end of a prompt,
the token before, or the end of a text computed anew after a loss.
"""

import math
from collections.abc import Mapping

from torch import Tensor

from stepserve.core.errors import CapacityError, FieldError, StepserveError
from stepserve.core.ids import RequestId
from stepserve.core.payload import KvChunk, Payload, SettledToken
from stepserve.core.request import Family, Progress, Request
from stepserve.core.step import Step, StepKind, StepOutcome
from stepserve.engine.ar_inputs import AutoregressiveRow, Chunk, pack_ar, question
from stepserve.engine.diffusion_inputs import Packed
from stepserve.engine.kv_pages import checksums
from stepserve.engine.packed_executor import PackedExecutor, RowResult, failed
from stepserve.engine.sampling import Answers
from stepserve.engine.sequence import TokenSequence


class AutoregressiveExecutor(PackedExecutor[AutoregressiveRow, Chunk]):
    """Runs prefill and decode steps of an autoregressive model.

    Implements ``Executor`` and ``KvPages`` of ``core.protocols``. ``Progress.settled`` of its
    requests counts inputs whose keys and values are here, ``emitted`` the output tokens
    sampled. Pages are taken as steps and imports need them: how far a request will come on
    this instance is the scheduler's knowledge, which has reserved for it.
    """

    FAMILY = Family.AUTOREGRESSIVE

    def add(
        self,
        request: Request,
        payload: Payload,
        progress: Progress,
        settled: Mapping[int, int],
    ) -> None:
        """Hold a request, of which nothing is executed here yet (whatever ``progress`` says).

        ``settled`` maps output offsets to token ids already emitted. Until its first step here
        a request may be added again, with more of them, when it is handed over; what has been
        imported stays. Raises FieldError for a request that the model cannot run.
        """
        row = self._rows.get(request.id)
        self._check(request, payload, settled, again=row is not None and not row.started)
        sequence = TokenSequence(
            payload.prompt_ids,
            payload.sampling,
            limit=request.max_output_tokens,
            eos_token_ids=self.config.eos_token_ids,
            settled=settled,
        )
        length = request.prompt_tokens + request.max_output_tokens
        if length > self.config.max_positions:
            raise FieldError(
                "max_tokens",
                f"prompt and output take {length} positions, "
                f"the model has {self.config.max_positions}",
            )
        if row is None:
            self._rows[request.id] = AutoregressiveRow(request, sequence, self._pool.slots([], 0))
        else:
            row.sequence = sequence

    def export_kv(self, request_id: RequestId, epoch: int, start: int, stop: int) -> KvChunk:
        """A copy of positions ``[start, stop)`` in host memory, and its checksum per page.

        ``data`` is a contiguous tensor ``[layers, n, 2, kv_heads, head_dim]``. Called between
        batches, so it never has keys and values of a running step. Raises StepserveError for
        positions that are not computed.
        """
        kv = self.read_kv(request_id, start, stop)
        sums = checksums(kv, start, self._pool.page_tokens)
        return KvChunk(request_id, epoch, start, stop, sums, kv)

    def read_kv(self, request_id: RequestId, start: int, stop: int) -> Tensor:
        """What this rank holds of positions ``[start, stop)``: ``export_kv``'s data, own heads."""
        row = self._rows.get(request_id)
        if row is None or not 0 <= start < stop <= row.held:
            held = 0 if row is None else row.held
            raise StepserveError(f"{request_id}: inputs {start} to {stop} of {held} asked")
        return self._pool.kv.index_select(1, row.slots[start:stop]).cpu()

    def import_kv(self, chunk: KvChunk) -> bool:
        """Write a chunk, in any order, into pages of a request that has run no step here.

        The request goes on as if it had executed the inputs itself, up to the first gap. False,
        and nothing is written, for a chunk that is damaged or of another layout (page size,
        model, dtype), of a request that is not held or has started, and without free pages.
        Which hand-over a chunk belongs to is the caller's to check, by its epoch.
        """
        row, kv = self._rows.get(chunk.request_id), chunk.data
        if row is None or row.started or not isinstance(kv, Tensor):
            return False
        longest = row.request.prompt_tokens + row.request.max_output_tokens
        layers, _, _, _, head_dim = self._pool.kv.shape
        tokens, heads = chunk.stop - chunk.start, self.config.kv_heads
        if (
            not 0 <= chunk.start < chunk.stop <= longest
            or kv.shape != (layers, tokens, 2, heads, head_dim)
            or kv.dtype != self._dtype
            or checksums(kv, chunk.start, self._pool.page_tokens) != chunk.checksums
        ):
            return False
        own = kv[..., self._own_heads.start : self._own_heads.stop, :]
        return self.write_kv(chunk.request_id, chunk.start, chunk.stop, own)

    def write_kv(self, request_id: RequestId, start: int, stop: int, own: Tensor) -> bool:
        """Write the rank's own heads of a chunk that was found good; False without free pages."""
        row = self._rows[request_id]
        try:
            self._grow(row, stop)
        except CapacityError:
            return False
        self._pool.kv.index_copy_(1, row.slots[start:stop], own.to(self._device))
        row.landed.append((start, stop))
        for begin, end in sorted(row.landed):
            if begin <= row.held:
                row.held = max(row.held, end)
        return True

    def _plan(self, step: Step) -> Chunk | StepOutcome:
        row = self._rows.get(step.request_id)
        if row is None:
            return failed(step.request_id, "request is not held on this instance")
        if row.sequence.finished is not None:
            return _outcome(row, settled=0)
        if step.kind not in (StepKind.PREFILL, StepKind.DECODE):
            return failed(step.request_id, f"an autoregressive request has no {step.kind} steps")
        span = range(step.context_tokens - step.query_tokens, step.context_tokens)
        known = len(row.sequence)
        if not row.started:
            row.held = min(row.held, span.start)  # what the scheduler did not hear of landing
        if not span or span.start != row.held or span.stop > known:
            return failed(
                step.request_id,
                f"{step.kind} step over inputs {span.start} to {span.stop}, but {row.held} of "
                f"{known} are executed here",
            )
        if step.kind is StepKind.DECODE and (len(span) > 1 or span.stop < known):
            return failed(step.request_id, "a decode step executes the last token alone")
        try:
            self._grow(row, span.stop)
        except CapacityError as error:
            return failed(step.request_id, str(error))
        return Chunk(row, span)

    def _grow(self, row: AutoregressiveRow, tokens: int) -> None:
        room = len(row.pages) * self._pool.page_tokens
        if tokens > room:
            row.pages += self._pool.allocate(tokens - room)
            room = len(row.pages) * self._pool.page_tokens
            row.slots = self._pool.slots(row.pages, room)

    def _pack(self, works: list[Chunk]) -> Packed:
        return pack_ar(works, dtype=self._dtype, device=self._device)

    def _execute(self, works: list[Chunk]) -> list[RowResult]:
        hidden = self._hidden(works)
        asking = [chunk for chunk in works if chunk.samples]
        read = [chunk.base + len(chunk.span) - 1 for chunk in asking]
        answers = self._answers(hidden, read, [question(c.row.sequence) for c in asking])
        results: list[RowResult] = []
        asked = 0
        for chunk in works:
            chunk.row.held, chunk.row.started = chunk.span.stop, True
            if chunk.samples:
                results.append(_emit(chunk, answers, asked))
                asked += 1
            else:
                results.append((_outcome(chunk.row, settled=len(chunk.span)), ()))
        return results


def _emit(chunk: Chunk, answers: Answers, at: int) -> RowResult:
    """Append the token sampled at index ``at`` of the answers."""
    row, sequence = chunk.row, chunk.row.sequence
    if not math.isfinite(answers.confidence[at]):
        return failed(row.request.id, "logits are not finite"), ()
    logprob = None if sequence.sampling.logprobs is None else answers.logprobs[at]
    token = SettledToken(sequence.emitted, answers.tokens[at], logprob, answers.top.get(at, ()))
    sequence.append(token.token_id)
    return _outcome(row, settled=len(chunk.span)), (token,)


def _outcome(row: AutoregressiveRow, *, settled: int) -> StepOutcome:
    """``settled``: inputs that the step executed."""
    return StepOutcome(row.request.id, settled, row.sequence.emitted, row.sequence.finished)

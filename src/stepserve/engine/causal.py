"""The autoregressive executor: chunks of prompts and decoded tokens in one forward pass.

There are no phases. A step executes the next inputs of a row, and one that reaches the last
known input samples the token after it (dynaserve.md 3.1), be that input the end of a prompt,
the token before, or the end of a text computed anew after a loss.
"""

import math
from collections.abc import Mapping

from stepserve.core.errors import CapacityError, FieldError
from stepserve.core.payload import Payload, SettledToken
from stepserve.core.request import Family, Progress, Request
from stepserve.core.step import Step, StepKind, StepOutcome
from stepserve.engine.attention import PackedAttention
from stepserve.engine.causal_inputs import CausalRow, Chunk, pack_causal
from stepserve.engine.packed_executor import PackedExecutor, RowResult, failed
from stepserve.engine.sampling import Answers
from stepserve.engine.sequence import TokenSequence


class AutoregressiveExecutor(PackedExecutor[CausalRow, Chunk]):
    """Runs prefill and decode steps of a causal model; implements ``core.protocols.Executor``.

    ``Progress.settled`` of its requests counts inputs executed here, ``emitted`` the output
    tokens sampled. Pages are taken as steps need them: how far a request will come on this
    instance is the scheduler's knowledge, which has reserved for it.
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

        ``settled`` maps output offsets to token ids already emitted. Raises FieldError for a
        request that the model cannot run.
        """
        self._check(request, payload, settled)
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
        self._rows[request.id] = CausalRow(request, sequence, self._pool.slots([], 0))

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

    def _grow(self, row: CausalRow, tokens: int) -> None:
        room = len(row.pages) * self._pool.page_tokens
        if tokens > room:
            row.pages += self._pool.allocate(tokens - room)
            room = len(row.pages) * self._pool.page_tokens
            row.slots = self._pool.slots(row.pages, room)

    def _execute(self, works: list[Chunk]) -> list[RowResult]:
        packed = pack_causal(works, dtype=self._dtype, device=self._device)
        attend = PackedAttention(self._pool, packed.groups, packed.write)
        hidden = self.model.hidden(packed.token_ids, packed.positions, attend)
        answers = self._answers(hidden, packed.read, packed.asked)
        results: list[RowResult] = []
        asked = 0
        for chunk in works:
            chunk.row.held = chunk.span.stop
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


def _outcome(row: CausalRow, *, settled: int) -> StepOutcome:
    """``settled``: inputs that the step executed."""
    return StepOutcome(row.request.id, settled, row.sequence.emitted, row.sequence.finished)

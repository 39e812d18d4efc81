"""The diffusion model: each position has its token, and steps find out how sure it is of it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from stepserve.core.errors import StepserveError
from stepserve.core.payload import Payload, SettledToken
from stepserve.core.request import Progress, Request
from stepserve.core.step import Step, StepKind, StepOutcome
from stepserve.engine.canvas import Canvas
from stepserve.engine.unmasking import choose

from .hashes import END, MASK, HashExecutor, follow, key_of, letter, share


@dataclass(slots=True)
class Row:
    """What is held of a request. ``key``: that of its prompt; ``ready``: a heavy step was run."""

    request: Request
    payload: Payload
    canvas: Canvas
    key: bytes
    steps: int
    block_steps: int = 0
    ready: bool = False

    def token(self, offset: int) -> int:
        """A hash of the prompt and the offset: the same whatever threshold it is settled at."""
        sampling = self.payload.sampling
        early = offset < sampling.min_tokens
        forbidden = (END, *sampling.stop_token_ids) if early else ()
        if sampling.ignore_eos:
            forbidden = (END, *forbidden)
        return letter(follow(self.key, offset), self.payload, forbidden)

    def confidence(self, offset: int) -> float:
        """In a token; it changes with each position that is settled."""
        return share(follow(follow(self.key, offset), self.canvas.settled))


class HashDiffusion(HashExecutor[Row]):
    """Implements ``Executor``."""

    def add(
        self, request: Request, payload: Payload, progress: Progress, settled: Mapping[int, int]
    ) -> None:
        """See ``Executor.add``."""
        self.check(request, payload)
        if request.id in self.rows:
            raise StepserveError(f"request {request.id} is already held")
        ends = (END,)
        canvas = Canvas(
            request, payload.sampling, mask_token_id=MASK, eos_token_ids=ends, settled=settled
        )
        key = key_of(payload.prompt_ids)
        self.rows[request.id] = Row(request, payload, canvas, key, progress.steps)

    def step(self, row: Row, step: Step) -> tuple[StepOutcome, tuple[SettledToken, ...]]:
        """Settle positions of the current block that the model is sure of, but one at least."""
        canvas, limits = row.canvas, row.request.diffusion
        if step.kind not in (StepKind.RECOMPUTE, StepKind.CACHED) or step.threshold is None:
            raise StepserveError(f"no {step.kind} step at threshold {step.threshold} can be run")
        if step.kind is StepKind.CACHED and not row.ready:
            raise StepserveError("cached step, but nothing is cached on this instance")
        if canvas.finished is not None:
            return self._outcome(row, 0, 0), ()
        row.ready, block = True, canvas.block
        row.steps, row.block_steps = row.steps + 1, row.block_steps + 1
        asked = canvas.masked(block)
        for offset in asked:
            canvas.confidence[offset] = row.confidence(offset)
        candidates = [offset for offset in asked if canvas.candidate(offset)]
        capped = row.block_steps >= (limits.max_steps_per_block or math.inf)
        capped |= row.steps >= (limits.max_forwards or math.inf)
        sure = [canvas.confidence[offset] for offset in candidates]
        chosen, forced = choose(sure, step.threshold, capped)
        offsets = [candidates[index] for index in chosen]
        tokens = tuple(SettledToken(offset, row.token(offset)) for offset in offsets)
        canvas.settle({token.offset: token.token_id for token in tokens})
        if canvas.block != block:
            row.block_steps = 0
        return self._outcome(row, len(tokens), forced), tokens

    def _outcome(self, row: Row, settled: int, forced: int) -> StepOutcome:
        canvas, name = row.canvas, row.request.id
        summary = canvas.summary()
        return StepOutcome(name, settled, canvas.emitted, canvas.finished, summary, forced)

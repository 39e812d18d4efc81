"""Runs requests to their end without a scheduler: for tests, benchmarks and evaluations."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stepserve.core.ids import RequestId
from stepserve.core.payload import Payload, SettledToken
from stepserve.core.protocols import Executor
from stepserve.core.request import CacheMode, FinishReason, Progress, Request
from stepserve.core.step import Batch, Step, StepKind, StepOutcome


@dataclass(slots=True)
class Result:
    """How one request ended: its emitted tokens in order, and what it took."""

    tokens: list[SettledToken]
    finished: FinishReason | None
    steps: int = 0
    recomputes: int = 0
    forced: int = 0
    error: str | None = None

    @property
    def token_ids(self) -> list[int]:
        """Ids of the emitted tokens, the ending one included."""
        return [token.token_id for token in self.tokens]


def due_step(request: Request, settled: int, has_state: bool, threshold: float) -> Step:
    """The step that is due after ``settled`` output tokens.

    A recompute at the start of every ``refresh_blocks``-th block, without a cache, or when
    the instance holds no keys and values; else a cached step.
    """
    options, prompt = request.diffusion, request.prompt_tokens
    size = options.block_tokens
    canvas = -(-request.max_output_tokens // size) * size
    block, within = divmod(settled, size)
    refresh = within == 0 and block % options.refresh_blocks == 0
    if refresh or not has_state or options.cache_mode is CacheMode.NONE:
        return Step(request.id, StepKind.RECOMPUTE, prompt + canvas, prompt + canvas, threshold)
    queries = size if options.cache_mode is CacheMode.DUAL else canvas - block * size
    return Step(request.id, StepKind.CACHED, queries, prompt + canvas, threshold)


def denoise(
    executor: Executor,
    requests: Iterable[tuple[Request, Payload]],
    threshold: float | Mapping[RequestId, float] = 0.9,
) -> dict[RequestId, Result]:
    """Step all requests together, each until its end, and drop them from the executor."""
    held: dict[RequestId, Request] = {}
    tokens: dict[RequestId, dict[int, SettledToken]] = {}
    results: dict[RequestId, Result] = {}
    for request, payload in requests:
        executor.add(request, payload, Progress(settled=request.prompt_tokens), {})
        held[request.id] = request
        tokens[request.id] = {}
        results[request.id] = Result([], None)
    number = 0
    while held:
        steps = tuple(
            due_step(
                request,
                len(tokens[name]),
                results[name].recomputes > 0,
                threshold if isinstance(threshold, float) else threshold[name],
            )
            for name, request in held.items()
        )
        done = executor.run(Batch(number, steps))
        number += 1
        for step, outcome in zip(steps, done.outcomes, strict=True):
            name = step.request_id
            tokens[name].update((t.offset, t) for t in done.settled.get(name, ()))
            _record(results[name], step, outcome, tokens[name])
            if outcome.finished is not None:
                executor.remove(name)
                del held[name]
    return results


def _record(
    result: Result, step: Step, outcome: StepOutcome, tokens: Mapping[int, SettledToken]
) -> None:
    result.steps += 1
    result.recomputes += step.kind is StepKind.RECOMPUTE
    result.forced += outcome.forced
    result.finished, result.error = outcome.finished, outcome.error
    if outcome.finished is not None:
        result.tokens = [tokens[offset] for offset in range(outcome.emitted)]

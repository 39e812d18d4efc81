"""Runs requests to their end without a scheduler: for tests, benchmarks and evaluations."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from stepserve.core.denoising import due_step
from stepserve.core.ids import RequestId
from stepserve.core.payload import Payload, SettledToken
from stepserve.core.protocols import Executor
from stepserve.core.request import FinishReason, Progress, Request
from stepserve.core.step import Batch, Step, StepKind, StepOutcome

ThresholdRule = Callable[[Request, int], float]
"""Confidence threshold of a request's next step, given how many output tokens are settled."""


@dataclass(slots=True)
class Result:
    """How one request ended: its emitted tokens in order, and what it took.

    ``executed_tokens`` sums the query tokens of its steps.
    """

    tokens: list[SettledToken]
    finished: FinishReason | None
    steps: int = 0
    recomputes: int = 0
    executed_tokens: int = 0
    forced: int = 0
    error: str | None = None

    @property
    def token_ids(self) -> list[int]:
        """Ids of the emitted tokens, the ending one included."""
        return [token.token_id for token in self.tokens]


def denoise(
    executor: Executor,
    requests: Iterable[tuple[Request, Payload]],
    threshold: float | ThresholdRule = 0.9,
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
                threshold(request, len(tokens[name])) if callable(threshold) else threshold,
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
    result.executed_tokens += step.query_tokens
    result.forced += outcome.forced
    result.finished, result.error = outcome.finished, outcome.error
    if outcome.finished is not None:
        result.tokens = [tokens[offset] for offset in range(outcome.emitted)]

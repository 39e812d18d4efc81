"""Runs autoregressive requests to their end without a scheduler: for tests and benchmarks."""

from collections.abc import Callable, Iterable

from stepserve.core.ids import RequestId
from stepserve.core.payload import Payload
from stepserve.core.protocols import Executor
from stepserve.core.request import Progress, Request
from stepserve.core.step import Batch, Step, StepKind
from stepserve.engine.diffusion_offline import Result

ChunkRule = Callable[[Request, int], int]
"""Inputs to execute next, of so many outstanding ones; 0 sits the batch out."""


def everything(request: Request, outstanding: int) -> int:
    """The chunk rule that never cuts."""
    return outstanding


def generate(
    executor: Executor,
    requests: Iterable[tuple[Request, Payload]],
    chunk: ChunkRule = everything,
) -> dict[RequestId, Result]:
    """Step all requests together, each until its end, and drop them from the executor."""
    held: dict[RequestId, tuple[Request, int]] = {}  # with the inputs executed
    results: dict[RequestId, Result] = {}
    for request, payload in requests:
        executor.add(request, payload, Progress(), {})
        held[request.id] = (request, 0)
        results[request.id] = Result([], None)
    number = 0
    while held:
        due = [
            due_step(request, settled, len(results[name].tokens), chunk)
            for name, (request, settled) in held.items()
        ]
        steps = tuple(step for step in due if step.query_tokens > 0)
        if not steps:
            continue
        done = executor.run(Batch(number, steps))
        number += 1
        for step, outcome in zip(steps, done.outcomes, strict=True):
            name, result = step.request_id, results[step.request_id]
            request, settled = held[name]
            held[name] = (request, settled + outcome.settled)
            result.steps += 1
            result.executed_tokens += outcome.settled
            result.tokens += done.settled.get(name, ())
            result.finished, result.error = outcome.finished, outcome.error
            if outcome.finished is not None:
                executor.remove(name)
                del held[name]
    return results


def due_step(request: Request, settled: int, emitted: int, chunk: ChunkRule = everything) -> Step:
    """The next step of a request with ``settled`` inputs executed and ``emitted`` tokens."""
    outstanding = request.prompt_tokens + emitted - settled
    decode = emitted > 0 and outstanding == 1
    tokens = chunk(request, outstanding)
    kind = StepKind.DECODE if decode else StepKind.PREFILL
    return Step(request.id, kind, tokens, settled + tokens)

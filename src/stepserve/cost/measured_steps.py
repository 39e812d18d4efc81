"""Measures how long steps take on this machine, by tokens executed."""

import statistics
from collections.abc import Iterator

from stepserve.core.ids import RequestId
from stepserve.core.model import ModelFacts
from stepserve.core.payload import Payload
from stepserve.core.protocols import Executor
from stepserve.core.request import CacheMode, DiffusionOptions, Family, Progress, Request
from stepserve.core.step import Batch, Step, StepKind

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
FULL_TOKENS = 128
"""Prompt and canvas of every row: what a recompute step executes of it."""


def measure_steps(executor: Executor, facts: ModelFacts, repeats: int) -> dict[int, float]:
    """Median seconds of a batch of a diffusion model, by tokens executed.

    Each width of ``ROWS`` is timed for a recompute step (``FULL_TOKENS`` a row) and for the
    step after it over a block alone, of the default length. Where both execute equally many
    tokens the slower one counts.
    """
    block_tokens, measured = facts.default_block_length, dict[int, float]()
    for width in ROWS:
        runs = list(_runs(executor, facts, width, repeats + 1))[1:]  # the first warms up
        for column, tokens in enumerate((FULL_TOKENS * width, block_tokens * width)):
            seconds = statistics.median(run[column] for run in runs)
            measured[tokens] = max(seconds, measured.get(tokens, 0.0))
    return dict(sorted(measured.items()))


def _runs(
    executor: Executor, facts: ModelFacts, width: int, count: int
) -> Iterator[tuple[float, float]]:
    """Seconds of one recompute batch and of the cached batch after it, ``count`` times."""
    block_tokens = facts.default_block_length
    prompt = FULL_TOKENS - block_tokens
    mode = CacheMode.BLOCK if facts.block_causal else CacheMode.DUAL
    options = DiffusionOptions(block_tokens=block_tokens, cache_mode=mode)
    token = next(i for i in range(facts.vocab_size) if i != facts.mask_token_id)
    requests = [
        Request(
            RequestId(f"profile-{row}"),
            Family.DIFFUSION,
            "profile",
            prompt,
            block_tokens,
            0.0,
            diffusion=options,
        )
        for row in range(width)
    ]
    for _ in range(count):
        for request in requests:
            executor.add(request, Payload((token,) * prompt), Progress(settled=prompt), {})
        yield (
            _batch_seconds(executor, requests, StepKind.RECOMPUTE, FULL_TOKENS),
            _batch_seconds(executor, requests, StepKind.CACHED, block_tokens),
        )
        for request in requests:
            executor.remove(request.id)


def _batch_seconds(
    executor: Executor, requests: list[Request], kind: StepKind, query_tokens: int
) -> float:
    """At threshold 1 a step settles a single token, so two steps never finish a row."""
    steps = tuple(Step(r.id, kind, query_tokens, FULL_TOKENS, 1.0) for r in requests)
    result = executor.run(Batch(0, steps))
    failed = [outcome.error for outcome in result.outcomes if outcome.error]
    assert not failed, failed[0]
    return result.seconds

"""Measures how long steps take on this machine, by tokens executed."""

import statistics
from collections.abc import Iterator
from typing import Protocol

from stepserve.core.ids import RequestId
from stepserve.core.payload import Payload
from stepserve.core.protocols import Executor
from stepserve.core.request import CacheMode, DiffusionOptions, Family, Progress, Request
from stepserve.core.step import Batch, Step, StepKind

from .models.transformer import ModelConfig

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
FULL_TOKENS = 128
"""Prompt and canvas of every row: what a recompute step executes of it."""


class Measurable(Executor, Protocol):
    """An executor that tells the shape of its model."""

    config: ModelConfig


def measure(executor: Measurable, block_tokens: int, repeats: int) -> dict[int, float]:
    """Median seconds of a batch, by tokens executed.

    Each width of ``ROWS`` is timed for a recompute step (``FULL_TOKENS`` a row) and for the
    step after it over the block alone (``block_tokens`` a row). Where both execute equally many
    tokens the slower one counts.
    """
    measured: dict[int, float] = {}
    for width in ROWS:
        runs = list(_runs(executor, block_tokens, width, repeats + 1))[1:]  # the first warms up
        for column, tokens in enumerate((FULL_TOKENS * width, block_tokens * width)):
            seconds = statistics.median(run[column] for run in runs)
            measured[tokens] = max(seconds, measured.get(tokens, 0.0))
    return dict(sorted(measured.items()))


def _runs(
    executor: Measurable, block_tokens: int, width: int, count: int
) -> Iterator[tuple[float, float]]:
    """Seconds of one recompute batch and of the cached batch after it, ``count`` times."""
    prompt = FULL_TOKENS - block_tokens
    block_causal = executor.config.attention_block is not None
    mode = CacheMode.BLOCK if block_causal else CacheMode.DUAL
    options = DiffusionOptions(block_tokens=block_tokens, cache_mode=mode)
    token = next(i for i in range(executor.config.vocab_size) if i != executor.config.mask_token_id)
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
    executor: Measurable, requests: list[Request], kind: StepKind, query_tokens: int
) -> float:
    """At threshold 1 a step settles a single token, so two steps never finish a row."""
    steps = tuple(Step(r.id, kind, query_tokens, FULL_TOKENS, 1.0) for r in requests)
    result = executor.run(Batch(0, steps))
    failed = [outcome.error for outcome in result.outcomes if outcome.error]
    assert not failed, failed[0]
    return result.seconds

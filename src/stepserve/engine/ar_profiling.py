"""Measures how long autoregressive batches take on this machine, by what they are made of."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Protocol

from stepserve.core.ids import RequestId
from stepserve.core.payload import KvChunk, Payload
from stepserve.core.protocols import KvPages
from stepserve.core.request import Family, Progress, Request
from stepserve.core.step import Batch, Mix, Step, StepKind
from stepserve.engine.diffusion_profiling import Measurable

PREFILL_TOKENS = (0, 64, 256, 1024)
CONTEXT_TOKENS = (0, 128, 1024)
DECODES = (0, 1, 4, 16)


class MeasurableAutoregressive(Measurable, KvPages, Protocol):
    """One whose keys and values can be had and given."""


def measure_grid(
    executor: MeasurableAutoregressive,
    prefills: Sequence[int] = PREFILL_TOKENS,
    contexts: Sequence[int] = CONTEXT_TOKENS,
    decodes: Sequence[int] = DECODES,
    repeats: int = 5,
) -> list[tuple[Mix, float]]:
    """Median seconds of batches of one prefill chunk and some decodes (DynaServe 3.2).

    Each row of a batch, the chunk's too, attends over one of ``contexts`` held before. The
    context is computed once and imported by the others. Points that the model's positions or
    the pages have no room for are left out. Every row samples, so seconds are complete on
    devices that run behind. The executor must hold nothing.
    """
    points = []
    for context in contexts:
        held = _computed(executor, context) if context else None
        if context and held is None:
            continue
        for prefill, count in product(prefills, decodes):
            rows = [(StepKind.PREFILL, prefill)] * (prefill > 0)
            rows += [(StepKind.DECODE, 1)] * count
            if not rows:
                continue
            steps = tuple(
                Step(RequestId(f"profile-{i}"), kind, tokens, context + tokens)
                for i, (kind, tokens) in enumerate(rows)
            )
            runs = [_seconds(executor, steps, held) for _ in range(repeats + 1)]
            measured = [run for run in runs[1:] if run is not None]  # the first warms up
            if measured:
                points.append((Mix.of(steps), statistics.median(measured)))
    return points


def _computed(executor: MeasurableAutoregressive, tokens: int) -> KvChunk | None:
    """Keys and values of a prompt, if there is room for it and a token more."""
    step = Step(RequestId("profile"), StepKind.PREFILL, tokens, tokens)
    if not _add(executor, step):
        return None
    (outcome,) = executor.run(Batch(0, (step,))).outcomes
    held = None if outcome.error else executor.export_kv(step.request_id, 0, 0, tokens)
    executor.remove(step.request_id)
    return held


def _seconds(
    executor: MeasurableAutoregressive, steps: Sequence[Step], held: KvChunk | None
) -> float | None:
    """Seconds of the batch, whose rows start from ``held``; None if they do not fit."""
    try:
        for step in steps:
            if not _add(executor, step):
                return None
            if held and not executor.import_kv(replace(held, request_id=step.request_id)):
                return None
        result = executor.run(Batch(0, tuple(steps)))
        return None if any(outcome.error for outcome in result.outcomes) else result.seconds
    finally:
        for step in steps:
            executor.remove(step.request_id)


def _add(executor: MeasurableAutoregressive, step: Step) -> bool:
    """Hold a request whose prompt ends with the step; False if it is too long for the model."""
    prompt, token = step.context_tokens, executor.config.vocab_size // 2
    if prompt + 1 > executor.config.max_positions:
        return False
    request = Request(step.request_id, Family.AUTOREGRESSIVE, "profile", prompt, 1, 0.0)
    executor.add(request, Payload((token,) * prompt), Progress(), {})
    return True

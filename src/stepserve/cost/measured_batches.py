"""Measures how long autoregressive batches take on this machine, by what they are made of."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Protocol

from stepserve.core.errors import FieldError
from stepserve.core.ids import RequestId
from stepserve.core.model import ModelFacts
from stepserve.core.payload import KvChunk, Payload
from stepserve.core.protocols import Executor, KvPages
from stepserve.core.request import Family, Progress, Request
from stepserve.core.step import Batch, Mix, Step, StepKind
from stepserve.cost.batch_profile import BatchProfile

PREFILL_TOKENS = (0, 64, 256, 1024)
CONTEXT_TOKENS = (0, 128, 1024)
DECODES = (0, 1, 4, 16)


class HandingOver(Executor, KvPages, Protocol):
    """An executor whose keys and values can be had and given."""


def measure_profile(
    executor: Executor,
    facts: ModelFacts,
    machine: str,
    prefills: Sequence[int] = (0, 64, 256),
    contexts: Sequence[int] = (0, 128),
    decodes: Sequence[int] = (0, 1, 4),
    repeats: int = 2,
) -> BatchProfile:
    """The profile of an autoregressive model: by default of a few batches, in seconds.

    ``machine``: what the executor runs on. Raises FieldError if it does not hand over.
    """
    if not isinstance(executor, KvPages):
        raise FieldError("engine", f"it runs {facts.name} without handing requests over")
    steps = measure_grid(executor, facts, prefills, contexts, decodes, repeats)
    return BatchProfile.fitted(
        parameters=facts.parameters,
        layers=facts.layers,
        hidden=facts.hidden_size,
        kv_bytes_per_token=facts.kv_bytes_per_token,
        weight_bytes=facts.weight_bytes,
        steps=steps,
        source=f"measured: {facts.name}, {machine}, {len(steps)} batches",
    )


def measure_grid(
    executor: HandingOver,
    facts: ModelFacts,
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
        held = _computed(executor, facts, context) if context else None
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
            runs = [_seconds(executor, facts, steps, held) for _ in range(repeats + 1)]
            measured = [run for run in runs[1:] if run is not None]  # the first warms up
            if measured:
                points.append((Mix.of(steps), statistics.median(measured)))
    return points


def _computed(executor: HandingOver, facts: ModelFacts, tokens: int) -> KvChunk | None:
    """Keys and values of a prompt, if there is room for it and a token more."""
    step = Step(RequestId("profile"), StepKind.PREFILL, tokens, tokens)
    if not _add(executor, facts, step):
        return None
    (outcome,) = executor.run(Batch(0, (step,))).outcomes
    held = None if outcome.error else executor.export_kv(step.request_id, 0, 0, tokens)
    executor.remove(step.request_id)
    return held


def _seconds(
    executor: HandingOver, facts: ModelFacts, steps: Sequence[Step], held: KvChunk | None
) -> float | None:
    """Seconds of the batch, whose rows start from ``held``; None if they do not fit."""
    try:
        for step in steps:
            if not _add(executor, facts, step):
                return None
            if held and not executor.import_kv(replace(held, request_id=step.request_id)):
                return None
        result = executor.run(Batch(0, tuple(steps)))
        return None if any(outcome.error for outcome in result.outcomes) else result.seconds
    finally:
        for step in steps:
            executor.remove(step.request_id)


def _add(executor: HandingOver, facts: ModelFacts, step: Step) -> bool:
    """Hold a request whose prompt ends with the step; False if it is too long for the model."""
    prompt, token = step.context_tokens, facts.vocab_size // 2
    if prompt + 1 > facts.context_tokens:
        return False
    request = Request(step.request_id, Family.AUTOREGRESSIVE, "profile", prompt, 1, 0.0)
    executor.add(request, Payload((token,) * prompt), Progress(), {})
    return True

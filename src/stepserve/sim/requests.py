"""Draws what arrives in a run: from a named workload, fixed shapes, or a file.

Chance is drawn by the number of a request, in one stream for arrivals, one for lengths and one
for SLO classes. So every system sees the same requests, and another rate stretches the same
arrivals of the same requests. Block hashes of a file are kept, although no engine of ours reuses
prefixes yet: nothing acts on them.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from stepserve.core.errors import FieldError
from stepserve.core.request import SLO, Family, OnMiss

from .config import Workload
from .datasets import (
    ARRIVALS,
    DATASETS,
    LENGTHS,
    SimRequest,
    burstgpt_curve,
    published_run,
    requests_of,
)
from .experiment import Experiment
from .lengths import token_lengths
from .outside import is_outside, outside
from .workload import Arrival, RateCurve, mean_rate_per_s, read_trace, renewal, stretch

CLASSES = 3
"""Stream of chance of the SLO classes, beside those of ``datasets``."""


@functools.lru_cache(maxsize=4)
def _trace(file: str, timed: bool) -> tuple[Arrival, ...]:
    rows = read_trace(Path(file), timed=timed)
    if any(row.prompt_tokens is None or row.output_tokens is None for row in rows):
        raise FieldError("workload.file", f"{file} does not say how long prompts and outputs are")
    return rows


def draw(experiment: Experiment, rate_per_s: float, seed: int) -> tuple[SimRequest, ...]:
    """The requests of a run, in order of arrival. A rate of 0 is that of the recording.

    ``output_tokens`` of an autoregressive request is the length of its output, that of a
    diffusion request its limit.
    """
    workload = experiment.workload
    arrivals = _arrivals(workload, rate_per_s, seed)
    if workload.name:
        drawn = _of_name(workload.name, arrivals, seed)
    else:
        drawn = _of_rows(workload, arrivals, seed)
    if experiment.family is Family.AUTOREGRESSIVE:
        return tuple(_whole_answer(r) for r in drawn)
    block = experiment.setting.block_tokens
    return tuple(_padded(r, block) if workload.name not in DATASETS else r for r in drawn)


def _whole_answer(request: SimRequest) -> SimRequest:
    """An autoregressive request ends by itself."""
    answer = request.answer_tokens
    return request if answer is None else replace(request, output_tokens=answer, answer_tokens=None)


def _padded(request: SimRequest, block: int) -> SimRequest:
    """A diffusion request whose limit is its length in whole blocks."""
    length = request.output_tokens
    return replace(request, output_tokens=block * -(-length // block), answer_tokens=length)


def _arrivals(workload: Workload, rate_per_s: float, seed: int) -> Sequence[Arrival]:
    rng = np.random.default_rng([seed, ARRIVALS])
    if workload.arrivals == "recorded":
        rows = _trace(workload.file, timed=True)
        if rate_per_s:
            rows = stretch(rows, rate_per_s / mean_rate_per_s(rows))
        rows = rows[: workload.requests or None]
        until_s = workload.duration_s or np.inf
        return [row for row in rows if row.at_s < until_s]
    if workload.arrivals == "burstgpt":
        window_s = workload.window_s
        curve = burstgpt_curve(rate_per_s, window_s)
        return renewal(curve, 1.0, rng, duration_s=24 * window_s)
    cv = {"poisson": 1.0, "constant": 0.0, "gamma": workload.cv}[workload.arrivals]
    count = workload.requests_at(rate_per_s)
    return renewal(RateCurve.constant(rate_per_s), cv, rng, requests=count)


def _of_name(name: str, arrivals: Sequence[Arrival], seed: int) -> Sequence[SimRequest]:
    if name in DATASETS:
        return requests_of(name, arrivals, seed)
    lengths: Sequence[tuple[int, int]]
    if is_outside("workload", name):
        lengths = outside("workload", name, "workload.name").lengths(len(arrivals), seed)
    else:
        lengths = token_lengths(name, len(arrivals), seed)
    return [
        SimRequest(i, arrival.at_s, *both)
        for i, (arrival, both) in enumerate(zip(arrivals, lengths, strict=True))
    ]


def _of_rows(workload: Workload, arrivals: Sequence[Arrival], seed: int) -> Sequence[SimRequest]:
    """Fixed shapes, or rows of a file: those recorded, or drawn with replacement."""
    rows: Sequence[Arrival] = arrivals
    if workload.arrivals != "recorded":
        pool = [Arrival(0.0, *shape) for shape in workload.shapes] or _trace(workload.file, False)
        chosen = np.random.default_rng([seed, LENGTHS]).integers(len(pool), size=len(arrivals))
        rows = [pool[n] for n in chosen.tolist()]
    return [
        SimRequest(
            i,
            arrival.at_s,
            max(1, row.prompt_tokens or 0),
            max(1, row.output_tokens or 0),
            slo_class=row.slo_class,
            block_hashes=row.block_hashes,
        )
        for i, (arrival, row) in enumerate(zip(arrivals, rows, strict=True))
    ]


def slo_classes(experiment: Experiment, seed: int, drawn: Sequence[SimRequest]) -> list[int]:
    """The SLO class of each request: as its file says, else drawn by the shares.

    For a seed, that of the n-th is always the same. Raises FieldError for one that has no table.
    """
    names = [one.name for one in experiment.slo]
    edges = np.cumsum([one.share for one in experiment.slo])
    chance = np.random.default_rng([seed, CLASSES]).random(len(drawn)) * edges[-1]
    classes: list[int] = np.searchsorted(edges, chance, side="right").tolist()
    for i, request in enumerate(drawn):
        if request.slo_class:
            if request.slo_class not in names:
                raise FieldError("slo.name", f"no table for class {request.slo_class!r}")
            classes[i] = names.index(request.slo_class)
    return classes


def base_s(experiment: Experiment) -> float:
    """The unloaded latency that deadlines are multiples of; 0 if none is known."""
    setting, name = experiment.setting, experiment.workload.name
    if setting.base_s or experiment.family is Family.AUTOREGRESSIVE or name not in DATASETS:
        return setting.base_s
    return published_run(setting.model, name).base_s


def targets(experiment: Experiment, on_miss: OnMiss = OnMiss.DEGRADE) -> list[SLO]:
    """What requests of each SLO class ask for."""
    unit_s = base_s(experiment) * experiment.setting.slo_multiple
    return [
        SLO(
            slo_class=one.name,
            e2e_s=one.e2e_s or (unit_s * one.relative_deadline if unit_s else None),
            ttft_s=one.ttft_s,
            on_miss=on_miss,
            weight=one.weight,
            tbt_s=one.tbt_s,
        )
        for one in experiment.slo
    ]

"""The ``usage``, ``metrics`` and ``dlm`` objects of a reply (formulas: docs/api.md)."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from stepserve.core.protocols import RequestReport
from stepserve.core.request import Family
from stepserve.gateway.generation import Choice

_STATUS_ORDER = (
    "none",
    "met",
    "degraded",
    "missed",
)  # best first: a reply is as good as its worst choice


def usage(choices: Iterable[Choice]) -> dict[str, int]:
    """Token counts so far. A prompt counts once, however many samples it has."""
    choices = list(choices)
    prompt = sum(c.sample.request.prompt_tokens for c in choices if c.sample.first_of_prompt)
    completion = sum(len(c.text.tokens) for c in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def slo_status(choices: Sequence[Choice]) -> str:
    """``missed``, ``degraded`` (met below the preferred threshold), ``met`` or ``none``."""
    return max((_status(choice.report) for choice in choices), key=_STATUS_ORDER.index)


def timing(choices: Sequence[Choice]) -> dict[str, float | None]:
    """The ``metrics`` object in milliseconds. Several choices are taken as one answer."""
    arrival_s = choices[0].sample.request.arrival_s
    reports = _reports(choices)
    queue_s = min((report.queue_s for report in reports), default=0.0)
    events = sorted((e for c in choices for e in c.events), key=lambda event: event.at_s)
    gaps = [b.at_s - a.at_s for c in choices for a, b in itertools.pairwise(c.events)]
    first_s = events[0].at_s if events else None
    generation_s = events[-1].at_s - arrival_s - queue_s if events else 0.0
    tokens = sum(event.tokens for event in events)
    per_token = [report.tpot_s for report in reports if report.tpot_s is not None]
    return {
        "time_to_first_token_ms": None if first_s is None else _ms(first_s - arrival_s),
        "queue_time_ms": _ms(queue_s),
        "generation_time_ms": _ms(generation_s),
        "e2e_ms": _ms(max((report.e2e_s for report in reports), default=0.0)),
        "mean_itl_ms": _ms(sum(gaps) / len(gaps)) if gaps else None,
        "time_per_output_token_ms": _ms(sum(per_token) / len(per_token)) if per_token else None,
        "tokens_per_second": round(tokens / generation_s, 3) if generation_s > 0 else None,
    }


def denoising(choices: Sequence[Choice]) -> dict[str, Any]:
    """The ``dlm`` object: what the answer cost and the settings it was made with."""
    request = choices[0].sample.request
    reports = _reports(choices)
    forwards = sum(report.forwards for report in reports)
    tokens = sum(len(choice.text.tokens) for choice in choices)
    slacks = [report.slack_s for report in reports if report.slack_s is not None]
    common: dict[str, Any] = {
        "forwards": forwards,
        "tokens_per_forward": round(tokens / forwards, 3) if forwards else None,
        "migrations": sum(report.migrations for report in reports),
        "handovers": sum(report.handovers for report in reports),
        "paused_ms": _ms(max((report.paused_s for report in reports), default=0.0)),
        "queue_ms": _ms(max((report.queue_s for report in reports), default=0.0)),
        "slo_class": request.slo.slo_class,
        "slo_status": slo_status(choices),
        "slo_missed": sorted({name for report in reports for name in report.missed}),
        "deadline_ms": None if request.slo.e2e_s is None else _ms(request.slo.e2e_s),
        "slack_ms": _ms(min(slacks)) if slacks else None,
        "max_tokens": max(choice.sample.rules.max_tokens for choice in choices),
    }
    if request.family is not Family.DIFFUSION:
        return common
    minima = [r.threshold_min for r in reports if r.threshold_min is not None]
    means = [(r.threshold_mean, r.forwards) for r in reports if r.threshold_mean is not None]
    weight = sum(forwards for _, forwards in means)
    mode = request.diffusion.cache_mode
    return common | {
        "blocks": sum(report.blocks for report in reports),
        "block_length": request.diffusion.block_tokens,
        "threshold_min": min(minima, default=None),
        "threshold_mean": round(sum(m * f for m, f in means) / weight, 4) if weight else None,
        "forced_commits": sum(report.forced for report in reports),
        "cache": "exact" if mode.exact else mode.value,
    }


def _reports(choices: Sequence[Choice]) -> list[RequestReport]:
    return [choice.report for choice in choices if choice.report is not None]


def _status(report: RequestReport | None) -> str:
    if report is None or report.slo_met is None:
        return "none"
    if not report.slo_met:
        return "missed"
    return "degraded" if report.degraded else "met"


def _ms(seconds: float) -> float:
    assert math.isfinite(seconds)
    return round(seconds * 1e3, 3)

"""Latency of one answer, as formulas over when its text came.

A diffusion model commits several tokens at once, so "time per token" has two honest readings,
and both are here: the time between text events (what a reader sees), and the same time shared
out over the tokens of each event (what a token cost). Neither depends on how a server cuts its
text into chunks of a stream.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class TextEvent:
    """``tokens`` committed tokens became text at ``at_s``."""

    at_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class AnswerTrace:
    """When things happened to one request, in seconds on one clock.

    ``started_s``: its first step began. ``ended_s``: its last byte came. ``ok`` is false for a
    request that was refused or failed.
    """

    arrival_s: float
    events: tuple[TextEvent, ...]
    ended_s: float
    started_s: float | None = None
    ok: bool = True


def output_tokens(trace: AnswerTrace) -> int:
    """N = sum of tokens over the text events."""
    return sum(event.tokens for event in trace.events)


def e2e_s(trace: AnswerTrace) -> float:
    """E2E = ended - arrival."""
    return trace.ended_s - trace.arrival_s


def ttft_s(trace: AnswerTrace) -> float | None:
    """TTFT = first text event - arrival; ``None`` for an answer without text."""
    return trace.events[0].at_s - trace.arrival_s if trace.events else None


def tbt_s(trace: AnswerTrace) -> tuple[float, ...]:
    """TBT: each gap between one text event and the next."""
    return tuple(b.at_s - a.at_s for a, b in itertools.pairwise(trace.events))


def token_gaps_s(trace: AnswerTrace) -> tuple[float, ...]:
    """Each gap shared out over the tokens of the event that ends it: gap / tokens, per token.

    The tokens of the first event have no gap before them and are left out.
    """
    gaps = zip(tbt_s(trace), trace.events[1:], strict=True)
    return tuple(gap / event.tokens for gap, event in gaps for _ in range(event.tokens))


def tpot_s(trace: AnswerTrace) -> float | None:
    """TPOT = (last - first text event) / (N - tokens of the first event).

    ``None`` for an answer without tokens. For an answer in one event: (that event - first
    step) / N, with the arrival in place of the first step where that is unknown. So it is
    defined for every answer with text, and neither 0 nor infinite because of blocks.
    """
    if not output_tokens(trace):
        return None
    first, last = trace.events[0], trace.events[-1]
    later_tokens = output_tokens(trace) - first.tokens
    if later_tokens:
        return (last.at_s - first.at_s) / later_tokens
    begin_s = trace.arrival_s if trace.started_s is None else trace.started_s
    return (first.at_s - begin_s) / first.tokens


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` % of the values do not exceed.

    Always one of the values (nearest rank). Raises ValueError for no values.
    """
    if not values:
        raise ValueError("percentile of no values")
    return float(np.percentile(np.asarray(values, dtype=float), percent, method="inverted_cdf"))

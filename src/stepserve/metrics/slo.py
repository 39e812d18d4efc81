"""Service levels over many answers: attainment, goodput, capacity; and of single tokens.

Of tokens (DynaServe 3.10.5), an answer is the times at which its tokens came, in seconds on one
clock, in order. TBT of the k-th token, k >= 2, is t_k - t_(k-1), whichever instance made either
token: the gap of a hand-over is one of them. All gaps of all answers are pooled, so long answers
weigh more.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from stepserve.core.request import SLO
from stepserve.metrics.latency import (
    AnswerTrace,
    e2e_s,
    output_tokens,
    percentile,
    tbt_s,
    tpot_s,
    ttft_s,
)

Served = tuple[SLO, AnswerTrace]
Floats = NDArray[np.float64]


def meets(slo: SLO, trace: AnswerTrace) -> bool:
    """Whether the answer came at all and every target that was set is kept.

    E2E <= e2e_s, TTFT <= ttft_s, TPOT <= tpot_s, and P99 of the answer's own TBT <= tbt_s. An
    answer without text keeps all but the first.
    """
    return trace.ok and not missed(slo, trace)


def missed(slo: SLO, trace: AnswerTrace) -> tuple[str, ...]:
    """The targets that are not kept: ``e2e``, ``ttft``, ``tpot``, ``tbt``."""
    gaps_s = tbt_s(trace) if slo.tbt_s is not None else ()
    return slo.missed(
        e2e=e2e_s(trace),
        ttft=ttft_s(trace),
        tpot=tpot_s(trace),
        tbt=percentile(gaps_s, 99.0) if gaps_s else None,
    )


def attainment(served: Sequence[Served]) -> float | None:
    """Share of requests that meet their SLO: met / all, refused and failed ones included.

    ``None`` for no requests.
    """
    if not served:
        return None
    return sum(meets(slo, trace) for slo, trace in served) / len(served)


def goodput_requests_per_s(served: Sequence[Served], duration_s: float) -> float:
    """Requests that meet their SLO / duration."""
    return sum(meets(slo, trace) for slo, trace in served) / duration_s


def goodput_tokens_per_s(served: Sequence[Served], duration_s: float) -> float:
    """Output tokens of the requests that meet their SLO / duration."""
    return sum(output_tokens(trace) for slo, trace in served if meets(slo, trace)) / duration_s


def serving_capacity(attainment_at: Mapping[float, float], target: float) -> float | None:
    """Largest tried rate (requests/s) up to which every tried rate attains ``target``.

    ``None`` if the smallest rate already falls short.
    """
    capacity = None
    for rate in sorted(attainment_at):
        if attainment_at[rate] < target:
            break
        capacity = rate
    return capacity


def pooled_tbt_s(answers: Iterable[Sequence[float]]) -> Floats:
    """Every gap between two tokens of an answer, of all answers."""
    gaps = [np.diff(np.asarray(times_s, dtype=float)) for times_s in answers if len(times_s) > 1]
    return np.concatenate(gaps) if gaps else np.empty(0)


def tbt_attainment(tbt_s: Floats, limit_s: float) -> float | None:
    """#(TBT <= limit) / #TBT; ``None`` without any."""
    return float(np.mean(tbt_s <= limit_s)) if len(tbt_s) else None


def token_goodput_per_s(
    tbt_s: Floats, limit_s: float, duration_s: float, first_tokens: int = 0
) -> float:
    """(#(TBT <= limit) + first tokens) / duration.

    A first token has no gap before it. ``first_tokens``: those to be counted, which are those
    within a TTFT target, all of them, or none; published numbers do not say.
    """
    return (int(np.count_nonzero(tbt_s <= limit_s)) + first_tokens) / duration_s

"""Service levels over many answers: attainment, goodput, capacity, pooled gaps of tokens."""

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
    """Every gap between two tokens of an answer, of all answers (DynaServe 3.10.5).

    An answer is the times at which its tokens came, in seconds on one clock, in order. A gap counts
    whichever instances made its two tokens. Gaps are pooled, so long answers weigh more.
    """
    gaps = [np.diff(np.asarray(times_s, dtype=float)) for times_s in answers if len(times_s) > 1]
    return np.concatenate(gaps) if gaps else np.empty(0)

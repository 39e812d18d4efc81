"""What the boosted predictor is shown, and what it is to answer (DiLaServe B5).

The published features, eleven, in an order of our own: a *feature set* is the first so many of
them, so that the study of feature sets needs no second code path.

Deviation: the published requests always run to their full output length; ours may end at an
end-of-text token (DiLaServe E5), where the limit is known and the end is not. All
shares are therefore of the **reach**: the output limit, or, of a model whose requests mostly
end by themselves, at most the mean output length of those. Without early ends the reach is
the published output length. The feature "output length" stays the limit.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stepserve.core.errors import FieldError
from stepserve.core.request import Confidence, FinishReason
from stepserve.cost.step_log import Floats, Ints, StepRows

FEATURES = (
    "threshold",
    "output_tokens",
    "steps_share",  # (steps run + 1) / reach
    "unmasked_share",  # of the reach
    "block_share",  # block index / number of blocks in the reach
    "unmasked_in_block",  # share of the block
    "confidence_minimum",
    "confidence_p25",
    "confidence_median",
    "confidence_mean",
    "confidence_p75",
)
FEATURE_SETS = {"length": 2, "progress": 6, "confidence": 11}
"""Name -> number of leading features. The threshold is always one of them."""

FEWEST_REQUESTS = 50
ENDED = (FinishReason.STOP.value, FinishReason.LENGTH.value)
NO_CONFIDENCE = Confidence(0.0, 0.0, 0.0, 0.0, 0.0)


def feature_values(
    threshold: float,
    limit_tokens: int,
    block_tokens: int,
    reach: float,
    steps: int,
    unmasked: int,
    confidence: Confidence,
) -> tuple[float, ...]:
    """The features of one step that is about to run, in the order of ``FEATURES``."""
    block, inside = divmod(unmasked, block_tokens)
    return (
        threshold,
        limit_tokens,
        (steps + 1) / reach,
        unmasked / reach,
        block / -(-reach // block_tokens),
        inside / block_tokens,
        confidence.minimum,
        confidence.p25,
        confidence.median,
        confidence.mean,
        confidence.p75,
    )


def feature_matrix(rows: StepRows, reach: Floats) -> Floats:
    """``feature_values`` of every row; ``[rows, 11]``."""
    block, inside = np.divmod(rows.unmasked, rows.block_tokens)
    return np.column_stack(
        (
            rows.threshold,
            rows.limit_tokens,
            (rows.steps + 1) / reach,
            rows.unmasked / reach,
            block / np.ceil(reach / rows.block_tokens),
            inside / rows.block_tokens,
            rows.confidence,
        )
    )


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """Whole requests at fixed thresholds, ready to learn from.

    ``remaining``: steps left before each row's step, that step included. ``output``: emitted
    output tokens at the request's end. ``natural_tokens``: mean output length of requests
    that ended by themselves, if at least half did, else none. ``left_out``: requests that
    were not used, by reason.
    """

    rows: StepRows
    remaining: Ints
    output: Ints
    natural_tokens: float | None
    left_out: dict[str, int]

    @property
    def requests(self) -> int:
        """How many requests the rows are of."""
        return len(np.unique(self.rows.request))

    def reach(self) -> Floats:
        """What shares are of, per row: tokens."""
        natural = np.inf if self.natural_tokens is None else self.natural_tokens
        return np.minimum(self.rows.limit_tokens, natural)

    def part(self, chosen: NDArray[np.bool_]) -> "TrainingRows":
        """The rows of a mask that keeps requests whole."""
        return replace(
            self,
            rows=_part(self.rows, chosen),
            remaining=self.remaining[chosen],
            output=self.output[chosen],
        )


def training_rows(log: StepRows) -> TrainingRows:
    """Keep the requests that say how many steps the model needs at one fixed threshold.

    Left out, and counted: requests whose start or end is not in the log or that did not end by
    themselves (``incomplete``), those whose threshold changed (DiLaServe B5), and those whose steps
    were cut short by the client's own caps (several tokens forced at once; ours). Raises FieldError
    (``log``) if fewer than 50 requests remain.
    """
    starts = np.flatnonzero(np.diff(log.request, prepend=-1))
    counts = np.diff(starts, append=len(log.request))
    ends = starts + counts - 1
    within = np.arange(len(log.request)) - np.repeat(starts, counts)
    before = np.concatenate(([0], np.cumsum(log.settled)[:-1]))
    gap = (log.steps != within) | (log.unmasked != before - np.repeat(before[starts], counts))
    whole = ~np.logical_or.reduceat(gap, starts) & np.isin(log.finished[ends], ENDED)
    lowest = np.minimum.reduceat(log.threshold, starts)
    fixed = lowest == np.maximum.reduceat(log.threshold, starts)
    free = np.maximum.reduceat(log.forced, starts) <= 1
    good = whole & fixed & free
    left_out = {
        "incomplete": int(np.sum(~whole)),
        "threshold changed": int(np.sum(whole & ~fixed)),
        "capped": int(np.sum(whole & fixed & ~free)),
    }
    if np.sum(good) < FEWEST_REQUESTS:
        why = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        raise FieldError(
            "log",
            f"{np.sum(good)} of {len(starts)} requests can be learned from ({why}), "
            f"at least {FEWEST_REQUESTS} are needed",
        )
    stopped = log.finished[ends[good]] == FinishReason.STOP.value
    natural = float(np.mean(log.emitted[ends[good]][stopped])) if np.mean(stopped) >= 0.5 else None
    chosen = np.repeat(good, counts)
    remaining = np.repeat(counts, counts) - within
    output = np.repeat(log.emitted[ends], counts)
    rows = _part(log, chosen)
    return TrainingRows(rows, remaining[chosen], output[chosen], natural, left_out)


def split(rows: TrainingRows, seed: int, share: float = 0.8) -> tuple[TrainingRows, TrainingRows]:
    """Two parts that share no request; the first has ``share`` of them (DiLaServe B5: 80/20)."""
    ids = np.random.default_rng(seed).permutation(np.unique(rows.rows.request))
    first = np.isin(rows.rows.request, ids[: round(share * len(ids))])
    return rows.part(first), rows.part(~first)


def _part(rows: StepRows, chosen: NDArray[np.bool_]) -> StepRows:
    names = (n for n in StepRows.__dataclass_fields__ if n != "truncated")
    return replace(rows, **{name: getattr(rows, name)[chosen] for name in names})

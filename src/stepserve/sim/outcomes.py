"""How many steps a simulated request truly needs, and what each step settles.

Source: the published per-request step counts (DiLaServe D2, DiLaServe D3) and the confidence
summary a step reports (DiLaServe B4, DiLaServe C5). A request draws its five step counts, at
thresholds 0.9 to 0.5, jointly: for one request in four a lower threshold is *not* faster. The
counts are split over the blocks; a step at a threshold advances its block by one over the block's
count there, so a constant threshold takes exactly the drawn steps, and mixing thresholds inside a
request reproduces the published mixed curve (DiLaServe B3).

What is assumed, because nobody published it:

- Blocks of a request differ by ``block_sigma`` (log scale) and neighbours resemble each other,
  so that progress alone foretells the rest as badly as published (DiLaServe B5).
- Inside a block tokens settle evenly (the published samples are bursty, without a trend).
- Confidence of masked positions falls with the difficulty of what is left, seen through a
  noise that is redrawn per block, tuned to the published error with confidence.
  Both spreads are fitted in experiments/calibration; the shapes are ours.
- The recompute interval does not change the counts; its price is in ``sim/quality``.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stepserve.core.bounds import Bounded, FiniteNotNegative, FinitePositive
from stepserve.core.denoising import lead_tokens
from stepserve.core.errors import FieldError
from stepserve.core.ids import RequestId
from stepserve.core.request import Confidence, FinishReason, Request
from stepserve.core.step import Step, StepOutcome
from stepserve.sim.data import data_file, facts, rows_of

THRESHOLDS = (0.9, 0.8, 0.7, 0.6, 0.5)
MEAN_STEPS = (85.70, 67.05, 54.08, 44.83, 38.65)
"""Published means for 256 tokens in blocks of 32 (DiLaServe D2), in the order of ``THRESHOLDS``."""
COUNTED_TOKENS = 256
BLOCK_MEMORY = 0.7
"""Correlation of the log difficulty of neighbouring blocks."""
SETTLED_CONFIDENCE = 0.97
SUMMARY_TOKENS = 4
"""A new confidence summary is reported once so many tokens settled since the last one."""

ROUNDING = 1e-9


class StepCounts(Protocol):
    """Where the five step counts of a request come from."""

    def draw(self, rng: random.Random) -> tuple[float, ...]:
        """Steps for 256 tokens at each of ``THRESHOLDS``, drawn jointly."""
        ...


@dataclass(frozen=True, slots=True)
class RecordedCounts:
    """The published rows, drawn with replacement."""

    rows: tuple[tuple[float, ...], ...]

    def draw(self, rng: random.Random) -> tuple[float, ...]:
        """One row."""
        return self.rows[int(rng.random() * len(self.rows))]


@dataclass(frozen=True, slots=True)
class FittedCounts:
    """A joint log-normal fitted to the published rows: means and a factor of the covariance."""

    log_means: tuple[float, ...]
    log_factor: tuple[tuple[float, ...], ...]

    def draw(self, rng: random.Random) -> tuple[float, ...]:
        """A drawn row, unrounded."""
        normal = [rng.gauss(0.0, 1.0) for _ in self.log_means]
        return tuple(
            math.exp(mean + sum(f * z for f, z in zip(row, normal, strict=False)))
            for mean, row in zip(self.log_means, self.log_factor, strict=True)
        )


def recorded_counts() -> RecordedCounts | None:
    """The published rows, if the data folder has them."""
    path = data_file("dlm/gsm8k_steps_by_threshold.csv")
    if path is None:
        return None
    with rows_of(path) as table:
        rows = [tuple(float(r[f"t{t}"]) for t in THRESHOLDS) for r in table]
    return RecordedCounts(tuple(rows))


def fitted_counts() -> FittedCounts:
    """The model that ships with the package (``data/steps.json``, made by experiments)."""
    fit = facts("steps")
    return FittedCounts(tuple(fit["log_means"]), tuple(map(tuple, fit["log_factor"])))


def split(total: int, weights: Sequence[float], sizes: Sequence[int]) -> list[int]:
    """``total`` steps over blocks in proportion to ``weights``, each 1 to the block's tokens.

    A total that cannot be spread so is moved to the nearest that can.
    """
    total = min(max(total, len(sizes)), sum(sizes))
    unit = total / sum(weights, 0.0)
    counts = [min(s, max(1, round(unit * w))) for w, s in zip(weights, sizes, strict=True)]
    missing = total - sum(counts)
    while missing:
        sign = 1 if missing > 0 else -1
        room = [i for i, s in enumerate(sizes) if 1 <= counts[i] + sign <= s]
        # the block furthest from its share on the right side; ties to the first
        index = max(room, key=lambda i: (sign * (unit * weights[i] - counts[i]), -i))
        counts[index] += sign
        missing -= sign
    return counts


class Truth:
    """What is true of one request, and where it stands. It outlives migrations.

    ``counts[block][i]``: steps the block takes at ``THRESHOLDS[i]``; ``rates[block]``: share
    of the block a step advances, by threshold. ``settled`` counts output tokens.
    """

    __slots__ = (
        "block",
        "counts",
        "done",
        "end",
        "eos",
        "hardness_after",
        "hardness_of",
        "haze",
        "inside",
        "output",
        "quiet",
        "rates",
        "request_id",
        "settled",
        "sizes",
    )

    def __init__(
        self,
        request: Request,
        counts: list[tuple[int, ...]],
        sizes: list[int],
        haze: list[float],
        eos: int | None,
    ) -> None:
        self.request_id: RequestId = request.id
        self.output = request.max_output_tokens
        self.end = self.output if eos is None else min(eos, self.output)
        self.eos = eos is not None and eos <= self.output
        self.counts, self.sizes, self.haze = counts, sizes, haze
        self.rates = [{t: 1.0 / n for t, n in zip(THRESHOLDS, row, strict=True)} for row in counts]
        # steps against an average block of a token each, over all thresholds
        unit = [COUNTED_TOKENS / m / len(MEAN_STEPS) for m in MEAN_STEPS]
        self.hardness_of = [sum(n * u for n, u in zip(row, unit, strict=True)) for row in counts]
        self.hardness_after = [0.0] * len(counts)
        for block in range(len(counts) - 2, -1, -1):
            self.hardness_after[block] = (
                self.hardness_after[block + 1] + self.hardness_of[block + 1]
            )
        self.block = self.inside = self.settled = 0
        self.done = 0.0
        self.quiet = SUMMARY_TOKENS  # tokens settled since the last summary; the first is due

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps of the whole output at each of ``THRESHOLDS``."""
        return tuple(sum(column) for column in zip(*self.counts, strict=True))


@dataclass(frozen=True, slots=True)
class TraceOutcomes(Bounded):
    """The outcome model: truths of requests by number, and the effect of a step.

    ``difficulty`` multiplies all step counts of a workload (1: GSM8K on LLaDA-8B).
    ``block_sigma`` and ``haze_sigma`` are the log-scale spreads of blocks and of what the
    confidence shows of them. The same ``seed`` gives the same truths to every system.
    """

    seed: int
    counts: StepCounts = field(default_factory=lambda: recorded_counts() or fitted_counts())
    difficulty: FinitePositive = 1.0
    block_sigma: FiniteNotNegative = 1.0
    haze_sigma: FiniteNotNegative = 0.25

    def start(self, request: Request, index: int, eos_tokens: int | None = None) -> Truth:
        """The truth of the workload's ``index``-th request, whatever ran before it.

        ``eos_tokens``: the output ends by itself once so many tokens are settled; ``None``
        runs to the full length, as published (DiLaServe B1). Raises FieldError below 1.
        """
        if eos_tokens is not None and eos_tokens < 1:
            raise FieldError("eos_tokens", "must be at least 1")
        rng = random.Random(f"{self.seed}/{index}")
        block, output = request.diffusion.block_tokens, request.max_output_tokens
        starts = range(-lead_tokens(request), output, block)
        sizes = [min(at + block, output) - max(at, 0) for at in starts]
        drawn = self.counts.draw(rng)
        scale = self.difficulty_of(index) * output / COUNTED_TOKENS
        drift = self._drift(rng, len(sizes))
        weights = [s * math.exp(z) for s, z in zip(sizes, drift, strict=True)]
        haze = [math.exp(rng.gauss(0.0, self.haze_sigma)) for _ in sizes]
        by_threshold = [split(round(n * scale), weights, sizes) for n in drawn]
        return Truth(request, list(zip(*by_threshold, strict=True)), sizes, haze, eos_tokens)

    def difficulty_of(self, index: int) -> float:
        """That of the ``index``-th request."""
        return self.difficulty

    def _drift(self, rng: random.Random, blocks: int) -> list[float]:
        """Log difficulty of each block: neighbours resemble each other."""
        fresh = self.block_sigma * math.sqrt(1.0 - BLOCK_MEMORY**2)
        drift = [rng.gauss(0.0, self.block_sigma)]
        while len(drift) < blocks:
            drift.append(BLOCK_MEMORY * drift[-1] + rng.gauss(0.0, fresh))
        return drift

    def step(self, truth: Truth, step: Step) -> StepOutcome:
        """Advance a request by one step. Blocks are denoised in order.

        Settles at least one token and none beyond the block; the confidence summary comes
        with the first step and then every 4 tokens, for it costs as much as the step.
        Raises FieldError for a step without a threshold.
        """
        block, inside = truth.block, truth.inside
        rate = truth.rates[block].get(step.threshold)  # type: ignore[arg-type]
        if rate is None:
            rate = _between(truth, block, step.threshold)
        size, done = truth.sizes[block], truth.done + rate
        if done >= 1.0 - ROUNDING:
            settled = size - inside
            _open_block(truth, block + 1, step.threshold, (done - 1.0) / rate)
        else:
            settled = int(size * done + ROUNDING) - inside
            if settled < 1:
                settled = 1
            truth.inside, truth.done = inside + settled, done
        total = truth.settled = truth.settled + settled
        truth.quiet += settled
        confidence = None
        if truth.quiet >= SUMMARY_TOKENS:
            truth.quiet = 0
            confidence = summary(truth)
        if total < truth.end:
            return StepOutcome(truth.request_id, settled, total, None, confidence)
        reason = FinishReason.STOP if truth.eos else FinishReason.LENGTH
        return StepOutcome(truth.request_id, settled, truth.end, reason, confidence)


def _open_block(truth: Truth, block: int, threshold: float | None, surplus: float) -> None:
    """Begin a block. Of the step that ended the last one, a mixed block left ``surplus``."""
    truth.block, truth.inside, truth.done = block, 0, 0.0
    if surplus > ROUNDING and block < len(truth.rates):
        rate = truth.rates[block].get(threshold)  # type: ignore[arg-type]
        truth.done = surplus * (_between(truth, block, threshold) if rate is None else rate)


def _between(truth: Truth, block: int, threshold: float | None) -> float:
    """The rate at any other threshold: counts are linear between known ones. Remembered."""
    if threshold is None:
        raise FieldError("threshold", "a denoising step needs one")
    rate = 1.0 / _count(truth.counts[block], threshold)
    truth.rates[block][threshold] = rate
    return rate


def mean_steps(threshold: float) -> float:
    """The published mean for ``COUNTED_TOKENS`` at a threshold."""
    return _count(MEAN_STEPS, threshold)


def _count(counts: Sequence[float], threshold: float) -> float:
    """Steps of a block at a threshold; beyond 0.5 and 0.9 those of the nearest."""
    if threshold >= THRESHOLDS[0]:
        return counts[0]
    for high in range(len(THRESHOLDS) - 1):
        if threshold >= THRESHOLDS[high + 1]:
            span = THRESHOLDS[high] - THRESHOLDS[high + 1]
            share = (THRESHOLDS[high] - threshold) / span
            return counts[high] + share * (counts[high + 1] - counts[high])
    return counts[-1]


def true_remaining(truth: Truth, threshold: float) -> float:
    """Steps until the request finishes if all run at this threshold: an oracle's answer.

    Exact for outputs that run to full length; within one step where an end-of-text token
    stops the request inside a block.
    """
    steps, at = 0.0, truth.settled - truth.inside
    for block in range(truth.block, len(truth.sizes)):
        if at >= truth.end:
            break
        share = min(1.0, (truth.end - at) / truth.sizes[block])
        if block == truth.block:
            share -= truth.done
        steps += max(0, math.ceil(share * _count(truth.counts[block], threshold) - 1e-6))
        at += truth.sizes[block]
    return steps


def summary(truth: Truth) -> Confidence:
    """Five numbers over the confidence of all output positions (DiLaServe B4), modelled.

    Settled positions are sure. Masked ones are spread evenly between 0 and twice a mean that
    falls with the hardness of what is left: the steps it takes against an average request.
    """
    masked = truth.output - truth.settled
    if masked <= 0:
        return Confidence(*(SETTLED_CONFIDENCE,) * 5)
    block = truth.block
    left = truth.hardness_after[block] + (1.0 - truth.done) * truth.hardness_of[block]
    mean = 0.5 / (1.0 + left / masked * truth.haze[block])
    share = masked / truth.output
    slope, sure = 2.0 * mean / share, SETTLED_CONFIDENCE
    return Confidence(
        mean / masked,
        slope * 0.25 if share > 0.25 else sure,
        slope * 0.5 if share > 0.5 else sure,
        share * mean + (1.0 - share) * sure,
        slope * 0.75 if share > 0.75 else sure,
    )

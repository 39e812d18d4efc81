"""How long a batch of autoregressive steps takes: a roofline, then a grid that learns.

Source: DynaServe 3.2 (a fill-in there: the paper names a table of prefill tokens, context and
decodes, no more). A cell stands for (prefill tokens, mean context of a decode, decodes); between
cells seconds are linear in each. Deviations:

- A cell keeps the *ratio* of what was measured to the roofline, not seconds, so that cells nobody
  has seen share what the others have learned (a common ratio). Beyond the grid the roofline's
  difference to its edge is added; contexts below 128 count as 128.
- A batch teaches all cells around it: their ratios move so that the prediction moves by the
  learning rate (normalised least mean squares). The nearest cell alone would be off by up to half
  the distance to the next.
- Query-key pairs beyond those of one prompt from its start (``pctx`` of DynaServe 3.2) cost a rate
  of their own, which is learned too.
- Monotone repair tells cells seen from others: the former are made to rise by a running maximum,
  the latter are held between the former. A running maximum over all would lift what was measured
  to what was guessed wherever time is flat.
- The cache of DynaServe 3.2 is the repaired grid itself, and beside it the probes asked since it
  was made: it is made anew when a cell moves by 5 %, and at least every ``SHOW_EVERY`` batches.
- Of seconds 5 times the predicted ones, ``DROPPED_IN_A_ROW`` are dropped, the next is taken: a
  roofline that is that wrong must heal.
- What is kept between two runs of a server are measured batches (``BatchProfile``), not cells:
  they are learned anew, whatever the grid has become.
"""

import functools
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepserve.core.instance import InstanceSpec
from stepserve.core.step import Mix
from stepserve.cost.roofline import Roofline

PREFILLS = (0, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
DECODES = (0, 1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
SHAPE = (len(PREFILLS), len(CONTEXTS), len(DECODES))
PREFILL_STRIDE, CONTEXT_STRIDE = SHAPE[1] * SHAPE[2], SHAPE[2]
UNSEEN = 1.15  # what the roofline is multiplied by in plans, while ...
FEW = 3.0  # ... a cell has taken part in fewer batches than this
SEEN = 0.5  # batches from which on a cell's own ratio counts, not the common one
FIRST_DEVIATION = (UNSEEN - 1.0) / 2.0
SLOW_RATE, FAST_RATE, COMMON_RATE = 0.1, 0.3, 0.02  # fast for the first FAST_STEPS
LEAST_RATIO = 0.01  # one that repair holds above what is measured would fall for ever
PAIR_RATE = 0.5  # pairs are a small part of most batches
FAST_STEPS = 8.0
OUTLIER = 5.0
DROPPED_IN_A_ROW = 8
MOVED = 0.05
SHOW_EVERY = 64
PROBES = 4096  # kept between two repairs
ERRORS = 4096  # that ``accuracy`` looks back on

Grid = NDArray[np.float64]


@functools.cache
def _prior(line: Roofline) -> tuple[float, ...]:
    """The roofline at every cell; prefill is one prompt from its start."""
    return tuple(
        line.seconds(Mix(p, p * (p + 1) // 2, d, c * d))
        for p in PREFILLS
        for c in CONTEXTS
        for d in DECODES
    )


class Accuracy(NamedTuple):
    """Relative errors of the means predicted for the latest batches, before these were learned.

    ``covered``: share of them that took no longer than planned; ``dropped``: outliers, which
    are not among ``steps``. Errors are 0 where there are no steps.
    """

    steps: int
    median: float
    p95: float
    covered: float
    dropped: int

    @property
    def passes(self) -> bool:
        """The gate of DynaServe 3.2, on at least one batch."""
        return self.steps > 0 and self.median < 0.08 and self.p95 < 0.20


class Spot(NamedTuple):
    """Where a batch lies: its lowest cell, how far to the next of each axis, and what is left.

    ``beyond_s``: what the roofline adds from the edge of the grid on, arithmetic and memory one
    after the other (so that it grows along both axes). ``pairs``: query-key pairs more than those
    of one prompt from its start (several short ones have fewer, which is left to the cells).
    """

    cell: int
    prefill: float
    context: float
    decodes: float
    beyond_s: float
    pairs: float

    def between(self, cells: Sequence[float]) -> float:
        """Trilinear: a value of the cells at this spot."""
        i, p, c, d, _, _ = self
        j, k, n = i + CONTEXT_STRIDE, i + PREFILL_STRIDE, i + PREFILL_STRIDE + CONTEXT_STRIDE
        near = cells[i] + d * (cells[i + 1] - cells[i])
        near += c * (cells[j] + d * (cells[j + 1] - cells[j]) - near)
        far = cells[k] + d * (cells[k + 1] - cells[k])
        far += c * (cells[n] + d * (cells[n + 1] - cells[n]) - far)
        return near + p * (far - near)

    def weights(self) -> list[tuple[int, float]]:
        """The cells around, with their shares in ``between``; those of no share left out."""
        return [
            (self.cell + k + j + i, p * c * d)
            for k, p in ((0, 1.0 - self.prefill), (PREFILL_STRIDE, self.prefill))
            for j, c in ((0, 1.0 - self.context), (CONTEXT_STRIDE, self.context))
            for i, d in ((0, 1.0 - self.decodes), (1, self.decodes))
            if p * c * d > 0.0
        ]


class Surface:
    """The grid of one tensor-parallel degree."""

    def __init__(self, line: Roofline) -> None:
        self.line = line
        self.common, self.pair_s, self.steps = 1.0, line.pair_s, 0
        self.prior = _prior(line)
        self.ratio = [1.0] * len(self.prior)
        self.deviation = [FIRST_DEVIATION] * len(self.prior)
        self.count = [0.0] * len(self.prior)
        self.show()

    def show(self) -> None:
        """Make what is read of what was learned: ``mean`` and ``planned``, both repaired."""
        prior, count = np.array(self.prior).reshape(SHAPE), np.array(self.count).reshape(SHAPE)
        ratio = np.array(self.ratio).reshape(SHAPE)
        count[:, :, 0], ratio[:, :, 0] = count[:, :1, 0], ratio[:, :1, 0]  # no decode, no context
        deviation = np.array(self.deviation).reshape(SHAPE)
        deviation[:, :, 0] = deviation[:, :1, 0]
        mean = _repaired(prior * ratio, count >= SEEN, prior * self.common)
        high = ratio * (1.0 + 2.0 * deviation)
        planned = _repaired(prior * high, count >= FEW, prior * (self.common * UNSEEN))
        raw = prior * np.where(count < SEEN, self.common, ratio)
        self.lift: list[float] = (mean / raw).ravel().tolist()  # what the repair did
        self.mean: list[float] = mean.ravel().tolist()
        self.planned: list[float] = np.maximum(mean, planned).ravel().tolist()
        self.shown: list[float] = np.where(count < SEEN, 0.0, high).ravel().tolist()
        self.shown_pair_s, self.shown_common = self.pair_s, self.common
        self.probes: dict[Mix, float] = {}
        self.unshown = 0

    def _factor(self, cell: int) -> float:
        """What moves when a cell does; 0 while it is not looked at."""
        if self.count[cell] < SEEN:
            return 0.0
        return self.ratio[cell] * (1.0 + 2.0 * self.deviation[cell])

    def spot(self, mix: Mix) -> Spot:
        """Where the batch lies on the grid, or nearest to it."""
        prefill, pairs, decodes, context = mix
        mean = context / decodes if decodes else 128.0
        beyond_s = 0.0
        if prefill > 4096 or decodes > 256 or mean > 32768.0:
            p, d, c = min(prefill, 4096), min(decodes, 256), min(mean, 32768.0)
            line = self.line
            own = line.terms(Mix(prefill, prefill * (prefill + 1) // 2, decodes, context))
            edge = line.terms(Mix(p, p * (p + 1) // 2, d, round(d * c)))
            beyond_s = (own[0] - edge[0]) / line.flops_per_s + (own[1] - edge[1]) / line.bytes_per_s
        else:
            p, d, c = prefill, decodes, mean
        c = max(c, 128.0)
        i = bisect_right(PREFILLS, p, 1, SHAPE[0] - 1) - 1
        j = bisect_right(CONTEXTS, c, 1, SHAPE[1] - 1) - 1
        k = bisect_right(DECODES, d, 1, SHAPE[2] - 1) - 1
        return Spot(
            i * PREFILL_STRIDE + j * CONTEXT_STRIDE + k,
            (p - PREFILLS[i]) / (PREFILLS[i + 1] - PREFILLS[i]),
            (c - CONTEXTS[j]) / (CONTEXTS[j + 1] - CONTEXTS[j]),
            (d - DECODES[k]) / (DECODES[k + 1] - DECODES[k]),
            beyond_s,
            max(0.0, pairs - prefill * (prefill + 1) / 2.0),
        )

    def planned_s(self, mix: Mix) -> float:
        """Mean and twice the deviation: what to plan with."""
        seconds = self.probes.get(mix)
        if seconds is None:
            if len(self.probes) >= PROBES:
                self.probes.clear()
            spot = self.spot(mix)
            seconds = spot.between(self.planned) + self.shown_pair_s * spot.pairs
            seconds += UNSEEN * self.shown_common * spot.beyond_s
            self.probes[mix] = seconds
        return seconds

    def mean_s(self, mix: Mix) -> float:
        """Seconds expected."""
        spot = self.spot(mix)
        seconds = spot.between(self.mean) + self.shown_pair_s * spot.pairs
        return seconds + self.shown_common * spot.beyond_s

    def learn(self, spot: Spot, seconds: float) -> None:
        """Take ``seconds`` into account; they count as ``OUTLIER`` predicted ones at most."""
        corners = spot.weights()
        parts = [
            w
            * self.prior[i]
            * (self.common if self.count[i] < SEEN else self.ratio[i])
            * self.lift[i]
            for i, w in corners
        ]
        pairs_s, beyond_s = self.pair_s * spot.pairs, self.common * spot.beyond_s
        mean = sum(parts) + pairs_s + beyond_s
        error = min(seconds / mean, OUTLIER) - 1.0
        parts_sq = sum([part * part for part in (*parts, pairs_s, beyond_s)])
        scale = error * mean / parts_sq
        moved = False
        for (cell, weight), part in zip(corners, parts, strict=True):
            count = self.count[cell]
            if count < SEEN:
                self.ratio[cell] = self.common
            rate = FAST_RATE if count < FAST_STEPS else SLOW_RATE
            moved_to = self.ratio[cell] * (1.0 + rate * scale * part)
            self.ratio[cell] = max(moved_to, LEAST_RATIO)
            if count >= FEW:
                self.deviation[cell] += rate * weight * (abs(error) - self.deviation[cell])
            self.count[cell] = count + weight
            moved |= abs(self._factor(cell) - self.shown[cell]) > MOVED * self.shown[cell]
        rate = FAST_RATE if self.steps < FAST_STEPS else COMMON_RATE
        guess = sum([w * self.prior[i] for i, w in corners]) + pairs_s + spot.beyond_s
        self.common += rate * (min(seconds / guess, OUTLIER * self.common) - self.common)
        self.pair_s *= 1.0 + PAIR_RATE * scale * pairs_s
        moved |= abs(self.common - self.shown_common) > MOVED * self.shown_common
        self.steps += 1
        self.unshown += 1
        if moved or self.unshown >= SHOW_EVERY:
            self.show()


def _repaired(values: Grid, known: NDArray[np.bool_], guess: Grid) -> Grid:
    """Seconds that fall along neither tokens nor decodes.

    Known ones are lifted to the largest of those below; guessed ones, which rise by themselves,
    are held between the known below and above.
    """
    low = np.where(known, values, 0.0)
    for axis in (0, 2):
        low = np.maximum.accumulate(low, axis=axis)
    high = np.where(known, low, np.inf)
    for axis in (0, 2):
        high = np.flip(np.minimum.accumulate(np.flip(high, axis), axis=axis), axis)
    repaired: Grid = np.minimum(np.maximum(guess, low), high)
    return repaired


class BatchTable:
    """A ``CostModel`` of autoregressive batches, one grid per tensor-parallel degree.

    Every scheduler owns its own. Seconds run from the end of one batch to the end of the next,
    without the time between that the instance was idle.
    """

    def __init__(self, lines: Mapping[int, Roofline]) -> None:
        self._surfaces = {degree: Surface(line) for degree, line in lines.items()}
        self._errors: deque[tuple[float, bool]] = deque(maxlen=ERRORS)
        self._dropped = self._in_a_row = 0

    def step_time_s(
        self, tokens: int, rows: int, spec: InstanceSpec, mix: Mix | None = None
    ) -> float:
        """The planning value: see ``CostModel.step_time_s``, ``mean_s`` and ``Surface``.

        Raises KeyError for a degree without a roofline.
        """
        if tokens <= 0:
            return 0.0
        if mix is None:
            mix = _one_prefill(tokens)
        return self._surfaces[spec.tp_degree].planned_s(mix)

    def mean_s(self, mix: Mix, spec: InstanceSpec) -> float:
        """Seconds expected of a batch, with no allowance for the spread; 0 for an empty one."""
        if mix.prefill_tokens + mix.decodes <= 0:
            return 0.0
        return self._surfaces[spec.tp_degree].mean_s(mix)

    def observe(
        self, tokens: int, rows: int, spec: InstanceSpec, seconds: float, mix: Mix | None = None
    ) -> None:
        """Hold the prediction against what was measured, then learn from it."""
        if tokens <= 0 or seconds <= 0.0:
            return
        mix = _one_prefill(tokens) if mix is None else mix
        surface = self._surfaces[spec.tp_degree]
        predicted = surface.mean_s(mix)
        if seconds > OUTLIER * predicted and self._in_a_row < DROPPED_IN_A_ROW:
            self._dropped += 1
            self._in_a_row += 1
            return
        self._in_a_row = 0
        error = abs(seconds - predicted) / seconds
        self._errors.append((error, seconds <= surface.planned_s(mix)))
        surface.learn(surface.spot(mix), seconds)

    def accuracy(self) -> Accuracy:
        """How good the predictions were; percentiles are nearest ranks."""
        errors = sorted(error for error, _ in self._errors)
        n = len(errors)
        if not n:
            return Accuracy(0, 0.0, 0.0, 0.0, self._dropped)
        covered = sum(held for _, held in self._errors) / n
        return Accuracy(
            n, errors[(n - 1) // 2], errors[-(-95 * n // 100) - 1], covered, self._dropped
        )


def _one_prefill(tokens: int) -> Mix:
    return Mix(tokens, tokens * (tokens + 1) // 2)

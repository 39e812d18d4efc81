"""One request on two instances, cut where both are busy equally long (DynaServe 3.5).

Per pair of instances a bounded bisection over the share of the request that comes first, from
the prompt's on. A cut must gain something over staying on one instance. Deviations: (a) only
instances with room for the whole request are looked at, so that the first can usually go on
alone; (b) of those, the eight with the fewest running tokens, then by drain time; (c)
targets of other requests are unknown, so batches are held against this one's; (d) TTFT targets,
where not ignored (published); (e) if no plan keeps every target, the one that misses by the least;
(f) ``epsilon`` and ``gain`` are shares of the request's own time alone: beside what busy instances
hold, every two sides are level, and nothing is gained by any cut.
"""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from stepserve.core.config import TokenConfig
from stepserve.core.forecast import StepForecast
from stepserve.core.ids import InstanceId
from stepserve.core.instance import ClusterView, InstanceLoad, InstanceSpec, Work
from stepserve.core.protocols import Placement, SegmentCost
from stepserve.core.request import Progress, Request
from stepserve.core.segment import Segment

SHORTLIST = 8
PUSHED_DECODES = 16  # decoded tokens whose keys and values are pushed together (DynaServe 3.7)
LEAST_SHARE = 0.05  # of the time for prefills; a starved one gets a small chunk now and then
# Ranks of two instances: the first with the second, with the third, ..., in both orders.
PAIRS = sorted(itertools.permutations(range(SHORTLIST), 2), key=sum)


def snap(cut: int, known: int, total: int, page: int, least: int) -> int:
    """The cut to use: whole pages in the ``known`` inputs, degenerate ones moved (DynaServe 3.1).

    0 and ``total`` mean that one side has nothing to do; the last token is never executed.
    """
    least = max(2 * page, least)
    if cut < least:
        return 0
    if abs(cut - known) <= page:  # also for a short output: plain disaggregation
        return known if known < total - 1 else total
    if total - 1 - cut < least:
        return total
    return cut - cut % page if cut < known else cut


def tile(request: Request, cut: int, instances: tuple[InstanceId, ...]) -> tuple[Segment, ...]:
    """One open segment on the first instance, or with a cut two."""
    if not cut:
        return (Segment(request.id, 0, 0, None, instances[0], epoch=0),)
    first = Segment(request.id, 0, 0, cut, instances[0], epoch=0)
    return first, Segment(request.id, 1, cut, None, instances[1], epoch=0)


class _Side(NamedTuple):
    """A candidate instance, as it is without the request."""

    drain_s: float
    id: InstanceId
    spec: InstanceSpec
    held: tuple[Work, ...]
    tbt_s: float
    backlog_s: float = 0.0  # until the prefills are done; all of mean length


class _Plan(NamedTuple):
    """Fields in the order of ``better``: feasible (no ``excess``), shorter, level, least moved."""

    excess: float  # share by which the worst target is missed
    longest_s: float
    apart_s: float
    cut: int  # 0: all on the first instance
    instances: tuple[InstanceId, InstanceId]
    seconds: tuple[float, float]
    tbt_s: float


class TandemSplit:
    """A ``PlacementPolicy`` of one or two segments; ties by instance id."""

    def __init__(self, cost: SegmentCost, options: TokenConfig) -> None:
        self._cost, self._options = cost, options

    def place(
        self, request: Request, progress: Progress, forecast: StepForecast, view: ClusterView
    ) -> Placement:
        """See ``PlacementPolicy.place``. ``predicted_s`` are T1 and T2 of DynaServe 3.5."""
        options, slo = self._options, request.slo
        output = math.ceil(forecast.output_tokens) + options.margin_tokens
        output = max(min(output, request.max_output_tokens), progress.emitted + 1)
        known, total = request.prompt_tokens + progress.emitted, request.prompt_tokens + output
        timed = options.ttft == "respect" and not progress.emitted
        ttft_s = (slo.ttft_s if timed else None) or math.inf
        waited_s, tbt_s = view.at_s - request.arrival_s, slo.tbt_s or options.tbt_s
        search = _Search(self._cost, options, known, total, tbt_s, ttft_s, waited_s)
        sides = sorted(map(search.side, itertools.islice(view.loads.values(), SHORTLIST)))
        best = min(search.plan(side, side, total) for side in sides)
        pairs = [pair for pair in PAIRS if max(pair) < len(sides)][: options.pairs]
        own_s = best.apart_s  # what it adds to that instance
        cuts = (plan for a, b in pairs for plan in search.cuts(sides[a], sides[b], own_s))
        cut = min(cuts, default=best)
        shorter = cut.longest_s < best.longest_s - options.gain * own_s
        if (shorter and cut.excess <= best.excess) or cut.excess < (
            1.0 - options.gain
        ) * best.excess:
            best = cut
        seconds = best.seconds if best.cut else best.seconds[:1]
        times = ", ".join([f"T{n} {t:.3f} s" for n, t in enumerate(seconds, 1)])
        missed = ", misses a target" if best.excess else ""
        why = f"s={best.cut or total} of {total}, {times}, TBT {best.tbt_s:.3f} s{missed}"
        return Placement(tile(request, best.cut, best.instances), seconds, best.tbt_s, why)


class _Search(NamedTuple):
    """Plans for one request: ``known`` inputs of ``total``, none executed where it goes."""

    cost: SegmentCost
    options: TokenConfig
    known: int
    total: int
    tbt_s: float
    ttft_s: float  # infinite without a target
    waited_s: float

    def side(self, load: InstanceLoad) -> _Side:
        """An instance with what is asked of it more than once."""
        held, spec, cost = load.work, load.spec, self.cost
        drain_s, tbt_s = cost.seconds(held, None, spec), cost.tbt_s(held, None, spec)
        side = _Side(drain_s, spec.id, spec, held, tbt_s)
        rows = [row for row in held if row.prefill_tokens] if self.ttft_s < math.inf else []
        if not rows:
            return side
        prefill, context, _ = [sum(column) // len(rows) for column in zip(*rows, strict=True)]
        mean_s = self.prefill_s(side, Work(int(prefill), int(context), 0.0))
        return side._replace(backlog_s=len(rows) * mean_s)

    def cuts(self, a: _Side, b: _Side, own_s: float) -> Iterator[_Plan]:
        """The plans that the bisection comes by, ``a`` first; ``own_s``: of the request alone."""
        known, total, options, page = self.known, self.total, self.options, a.spec.page_tokens
        low, high, share = 0.0, 1.0, known / total
        for _ in range({"any": options.probes, "prompt": 1, "none": 0}[options.cut]):
            cut = snap(round(share * total), known, total, page, options.least_segment_tokens)
            plan = self.plan(a, b, cut)
            if plan.cut:
                yield plan
            low, high = (low, share) if plan.seconds[0] > plan.seconds[1] else (share, high)
            share = (low + high) / 2
            if plan.apart_s <= options.epsilon * own_s or (high - low) * total < page:
                return

    def plan(self, a: _Side, b: _Side, stop: int) -> _Plan:
        """The first ``stop`` inputs on ``a``, the others on ``b``."""
        alpha, beta, cut = self.work(0, stop), self.work(stop, self.total), stop % self.total
        seconds, of_batch = self.cost.seconds, self.cost.tbt_s
        t1 = seconds(a.held, alpha, a.spec)
        t2 = seconds(b.held, beta, b.spec) if stop < self.total else b.drain_s
        b_tbt_s = of_batch(b.held, beta, b.spec) if beta.decode_tokens else b.tbt_s
        a_tbt_s = of_batch(a.held, alpha, a.spec) if alpha.decode_tokens else a.tbt_s
        gap_s = tbt_s = max(a_tbt_s, b_tbt_s)
        first_s = a.backlog_s + self.prefill_s(a, alpha)
        if cut:
            last = self.options.chunk_tokens if cut <= self.known else PUSHED_DECODES
            last = cut if self.options.push == "serial" else min(cut, last)
            exposed_s = self.cost.transfer_s(last)
            t2 += exposed_s
            if cut >= self.known:  # the first instance emits, then the second
                gap_s = max(gap_s, exposed_s + b_tbt_s)
            else:  # the first token is the second instance's
                first_s = max(first_s + exposed_s, b.backlog_s) + self.prefill_s(b, beta)
        late = (self.waited_s + first_s) / self.ttft_s
        excess = max(0.0, gap_s / self.tbt_s - 1.0, late - 1.0)
        return _Plan(excess, max(t1, t2), abs(t1 - t2), cut, (a.id, b.id), (t1, t2), tbt_s)

    def work(self, start: int, stop: int) -> Work:
        """Inputs ``[start, stop)``: prefill of the known ones, then a decode each."""
        decodes = min(stop, self.total - 1) - max(start, self.known)
        return Work(max(0, min(stop, self.known) - start), start, float(max(0, decodes)))

    def prefill_s(self, side: _Side, work: Work) -> float:
        """Seconds that prefilling ``work`` adds, beside decodes; 0 without a TTFT target."""
        if self.ttft_s == math.inf:
            return 0.0
        prefill = work._replace(decode_tokens=0.0)
        added_s = self.cost.seconds(side.held, prefill, side.spec) - side.drain_s
        return added_s / max(LEAST_SHARE, 1.0 - side.tbt_s / self.tbt_s)

"""What a request costs on one or two instances, and the cuts worth a look (DynaServe 3.5)."""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from stepserve.core.config import ControlConfig
from stepserve.core.ids import InstanceId
from stepserve.core.instance import InstanceLoad, InstanceSpec, Work
from stepserve.core.protocols import SegmentCost
from stepserve.core.request import Request
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


class Side(NamedTuple):
    """A candidate instance, as it is without the request."""

    drain_s: float
    id: InstanceId
    spec: InstanceSpec
    held: tuple[Work, ...]
    tbt_s: float
    backlog_s: float = 0.0  # until the prefills are done; all of mean length


class Plan(NamedTuple):
    """Fields in the order of ``better``: feasible (no ``excess``), shorter, level, least moved."""

    excess: float  # share by which the worst target is missed
    longest_s: float
    apart_s: float
    cut: int  # 0: all on the first instance
    instances: tuple[InstanceId, InstanceId]
    seconds: tuple[float, float]
    tbt_s: float


class Search(NamedTuple):
    """Plans for one request: ``known`` inputs of ``total``, none executed where it goes."""

    cost: SegmentCost
    control: ControlConfig
    known: int
    total: int
    tbt_s: float
    ttft_s: float  # infinite without a target
    waited_s: float

    def side(self, load: InstanceLoad) -> Side:
        """An instance with what is asked of it more than once."""
        held, spec, cost = load.work, load.spec, self.cost
        drain_s, tbt_s = cost.seconds(held, None, spec), cost.tbt_s(held, None, spec)
        side = Side(drain_s, spec.id, spec, held, tbt_s)
        rows = [row for row in held if row.prefill_tokens] if self.ttft_s < math.inf else []
        if not rows:
            return side
        prefill, context, _ = [sum(column) // len(rows) for column in zip(*rows, strict=True)]
        mean_s = self.prefill_s(side, Work(int(prefill), int(context), 0.0))
        return side._replace(backlog_s=len(rows) * mean_s)

    def cuts(
        self, a: Side, b: Side, least_tokens: int, probes: int, near_s: float
    ) -> Iterator[Plan]:
        """The plans that the bisection comes by, ``a`` first, until both end within ``near_s``."""
        known, total, page = self.known, self.total, a.spec.page_tokens
        low, high, share = 0.0, 1.0, known / total
        for _ in range(probes):
            cut = snap(round(share * total), known, total, page, least_tokens)
            plan = self.plan(a, b, cut)
            if plan.cut:
                yield plan
            low, high = (low, share) if plan.seconds[0] > plan.seconds[1] else (share, high)
            share = (low + high) / 2
            if plan.apart_s <= near_s or (high - low) * total < page:
                return

    def plan(self, a: Side, b: Side, stop: int) -> Plan:
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
            last = self.control.chunk_tokens if cut <= self.known else PUSHED_DECODES
            last = min(cut, last) if self.control.push_pages else cut
            exposed_s = self.cost.transfer_s(last)
            t2 += exposed_s
            if cut >= self.known:  # the first instance emits, then the second
                gap_s = max(gap_s, exposed_s + b_tbt_s)
            else:  # the first token is the second instance's
                first_s = max(first_s + exposed_s, b.backlog_s) + self.prefill_s(b, beta)
        late = (self.waited_s + first_s) / self.ttft_s
        excess = max(0.0, gap_s / self.tbt_s - 1.0, late - 1.0)
        return Plan(excess, max(t1, t2), abs(t1 - t2), cut, (a.id, b.id), (t1, t2), tbt_s)

    def work(self, start: int, stop: int) -> Work:
        """Inputs ``[start, stop)``: prefill of the known ones, then a decode each."""
        decodes = min(stop, self.total - 1) - max(start, self.known)
        return Work(max(0, min(stop, self.known) - start), start, float(max(0, decodes)))

    def prefill_s(self, side: Side, work: Work) -> float:
        """Seconds that prefilling ``work`` adds, beside decodes; 0 without a TTFT target."""
        if self.ttft_s == math.inf:
            return 0.0
        prefill = work._replace(decode_tokens=0.0)
        added_s = self.cost.seconds(side.held, prefill, side.spec) - side.drain_s
        return added_s / max(LEAST_SHARE, 1.0 - side.tbt_s / self.tbt_s)

"""How long an instance is busy with the segments it holds and one more: two definitions.

Source: DynaServe 3.4 (both are fill-ins: the paper does not define its T1 and T2).
``Occupancy`` adds up machine time, ``Elapsed`` plays through to the end. Deviations of
``Occupancy``:

- Rates are taken once per instance and held work (of a chunk of M tokens, of a decode beside the
  D there are), not anew for every chunk and step; a segment then costs a few multiplications,
  and never less than a part of it.
- A decode beside others costs what ``SLOPE`` more of them would, by the piece: the difference
  of one is lost in the noise of a learned table.
- What is held is counted at the same rates. The first decode of an instance is priced like the
  second, though all weights are read for it: an idle instance would seem a bad place for a
  long answer, and busy ones would fill up (2,048 / 512 tokens: mean E2E 29 s instead of 18).
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stepserve.core.bounds import Bounded, Count, NotNegative, Positive, Share
from stepserve.core.errors import FieldError
from stepserve.core.instance import InstanceSpec, Work
from stepserve.core.protocols import Parts
from stepserve.core.step import Mix

REFRESH = 64  # questions after which one instance is looked at anew: the cost model learns
SLOPE = 8
MOST_EVENTS = 200  # that ``Elapsed`` plays
NEAR, FAR = 1024, 8192  # contexts between which rates are taken as linear


class Rates(NamedTuple):
    """Seconds of one more prefill token or query-key pair of it, decode step or token attended to.

    None is negative.
    """

    token_s: float
    pair_s: float
    step_s: float
    context_s: float

    def seconds(self, work: Work) -> float:
        """Machine time of a segment: its contexts grow by one with every token."""
        prefill, context, decode = work
        filled = context + prefill
        seconds = prefill * (self.token_s + self.pair_s * (context + prefill / 2.0))
        return seconds + decode * (self.step_s + self.context_s * (filled + decode / 2.0))


class Held(NamedTuple):
    """What is known of an instance's work until it changes; contexts are those halfway."""

    work: Sequence[Work]
    decodes: int
    context: float
    rates: Rates
    backlog_s: float


def _halfway(work: Work) -> float:
    """Context of the segment's decode when half of it is done."""
    return work.context_tokens + work.prefill_tokens + work.decode_tokens / 2.0


class _Segments:
    """What both definitions share: the budget of a batch, TBT, transfer, and what is kept."""

    @dataclass(frozen=True, slots=True)
    class Options(Bounded):
        """What batches look like. Give the values that the batching policy has."""

        tbt_s: Positive | None = None  # target of a batch, else control.tbt_s; inf for static_chunk
        safety: Share = 0.95  # see tbt_budget
        overhead_s: NotNegative = 0.001  # see tbt_budget
        least_chunk_tokens: Count = 64  # see tbt_budget

    def __init__(self, options: Options, parts: Parts) -> None:
        """Raises FieldError where keys and values have no link to be copied over."""
        if parts.link is None:
            raise FieldError("control.segment_cost", "needs a link between instances")
        control = parts.control
        tbt_s = control.tbt_s if options.tbt_s is None else options.tbt_s
        self._cost, self._link = parts.cost, parts.link
        self._limit_s = tbt_s * options.safety - options.overhead_s
        self._chunk_tokens, self._least_tokens = control.chunk_tokens, options.least_chunk_tokens
        self._held: dict[str, Held] = {}
        self._budgets: dict[tuple[int, int, int], int] = {}
        self._asked = 0

    def tbt_s(self, held: Sequence[Work], added: Work | None, spec: InstanceSpec) -> float:
        """See ``SegmentCost.tbt_s``. Contexts are those halfway through each decode.

        Segments still to be prefilled count: their decodes are to come.
        """
        known = self._known(held, spec)
        decodes, context = known.decodes, known.context
        if added is not None and added.decode_tokens > 0.0:
            decodes, context = decodes + 1, context + _halfway(added)
        return self._decode_s(decodes, context, spec)

    def transfer_s(self, tokens: int) -> float:
        """See ``SegmentCost.transfer_s``."""
        return self._link.seconds(tokens)

    def _known(self, held: Sequence[Work], spec: InstanceSpec) -> Held:
        self._asked += 1
        if self._asked % REFRESH == 0 and self._held:
            del self._held[next(iter(self._held))]  # the oldest: not all in one placement
        if self._asked % (16 * REFRESH) == 0:
            self._budgets.clear()
        known = self._held.get(spec.id)
        if known is None or (known.work is not held and known.work != held):
            self._held.pop(spec.id, None)  # becomes the newest
            known = self._held[spec.id] = self._look(held, spec)
        return known

    def _look(self, held: Sequence[Work], spec: InstanceSpec) -> Held:
        decodes, context = 0, 0.0
        prefill = pairs = steps = attended = 0.0  # as in Rates.seconds, of all together
        for filling, behind, decode in held:
            prefill += filling
            pairs += filling * (behind + filling / 2.0)
            if decode > 0.0:
                halfway = behind + filling + decode / 2.0
                decodes, context = decodes + 1, context + halfway
                steps, attended = steps + decode, attended + decode * halfway
        rates = self._rates(decodes, context, spec)
        parts = zip(rates, (prefill, pairs, steps, attended), strict=True)
        return Held(held, decodes, context, rates, sum([rate * n for rate, n in parts]))

    def _rates(self, decodes: int, context: float, spec: InstanceSpec) -> Rates:
        chunk = self._budget(decodes, context, spec)
        pairs = chunk * (chunk + 1) // 2
        base_s = self._decode_s(decodes, context, spec)
        chunk_s = self._batch_s(chunk, pairs, decodes, context, spec)
        late_s = self._batch_s(chunk, pairs + chunk * FAR, decodes, context, spec)
        pair_s = max(0.0, late_s - chunk_s) / (chunk * FAR)
        token_s = max(0.0, (chunk_s - base_s) / chunk - pair_s * chunk / 2.0)
        beside, attended = (decodes, context) if decodes else (1, float(NEAR))
        beside_s = self._decode_s(beside, attended, spec)
        near_s, far_s = (
            max(0.0, self._decode_s(beside + SLOPE, attended + SLOPE * c, spec) - beside_s) / SLOPE
            for c in (NEAR, FAR)
        )
        context_s = max(0.0, far_s - near_s) / (FAR - NEAR)
        return Rates(token_s, pair_s, max(0.0, near_s - context_s * NEAR), context_s)

    def _decode_s(self, decodes: int, context: float, spec: InstanceSpec) -> float:
        return self._batch_s(0, 0, decodes, context, spec)

    def _batch_s(
        self, prefill: int, pairs: int, decodes: int, context: float, spec: InstanceSpec
    ) -> float:
        mix = Mix(prefill, pairs, decodes, round(context))
        rows = decodes + (prefill > 0)
        return self._cost.step_time_s(prefill + decodes, rows, spec, mix)

    def _budget(self, decodes: int, context: float, spec: InstanceSpec) -> int:
        """Prefill tokens that fit beside the decodes (M of DynaServe 3.3), in whole pages.

        ``least_chunk_tokens`` where nothing fits: prefill that starves is let in by that much.
        Contexts are told apart by 256 tokens.
        """
        step = int(context / decodes) >> 8 if decodes else 0
        key = spec.tp_degree, decodes, step
        budget = self._budgets.get(key)
        if budget is None:
            total = decodes * ((step << 8) + 128)
            low, high = 0, self._chunk_tokens // spec.page_tokens  # in pages; low is let in
            while low < high:
                pages = (low + high + 1) // 2
                n = pages * spec.page_tokens
                if self._batch_s(n, n * (n + 1) // 2, decodes, total, spec) <= self._limit_s:
                    low = pages
                else:
                    high = pages - 1
            budget = max(low * spec.page_tokens, self._least_tokens)
            self._budgets[key] = budget
        return budget


class Occupancy(_Segments):
    """A ``SegmentCost``: machine time of everything held, and of the segment added."""

    def seconds(self, held: Sequence[Work], added: Work | None, spec: InstanceSpec) -> float:
        """See ``SegmentCost.seconds``."""
        known = self._known(held, spec)
        if added is None:
            return known.backlog_s
        return known.backlog_s + known.rates.seconds(added)


class Elapsed(_Segments):
    """A ``SegmentCost``: time until everything held, and the segment added, is done.

    Batches of all decodes and M tokens of prefill, first come first served, until the next
    segment begins or ends to decode; shares of a batch count as such. After ``MOST_EVENTS``
    what is left is taken at the pace reached. Unlike ``Occupancy`` every question plays it all
    through, and nothing is promised but that added work never takes less than none.
    """

    def _look(self, held: Sequence[Work], spec: InstanceSpec) -> Held:
        return super()._look(held, spec)._replace(backlog_s=self._play(held, spec))

    def seconds(self, held: Sequence[Work], added: Work | None, spec: InstanceSpec) -> float:
        """See ``SegmentCost.seconds``."""
        known = self._known(held, spec)
        if added is None:
            return known.backlog_s
        return max(known.backlog_s, self._play((*held, added), spec))

    def _play(self, works: Sequence[Work], spec: InstanceSpec) -> float:
        """Seconds until all is done, played in batches: a decode ends by a batch's number."""
        filling = [work for work in reversed(works) if work.prefill_tokens]
        decoding = [  # (batch that is its last, its context at batch 0)
            (work.decode_tokens, float(work.context_tokens))
            for work in works
            if not work.prefill_tokens and work.decode_tokens > 0.0
        ]
        heapq.heapify(decoding)
        context = sum([start for _, start in decoding])
        seconds = batch = done = 0.0  # done: tokens of the prefill that is first
        for _ in range(MOST_EVENTS):
            if not filling and not decoding:
                return seconds
            chunk, span, behind = 0, math.inf, 0.0
            if decoding:
                span = decoding[0][0] - batch
            if filling:
                chunk = self._budget(len(decoding), context + len(decoding) * batch, spec)
                span = min(span, (filling[-1].prefill_tokens - done) / chunk)
                behind = filling[-1].context_tokens + done + span * chunk / 2.0
            attended = context + len(decoding) * (batch + span / 2.0)
            pairs = round(chunk * behind)
            seconds += span * self._batch_s(chunk, pairs, len(decoding), attended, spec)
            batch, done = batch + span, done + span * chunk
            if filling and done >= filling[-1].prefill_tokens - 1e-6:
                work, done = filling.pop(), 0.0
                if work.decode_tokens > 0.0:
                    start = work.context_tokens + work.prefill_tokens - batch
                    heapq.heappush(decoding, (batch + work.decode_tokens, start))
                    context += start
            while decoding and decoding[0][0] <= batch + 1e-6:
                context -= heapq.heappop(decoding)[1]
        tokens = sum([work.prefill_tokens for work in filling]) - done
        last = max([end for end, _ in decoding], default=batch)
        last = max([last, *(batch + work.decode_tokens for work in filling)])
        rates = self._rates(len(decoding), context + len(decoding) * batch, spec)
        step_s = self._decode_s(len(decoding), context + len(decoding) * batch, spec)
        return seconds + tokens * rates.token_s + (last - batch) * step_s

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
from dataclasses import dataclass

from stepserve.core.bounds import Bounded, Count, NotNegative, Whole
from stepserve.core.errors import FieldError
from stepserve.core.forecast import StepForecast
from stepserve.core.instance import ClusterView
from stepserve.core.protocols import Parts, Placement
from stepserve.core.request import Family, Progress, Request

from .split_search import PAIRS, SHORTLIST, Plan, Search, Side, tile

LEAST_TTFT_S = 1e-3  # of a target that has passed: the sooner the better


class TandemSplit:
    """A ``PlacementPolicy`` of one or two segments; ties by instance id."""

    family = Family.AUTOREGRESSIVE
    reads_work = True

    @dataclass(frozen=True, slots=True)
    class Options(Bounded):
        """The search for a cut, and what a cut must be worth."""

        probes: Count = 6  # most cuts tried for a pair of instances
        epsilon: NotNegative = 0.05  # sides so close (share of the request's time) end the search
        gain: NotNegative = 0.6  # share of the request's time that a cut must save; published: 0.05
        margin_tokens: Whole = 20  # added to the predicted output length
        least_segment_tokens: Whole = 64  # shorter segments are not made
        pairs: Count = 4  # ordered pairs of instances that are looked at
        ignore_ttft: bool = False  # false: no cut that misses a TTFT target; published: true

    def __init__(self, options: Options, parts: Parts) -> None:
        """Raises FieldError where there is no segment cost."""
        if parts.segment_cost is None:
            raise FieldError("control.placement", "tandem_split needs a segment cost")
        self._cost, self._control, self._options = parts.segment_cost, parts.control, options

    def place(
        self, request: Request, progress: Progress, forecast: StepForecast, view: ClusterView
    ) -> Placement:
        """See ``PlacementPolicy.place``. ``predicted_s`` are T1 and T2 of DynaServe 3.5."""
        options, slo, control = self._options, request.slo, self._control
        output = math.ceil(forecast.output_tokens) + options.margin_tokens
        output = max(min(output, request.max_output_tokens), progress.emitted + 1)
        known, total = request.prompt_tokens + progress.emitted, request.prompt_tokens + output
        timed = not options.ignore_ttft and not progress.emitted
        ttft_s = math.inf if slo.ttft_s is None or not timed else max(slo.ttft_s, LEAST_TTFT_S)
        waited_s, tbt_s = view.at_s - request.arrival_s, slo.scheduled_tbt_s or control.tbt_s
        search = Search(self._cost, control, known, total, tbt_s, ttft_s, waited_s)
        sides = sorted(map(search.side, itertools.islice(view.loads.values(), SHORTLIST)))
        best = min(search.plan(side, side, total) for side in sides)
        cut = self._best_cut(search, sides, best)
        own_s, gain = best.apart_s, options.gain
        shorter = cut.longest_s < best.longest_s - gain * own_s
        if (shorter and cut.excess <= best.excess) or cut.excess < (1.0 - gain) * best.excess:
            best = cut
        seconds = best.seconds if best.cut else best.seconds[:1]
        times = ", ".join([f"T{n} {t:.3f} s" for n, t in enumerate(seconds, 1)])
        missed = ", misses a target" if best.excess else ""
        why = f"s={best.cut or total} of {total}, {times}, TBT {best.tbt_s:.3f} s{missed}"
        return Placement(tile(request, best.cut, best.instances), seconds, best.tbt_s, why)

    def _best_cut(self, search: Search, sides: list[Side], whole: Plan) -> Plan:
        """The best plan of two segments; ``whole``, that of one, if there is none."""
        options, own_s = self._options, whole.apart_s  # what it adds to its instance
        pairs = [pair for pair in PAIRS if max(pair) < len(sides)][: options.pairs]
        bounds = options.least_segment_tokens, options.probes, options.epsilon * own_s
        cuts = (plan for a, b in pairs for plan in search.cuts(sides[a], sides[b], *bounds))
        return min(cuts, default=whole)

"""Keys and values are computed anew where a block opens, while everybody can wait for it.

A request's refresh options (every n-th block, the output alone) are what it may be given, not
what it must: they cost quality (docs/bundled-model.md), so they are made use of only when
deadlines ask for it (ours; DiLaServe E3). The order of giving quality up: refreshes
first, thresholds after.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from stepserve.core.bounds import Bounded, Count, Share
from stepserve.core.ids import RequestId
from stepserve.core.instance import InstanceSpec
from stepserve.core.protocols import Parts
from stepserve.core.running import RunningRequest, StepPace
from stepserve.core.step import Step


class WhenSlack:
    """Upgrades steps of a composed batch; it never makes one wait for that.

    Slack is what a share of a running request's deadline leaves once it has run at its preferred
    threshold, with the refreshes it asked for, at the expected pace. What an upgrade adds to the
    batch must fit into the least slack on the instance: then nobody lowers a threshold for it.
    Nothing is upgraded beside a request that is late already, where every place is taken
    (somebody may be waiting for one), or of a running request whose threshold load control has
    lowered.
    """

    @dataclass(frozen=True, slots=True)
    class Options(Bounded):
        """``margin``: share of a deadline that must suffice for everybody.

        ``heavy_tokens``: most tokens that upgrades add to one batch.
        """

        margin: Share = 0.6
        heavy_tokens: Count = 8192

    def __init__(self, options: Options, parts: Parts) -> None:
        self._program = parts.program
        self._cost = parts.cost
        self._margin = options.margin
        self._heavy_tokens = options.heavy_tokens

    def upgrade(
        self,
        running_requests: Mapping[RequestId, RunningRequest],
        steps: tuple[Step, ...],
        pace: StepPace,
        spec: InstanceSpec,
        now_s: float,
    ) -> tuple[Step, ...]:
        """See ``RefreshPolicy.upgrade``; in the order of the batch while slack lasts."""
        if len(running_requests) >= spec.max_running_requests:
            return steps
        wishes = []
        for index, step in enumerate(steps):
            running = running_requests[step.request_id]
            fuller = self._program.fuller_step(running.request, running.progress, step)
            if fuller is not None and running.cap >= running.forecast.thresholds[0]:
                wishes.append((index, fuller))
        if not wishes:
            return steps
        slack_s = min(self._slack_s(running, pace, now_s) for running in running_requests.values())
        chosen, rows = list(steps), len(steps)
        tokens = asked = sum([step.query_tokens for step in steps])
        ends_s = self._cost.step_time_s(asked, rows, spec) + slack_s
        for index, fuller in wishes:
            more = tokens + fuller.query_tokens - steps[index].query_tokens
            fits = more <= asked + self._heavy_tokens
            if fits and self._cost.step_time_s(more, rows, spec) <= ends_s:
                chosen[index], tokens = fuller, more
        return tuple(chosen)

    def _slack_s(self, running: RunningRequest, pace: StepPace, now_s: float) -> float:
        """Seconds that the running request can spare; infinite if it has no deadline to keep."""
        request = running.request
        if request.slo.pinned:
            return math.inf
        return request.left_s(now_s, self._margin) - running.time_left_s(0, pace)

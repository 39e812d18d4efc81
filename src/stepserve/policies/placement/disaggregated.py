"""Instances with fixed roles: prompts on some, outputs on the others (baseline of DynaServe 1.7).

The first instances by id compute prompts. With ``bypass_tokens``, a prompt is computed where it
is decoded while the prefills waiting there and it are few enough. Deviation: where one of the
roles has no instance with room, the request stays on one of the other role, not in the queue.
"""

from dataclasses import dataclass

from stepserve.core.bounds import Bounded, Count, Whole
from stepserve.core.errors import check
from stepserve.core.forecast import StepForecast
from stepserve.core.ids import InstanceId
from stepserve.core.instance import ClusterView
from stepserve.core.protocols import Parts, Placement
from stepserve.core.request import Family, Progress, Request

from .split_search import tile


class Disaggregated:
    """A ``PlacementPolicy``: fewest running tokens within each role, ties by instance id."""

    family = Family.AUTOREGRESSIVE
    reads_work = True

    @dataclass(frozen=True, slots=True)
    class Options(Bounded):
        """Who computes prompts."""

        prefill_instances: Count = 1  # the first ones by id
        bypass_tokens: Whole = 0  # prompts that fit, with the prefills there, run where they decode

        def check_instances(self, count: int) -> None:
            """Raises FieldError where no instance would be left for one of the roles."""
            what = f"must be in 1 .. {count - 1}: some prefill, the others decode"
            check(self.prefill_instances < count, "prefill_instances", what)

    def __init__(self, options: Options, parts: Parts) -> None:
        self._prefill_instances = options.prefill_instances
        self._bypass_tokens = options.bypass_tokens
        self._seen: set[InstanceId] = set()  # a full one is not in the view, and keeps its role

    def place(
        self, request: Request, progress: Progress, forecast: StepForecast, view: ClusterView
    ) -> Placement:
        """See ``PlacementPolicy.place``. Cut where the known inputs end."""
        self._seen.update(view.loads)
        prefill = set(sorted(self._seen)[: self._prefill_instances])
        ranked = sorted(view.loads.values(), key=lambda load: (load.running_tokens, load.spec.id))
        first = next((load for load in ranked if load.spec.id in prefill), None)
        second = next((load for load in ranked if load.spec.id not in prefill), None)
        known = request.prompt_tokens + progress.emitted
        if first is None or second is None:
            return Placement(tile(request, 0, (ranked[0].spec.id,)), why="no room in one role")
        if sum([w.prefill_tokens for w in second.work]) + known <= self._bypass_tokens:
            return Placement(tile(request, 0, (second.spec.id,)), why="bypass")
        cut = known if progress.emitted + 1 < request.max_output_tokens else 0  # 0: no decode
        return Placement(tile(request, cut, (first.spec.id, second.spec.id)), why="by role")

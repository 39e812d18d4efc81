"""DiLaServe's planner: capacity, then transition, then whether it is worth it (DiLaServe B8).

The plain sibling is ``greedy``. Deviations: an SLO that no layout meets is planned for least
lateness before giving up (see ``capacity_ilp``); "no worse" allows for the solver's gap.
"""

import math
from dataclasses import dataclass

from stepserve.core.bounds import Bounded, NotNegative
from stepserve.core.plan import ClusterPlan, PlanProblem, Slot

from .capacity_ilp import Capacity, CapacityIlp
from .highs_ilp import SolverTimeoutError
from .layouts import counts, smallest_instances, stops_everything
from .transition_ilp import TransitionIlp


class TwoStagePlanner:
    """A ``Planner`` with a solver for each stage."""

    @dataclass(frozen=True, slots=True)
    class Options(Bounded):
        """``gain``: least relative improvement worth a reconfiguration (DiLaServe B8: 10 %)."""

        gain: NotNegative = 0.1

    def __init__(
        self,
        options: Options | None = None,
        parts: object = None,
        capacity: CapacityIlp | None = None,
        transition: TransitionIlp | None = None,
    ) -> None:
        """``capacity`` and ``transition``: the solvers of the stages, if not the usual ones."""
        self.gain = (options or self.Options()).gain
        self.capacity = capacity or CapacityIlp()
        self.transition = transition or TransitionIlp()

    def plan(self, problem: PlanProblem) -> ClusterPlan:
        """See ``Planner.plan``. A change that would stop every instance at once is not made.

        Nor is any when the solver runs out of time; SolverTimeoutError if nothing runs yet.
        """
        try:
            return self._decide(problem, serving=True)
        except SolverTimeoutError as error:
            if problem.present:
                return _plan(problem.present, problem, None, f"kept: {error}")
            raise

    def target(self, problem: PlanProblem) -> ClusterPlan:
        """As ``plan``, for a cluster that may stop serving. Raises SolverTimeoutError."""
        return self._decide(problem, serving=False)

    def _decide(self, problem: PlanProblem, *, serving: bool) -> ClusterPlan:
        late = False
        best = self.capacity.solve(problem)
        if best is None:
            late = True
            best = self.capacity.solve(problem, late=True)
        present = None
        if problem.present:
            present = self.capacity.solve(problem, counts(problem.present), late=late)
        instances = smallest_instances(problem) if best is None else best.instances
        slots = self.transition.slots(problem, instances)
        if serving and stops_everything(problem.present, slots):
            return _plan(problem.present, problem, present, "kept: a change would stop everything")
        if best is None:
            why = "the load exceeds every layout: the one with the highest throughput"
            return _plan(slots, problem, None, why)
        if present is not None and not self._worth(present, best):
            return _plan(problem.present, problem, present, "kept: no other layout is worth it")
        return _plan(slots, problem, best, _reason(problem, present, best, late))

    def _worth(self, present: Capacity, best: Capacity) -> bool:
        """Whether the best layout is better by enough to disturb what runs."""
        if best.mean_threshold > (1.0 + self.gain) * present.mean_threshold:
            return True
        no_worse = best.mean_threshold >= (1.0 - self.capacity.gap) * present.mean_threshold
        return no_worse and best.slack - present.slack > self.gain * abs(present.slack)


def _reason(problem: PlanProblem, present: Capacity | None, best: Capacity, late: bool) -> str:
    prefix = "no layout meets the SLO; least late: " if late else ""
    if not problem.present:
        return f"{prefix}first layout"
    if present is None:
        return f"{prefix}the present layout cannot carry the load within the SLO"
    threshold = f"mean threshold {present.mean_threshold:.3f} -> {best.mean_threshold:.3f}"
    return f"{prefix}{threshold}, slack {present.slack:.3f} -> {best.slack:.3f}"


def _plan(
    slots: tuple[Slot, ...], problem: PlanProblem, capacity: Capacity | None, why: str
) -> ClusterPlan:
    if capacity is None:
        return ClusterPlan(slots, problem.thresholds[-1], -math.inf, why)
    return ClusterPlan(slots, capacity.mean_threshold, capacity.slack, why)

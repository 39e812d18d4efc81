"""When the cluster's tensor-parallel layout is planned, and for what demand.

Source: DiLaServe A2.6 and DiLaServe B8. A plan is asked for periodically, on the arrivals since
the last one, with their rates raised by ``HEADROOM``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from stepserve.core.actions import GlobalAction, SolvePlan
from stepserve.core.config import ControlConfig
from stepserve.core.errors import FieldError
from stepserve.core.plan import BATCH_SIZES, ClusterPlan, PlanProblem, Slot, WorkloadClass
from stepserve.core.protocols import CostModel
from stepserve.core.request import Request

from .ledger import Ledger, RequestState
from .reconfigure import Reconfiguration, present

HEADROOM = 1.5
"""Planned arrival rate over measured arrival rate (DiLaServe B8)."""

LENGTH_STEP = 256
"""Prompt and output lengths of a workload class are rounded up to this (DiLaServe B8), or to a
multiple of it: a solver's time grows with the classes, so ``MOST_CLASSES`` bounds them (ours)."""

MOST_CLASSES = 8


@dataclass(slots=True)
class _Window:
    """What arrived since the last plan. Only requests with a deadline can be planned for."""

    since_s: float
    slos_s: dict[tuple[int, int], list[float]] = field(default_factory=dict)  # by lengths
    last: Request | None = None
    output_tokens: float = 0.0
    steps: list[float] = field(default_factory=list)  # by threshold


class PlanDemand:
    """Gathers demand between plans, asks for the next one, and takes the answer."""

    def __init__(
        self, config: ControlConfig, cost: CostModel, reconfiguration: Reconfiguration
    ) -> None:
        """Without a planner nothing is ever asked for."""
        self._config = config
        self._cost = cost
        self._change = reconfiguration
        self.on = config.plans
        self._next_s = -math.inf  # the first period begins with the first event
        self._asked: tuple[Slot, ...] | None = None  # for a plan, when this was the layout
        self._window = _Window(0.0)

    def count(self, state: RequestState) -> None:
        """A request arrived and has its forecast. No plan helps a deadline that has passed."""
        request, forecast = state.request, state.forecast
        if not self.on or (request.slo.e2e_s or 0.0) <= 0.0 or forecast is None:
            return
        window = self._window
        key = request.prompt_tokens, request.max_output_tokens
        window.slos_s.setdefault(key, []).append(request.slo.e2e_s or 0.0)
        window.last = request
        window.output_tokens += forecast.output_tokens
        sums = window.steps or [0.0] * len(self._config.thresholds)
        steps = (forecast.steps_at(threshold) for threshold in self._config.thresholds)
        window.steps = [a + b for a, b in zip(sums, steps, strict=True)]

    def ask(self, now_s: float, ledger: Ledger) -> list[GlobalAction]:
        """Ask for a plan if it is time, nothing is being changed, and there was demand."""
        if not self.on or now_s < self._next_s or self._asked is not None:
            return []
        if self._change.under_way or self._change.forming:
            return []
        begun = self._next_s > -math.inf
        window, self._window = self._window, _Window(now_s)
        self._next_s = now_s + self._config.plan_every_s
        if not begun or window.last is None or not window.steps:
            return []
        try:
            problem = self._problem(window, window.last, now_s, ledger)
        except FieldError:  # not all of the cluster has come up yet
            return []
        self._asked = problem.present
        rate = sum(c.rate_per_s for c in problem.classes)
        return [SolvePlan(problem, f"{rate:.2f} requests/s to plan for, headroom included")]

    def take(self, plan: ClusterPlan, ledger: Ledger) -> list[GlobalAction]:
        """Begin to carry a plan out, unless it was made for a layout that is gone.

        One is dropped that comes while another is carried out (the operator's, say).
        """
        now = present(ledger)
        planned_for, self._asked = self._asked or now, None
        return self._change.begin(plan, ledger) if now == planned_for else []

    def _problem(self, window: _Window, last: Request, now_s: float, ledger: Ledger) -> PlanProblem:
        span_s = now_s - window.since_s
        margin, classes = self._config.margin, _classes(window.slos_s, LENGTH_STEP)
        longest = max(prompt + output for prompt, output in classes)
        sizes, gpus = sorted({*BATCH_SIZES, longest}), self._change.gpus
        return PlanProblem(
            gpus_per_node=tuple(gpus.get(node, 0) for node in range(max(gpus) + 1)),
            tp_degrees=self._config.tp_degrees,
            classes=tuple(
                WorkloadClass(
                    *key, margin * sum(slos, 0.0) / len(slos), HEADROOM * len(slos) / span_s
                )
                for key, slos in sorted(classes.items())
            ),
            thresholds=self._config.thresholds,
            tokens_per_step=tuple(window.output_tokens / steps for steps in window.steps),
            step_s={
                degree: tuple((size, self._step_s(size, degree)) for size in sizes)
                for degree in self._config.tp_degrees
            },
            block_tokens=last.diffusion.block_tokens,
            cache_mode=last.diffusion.cache_mode,
            present=present(ledger),
        )

    def _step_s(self, tokens: int, degree: int) -> float:
        template = self._change.template
        assert template is not None, "demand was served by an instance with a slot"
        return self._cost.step_time_s(tokens, 1, replace(template, tp_degree=degree))


def _classes(
    slos_s: Mapping[tuple[int, int], list[float]], length_step: int
) -> dict[tuple[int, int], list[float]]:
    """SLOs by lengths rounded up to the step, doubled until the classes are few."""
    classes: dict[tuple[int, int], list[float]] = {}
    for lengths, slos in slos_s.items():
        prompt, output = (-(-tokens // length_step) * length_step for tokens in lengths)
        classes.setdefault((prompt, output), []).extend(slos)
    if len(classes) > MOST_CLASSES:
        return _classes(slos_s, 2 * length_step)
    return classes

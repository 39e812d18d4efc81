"""When the cluster's tensor-parallel layout is planned, and how a plan is carried out.

Source: DiLaServe A2.6 and DiLaServe B8. A plan is asked for periodically, on the arrivals since the
last one, with their rates raised by ``HEADROOM``. Its stages run one after another: the
instances to stop drain (no new work; running requests leave at their next cut), are torn down, and
each new instance is formed as soon as the GPUs it needs are free.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from stepserve.core.actions import GlobalAction, Rebuild, SolvePlan, Stop
from stepserve.core.config import ControlConfig
from stepserve.core.errors import FieldError
from stepserve.core.ids import InstanceId
from stepserve.core.instance import InstanceSpec
from stepserve.core.plan import (
    BATCH_SIZES,
    ClusterPlan,
    PlanProblem,
    Slot,
    Stage,
    WorkloadClass,
    stages,
)
from stepserve.core.protocols import CostModel
from stepserve.core.request import Request
from stepserve.core.segment import ReleasePoint

from .ledger import InstanceState, Ledger, RequestState

HEADROOM = 1.5
"""Planned arrival rate over measured arrival rate (DiLaServe B8)."""

LENGTH_STEP = 256
"""Prompt and output lengths of a workload class are rounded up to this (DiLaServe B8), or to a
multiple of it: a solver's time grows with the classes, so there are at most ``MOST_CLASSES``."""

MOST_CLASSES = 8


@dataclass(slots=True)
class _Window:
    """What arrived since the last plan. Only requests with a deadline can be planned for."""

    since_s: float
    slos_s: dict[tuple[int, int], list[float]] = field(default_factory=dict)  # by lengths
    last: Request | None = None
    output_tokens: float = 0.0
    steps: list[float] = field(default_factory=list)  # by threshold


class Reconfiguration:
    """Gathers demand between plans, and walks through the stages of the one under way."""

    def __init__(self, config: ControlConfig, cost: CostModel) -> None:
        """With ``planner = "none"`` nothing is ever planned."""
        self._config = config
        self._cost = cost
        self.on = config.plans
        self._next_s = -math.inf  # the first period begins with the first event
        self._asked: tuple[Slot, ...] | None = None  # for a plan, when this was the layout
        self._window = _Window(0.0)
        self._gpus: dict[int, int] = {}  # by node, as far as instances have shown them
        self._stages: deque[Stage] = deque()
        self._to_stop: set[Slot] = set()
        self._to_start: set[Slot] = set()
        self._starting: set[Slot] = set()
        self._stage_stops: tuple[Slot, ...] = ()
        self._rebuilding: dict[InstanceId, InstanceSpec] = {}  # asked for, outside of a plan
        self._template: InstanceSpec | None = None
        self.changes = 0  # plans that changed the layout

    def count(self, state: RequestState) -> None:
        """A request arrived and has its forecast."""
        request, forecast = state.request, state.forecast
        if not self.on or request.slo.e2e_s is None or forecast is None:
            return
        window = self._window
        key = request.prompt_tokens, request.max_output_tokens
        window.slos_s.setdefault(key, []).append(request.slo.e2e_s)
        window.last = request
        window.output_tokens += forecast.output_tokens
        sums = window.steps or [0.0] * len(self._config.thresholds)
        steps = (forecast.steps_at(threshold) for threshold in self._config.thresholds)
        window.steps = [a + b for a, b in zip(sums, steps, strict=True)]

    def came_up(self, spec: InstanceSpec) -> None:
        """An instance is up: one of ours, or one that was there before."""
        self._rebuilding.pop(spec.id, None)
        if spec.slot is None:
            return
        self._gpus[spec.slot.node] = max(self._gpus.get(spec.slot.node, 0), spec.slot.gpus[-1] + 1)
        self._template = self._template or spec
        self._to_start.discard(spec.slot)
        self._starting.discard(spec.slot)

    def ask(self, now_s: float, ledger: Ledger) -> list[GlobalAction]:
        """Ask for a plan if it is time, nothing is being changed, and there was demand."""
        if not self.on or now_s < self._next_s or self._asked is not None:
            return []
        if self.under_way or self.forming:
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
        """Begin to carry a plan out.

        One is dropped that was made for a layout that is gone, or comes while another is carried
        out (the operator's, say).
        """
        present = _present(ledger)
        planned_for, self._asked = self._asked or present, None
        target = set(plan.slots)
        known = present == planned_for and all(slot.node in self._gpus for slot in target)
        if not known or self.under_way or self.forming or set(present) == target:
            return []
        specs = [self._spec(slot) for slot in plan.slots]
        if not all(ledger.fits_one_of(t.request, specs) for t in ledger.requests.values()):
            return []  # an accepted request would have no place left
        self._stages.extend(stages(present, plan.slots))
        self.changes += 1
        return self.advance(ledger)

    def advance(self, ledger: Ledger) -> list[GlobalAction]:
        """What can be done now: stop drained instances, form those whose GPUs are free."""
        actions: list[GlobalAction] = []
        if not self.under_way:
            return actions
        if not self._to_stop and not self._to_start:
            stage = self._stages.popleft()
            there = {instance.spec.slot for instance in ledger.instances.values()}
            self._stage_stops = stage.stop
            self._to_stop = {slot for slot in stage.stop if slot in there}
            self._to_start = set(stage.start)
        for instance in ledger.instances.values():
            if instance.spec.slot in self._to_stop:
                actions += _drain(instance, ledger)
        busy = {spec.slot for spec in self._there(ledger)}
        for slot in sorted(self._to_start - self._starting):
            if not any(other is not None and slot.overlaps(other) for other in busy):
                self._starting.add(slot)
                spec = self._spec(slot)
                actions.append(Rebuild(spec, 0.0, f"planned: TP {spec.tp_degree}"))
        return actions

    def stopped(self, spec: InstanceSpec) -> None:
        """An instance that was to stop is gone."""
        if spec.slot is not None:
            self._to_stop.discard(spec.slot)

    def wants_gone(self, spec: InstanceSpec) -> bool:
        """Whether an instance that was lost is not to be formed again."""
        later = any(spec.slot in stage.stop for stage in self._stages)
        return later or spec.slot in self._to_stop

    def give_up(self, spec: InstanceSpec) -> bool:
        """A planned instance cannot be formed: go back to what was on its GPUs, and stop there.

        False if the instance was not part of a plan.
        """
        slot = spec.slot
        if slot is None or slot not in self._to_start:
            return False
        self._stages.clear()
        self._to_start.discard(slot)
        self._starting.discard(slot)
        self._rebuilding.pop(spec.id, None)
        self._to_start |= {old for old in self._stage_stops if old.overlaps(slot)}
        return True

    def go_on(self, layout: Sequence[InstanceSpec], starting: Sequence[InstanceSpec]) -> None:
        """Wait for what a scheduler before this one asked for; ``layout`` is what stood before.

        What is not of that belongs to a change: if it cannot be formed, that is given up.
        """
        self._template = next((spec for spec in layout if spec.slot), None)
        old = {spec.slot for spec in layout}
        self._stage_stops = tuple(slot for slot in old if slot is not None)
        for spec in starting:
            if spec.slot is None or spec.slot in old:
                self.rebuild(spec)
            else:
                self._to_start.add(spec.slot)
                self._starting.add(spec.slot)

    @property
    def forming(self) -> bool:
        """Whether instances are asked for that no change of the layout began."""
        return bool(self._rebuilding)

    def missing(self, layout: Iterable[InstanceSpec], ledger: Ledger) -> list[InstanceSpec]:
        """Instances of a layout on whose GPUs there is nothing."""
        there = self._there(ledger)
        names = {spec.id for spec in there}
        slots = [*self._starting, *(spec.slot for spec in there if spec.slot is not None)]
        return [
            spec
            for spec in layout
            if spec.id not in names and not (spec.slot and any(map(spec.slot.overlaps, slots)))
        ]

    def _there(self, ledger: Ledger) -> list[InstanceSpec]:
        return [*(i.spec for i in ledger.instances.values()), *self._rebuilding.values()]

    def rebuild(self, spec: InstanceSpec) -> None:
        """An instance is asked for: its GPUs are taken until it comes up."""
        self._rebuilding[spec.id] = spec

    @property
    def under_way(self) -> bool:
        """Whether a plan is being carried out."""
        return bool(self._to_stop or self._to_start or self._stages)

    def _problem(self, window: _Window, last: Request, now_s: float, ledger: Ledger) -> PlanProblem:
        span_s = now_s - window.since_s
        margin, classes = self._config.margin, _classes(window.slos_s, LENGTH_STEP)
        longest = max(prompt + output for prompt, output in classes)
        sizes = sorted({*BATCH_SIZES, longest})
        return PlanProblem(
            gpus_per_node=tuple(self._gpus.get(node, 0) for node in range(max(self._gpus) + 1)),
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
            present=_present(ledger),
        )

    def _step_s(self, tokens: int, degree: int) -> float:
        assert self._template is not None, "demand was served by an instance with a slot"
        return self._cost.step_time_s(tokens, 1, replace(self._template, tp_degree=degree))

    def _spec(self, slot: Slot) -> InstanceSpec:
        """KV memory and places grow with the GPUs of an instance."""
        template = self._template
        assert template is not None, "a plan needs a slot to begin with"
        degree, old = slot.tp_degree, template.tp_degree
        return replace(
            template,
            id=slot_id(slot),
            tp_degree=degree,
            page_capacity=template.page_capacity * degree // old,
            max_running_requests=max(1, template.max_running_requests * degree // old),
            slot=slot,
        )


def _drain(instance: InstanceState, ledger: Ledger) -> list[GlobalAction]:
    """Take no new work, have running requests leave at their next cut; stop what holds nothing."""
    actions: list[GlobalAction] = []
    instance.draining, instance.load = True, None
    for request_id in tuple(instance.expected):
        ledger.forget_successor(ledger.requests[request_id])
    for request_id in instance.placed:
        state = ledger.requests[request_id]
        if not state.cutting:
            actions.append(state.ask_release(ReleasePoint.CUT, "its instance is to change"))
    if not len(instance.pages) and not instance.stopping:
        instance.stopping = True
        actions.append(Stop(instance.spec, "drained"))
    return actions


def slot_id(slot: Slot) -> InstanceId:
    """The name of the instance on a slot, for example ``node0-gpu2.3``."""
    return InstanceId(f"node{slot.node}-gpu{'.'.join(map(str, slot.gpus))}")


def _present(ledger: Ledger) -> tuple[Slot, ...]:
    slots = (instance.spec.slot for instance in ledger.instances.values())
    return tuple(sorted(slot for slot in slots if slot is not None))


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

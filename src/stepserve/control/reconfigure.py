"""How a tensor-parallel layout is carried out.

Source: DiLaServe A2.6 and DiLaServe B8. The stages of a plan run one after another: the instances
to stop drain (no new work; running requests leave at their next cut), are torn down, and each new
instance is formed as soon as the GPUs it needs are free.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from stepserve.core.actions import GlobalAction, Rebuild, Stop
from stepserve.core.ids import InstanceId
from stepserve.core.instance import InstanceSpec
from stepserve.core.plan import ClusterPlan, Slot, Stage, stages
from stepserve.core.segment import ReleasePoint
from stepserve.core.status import InstancePhase

from .ledger import ClaimKind, InstanceState, Ledger
from .lifecycle import SLOT, InstanceStep, RequestPhase, SlotPhase, SlotStep, after

REBUILD_DELAYS_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Before the first, second, ... rebuild in a row without a batch in between."""

MOST_LOSSES = 6
"""In a row: a planned instance that is lost more often cannot be formed."""


class Reconfiguration:
    """Walks through the stages of the change under way, and knows what is being formed."""

    def __init__(self) -> None:
        self.changes = 0  # plans that changed the layout
        self.gpus: dict[int, int] = {}  # by node, as far as instances have shown them
        self.template: InstanceSpec | None = None  # the first instance with a slot
        self._stages: deque[Stage] = deque()
        self._slots: dict[Slot, SlotPhase] = {}  # of the present stage, until done
        self._stage_stops: tuple[Slot, ...] = ()
        self._rebuilding: dict[InstanceId, InstanceSpec] = {}  # asked for, outside of a change
        self._losses: dict[InstanceId, int] = {}  # in a row, without a batch in between

    @property
    def under_way(self) -> bool:
        """Whether a plan is being carried out."""
        return bool(self._slots or self._stages)

    @property
    def forming(self) -> bool:
        """Whether instances are asked for that no change of the layout began."""
        return bool(self._rebuilding)

    def begin(self, plan: ClusterPlan, ledger: Ledger) -> list[GlobalAction]:
        """Begin to carry a plan out, unless another is, or it is the present layout already.

        Not if an accepted request would have no place left.
        """
        now, target = present(ledger), set(plan.slots)
        known = all(slot.node in self.gpus for slot in target)
        if not known or self.under_way or self.forming or set(now) == target:
            return []
        specs = [self._spec(slot) for slot in plan.slots]
        if not all(ledger.fits_one_of(s.request, specs) for s in ledger.requests.values()):
            return []
        self._stages.extend(stages(now, plan.slots))
        self.changes += 1
        return self.advance(ledger)

    def advance(self, ledger: Ledger) -> list[GlobalAction]:
        """What can be done now: stop drained instances, form those whose GPUs are free."""
        actions: list[GlobalAction] = []
        if not self.under_way:
            return actions
        while self._stages and not self._slots:  # whose instances are lost has nothing to do
            stage = self._stages.popleft()
            there = {instance.spec.slot for instance in ledger.instances.values()}
            self._stage_stops = stage.stop
            self._slots = {slot: SlotPhase.LEAVING for slot in stage.stop if slot in there}
            self._slots |= dict.fromkeys(stage.start, SlotPhase.WAITING)
        for instance in ledger.instances.values():
            if instance.spec.slot and self._is(instance.spec.slot, SlotPhase.LEAVING):
                actions += _drain(instance, ledger)
        busy = {spec.slot for spec in self._there(ledger)}
        for slot in sorted(s for s in self._slots if self._is(s, SlotPhase.WAITING)):
            if not any(other is not None and slot.overlaps(other) for other in busy):
                self._move(slot, SlotStep.START)
                spec = self._spec(slot)
                actions.append(Rebuild(spec, 0.0, f"planned: TP {spec.tp_degree}"))
        return actions

    def came_up(self, spec: InstanceSpec) -> None:
        """An instance is up: one of ours, or one that was there before."""
        self._rebuilding.pop(spec.id, None)
        slot = spec.slot
        if slot is None:
            return
        self.gpus[slot.node] = max(self.gpus.get(slot.node, 0), slot.gpus[-1] + 1)
        self.template = self.template or spec
        if slot in self._slots and not self._is(slot, SlotPhase.LEAVING):
            self._move(slot, SlotStep.COME_UP)

    def stopped(self, spec: InstanceSpec) -> None:
        """An instance that was to stop is gone."""
        if spec.slot is not None and self._is(spec.slot, SlotPhase.LEAVING):
            self._move(spec.slot, SlotStep.FREE)

    def works(self, name: InstanceId) -> None:
        """An instance has run a batch."""
        self._losses.pop(name, None)

    def lost(
        self, spec: InstanceSpec, ledger: Ledger
    ) -> tuple[list[GlobalAction], list[GlobalAction]]:
        """An instance is lost: form it anew, unless the layout changes.

        Returns what to do before its requests are placed, and after.
        """
        losses = self._losses.get(spec.id, 0)
        self._losses[spec.id] = losses + 1
        if self.wants_gone(spec):
            self.stopped(spec)
            return [], self.advance(ledger)
        if losses >= MOST_LOSSES and self.give_up(spec):
            return [], self.advance(ledger)
        after_s = REBUILD_DELAYS_S[min(losses, len(REBUILD_DELAYS_S) - 1)]
        return [self.rebuild(spec, after_s, f"lost {losses + 1} times in a row")], []

    def wants_gone(self, spec: InstanceSpec) -> bool:
        """Whether an instance that was lost is not to be formed again."""
        later = any(spec.slot in stage.stop for stage in self._stages)
        return later or (spec.slot is not None and self._is(spec.slot, SlotPhase.LEAVING))

    def give_up(self, spec: InstanceSpec) -> bool:
        """A planned instance cannot be formed: go back to what was on its GPUs, and stop there.

        False if the instance was not part of a plan.
        """
        slot = spec.slot
        if slot is None or slot not in self._slots or self._is(slot, SlotPhase.LEAVING):
            return False
        self._stages.clear()
        self._move(slot, SlotStep.FAIL)
        self._rebuilding.pop(spec.id, None)
        for old in self._stage_stops:
            if old.overlaps(slot):
                self._slots.setdefault(old, SlotPhase.WAITING)
        return True

    def go_on(self, layout: Sequence[InstanceSpec], starting: Sequence[InstanceSpec]) -> None:
        """Wait for what a scheduler before this one asked for; ``layout`` is what stood before.

        What is not of that belongs to a change: if it cannot be formed, that is given up.
        """
        self.template = next((spec for spec in layout if spec.slot), None)
        old = {spec.slot for spec in layout}
        self._stage_stops = tuple(slot for slot in old if slot is not None)
        for spec in starting:
            if spec.slot is None or spec.slot in old:
                self._rebuilding[spec.id] = spec
            else:
                self._slots[spec.slot] = SlotPhase.STARTING

    def missing(self, layout: Iterable[InstanceSpec], ledger: Ledger) -> list[InstanceSpec]:
        """Instances of a layout on whose GPUs there is nothing."""
        there = self._there(ledger)
        names = {spec.id for spec in there}
        slots = [slot for slot in self._slots if self._is(slot, SlotPhase.STARTING)]
        slots += [spec.slot for spec in there if spec.slot is not None]
        return [
            spec
            for spec in layout
            if spec.id not in names and not (spec.slot and any(map(spec.slot.overlaps, slots)))
        ]

    def rebuild(self, spec: InstanceSpec, after_s: float, why: str) -> GlobalAction:
        """Ask for an instance: its GPUs are taken until it comes up."""
        self._rebuilding[spec.id] = spec
        return Rebuild(spec, after_s, why)

    def _there(self, ledger: Ledger) -> list[InstanceSpec]:
        return [*(i.spec for i in ledger.instances.values()), *self._rebuilding.values()]

    def _is(self, slot: Slot, phase: SlotPhase) -> bool:
        return self._slots.get(slot) is phase

    def _move(self, slot: Slot, step: SlotStep) -> None:
        phase = after(SLOT, self._slots[slot], step, f"{slot}")
        if phase is SlotPhase.DONE:
            del self._slots[slot]
        else:
            self._slots[slot] = phase

    def _spec(self, slot: Slot) -> InstanceSpec:
        """KV memory and places grow with the GPUs of an instance."""
        template = self.template
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
    instance.move(InstanceStep.DRAIN)
    instance.load = None
    for request_id in instance.held(ClaimKind.MIGRATION):
        ledger.cancel_migration(ledger.requests[request_id])
    for request_id in instance.held(ClaimKind.RUNNING):
        state = ledger.requests[request_id]
        if state.phase is not RequestPhase.LEAVING:
            actions.append(state.ask_release(ReleasePoint.CUT, "its instance is to change"))
    if not instance.claims and instance.phase is InstancePhase.DRAINING:
        instance.move(InstanceStep.STOP)
        actions.append(Stop(instance.spec, "drained"))
    return actions


def slot_id(slot: Slot) -> InstanceId:
    """The name of the instance on a slot, for example ``node0-gpu2.3``."""
    return InstanceId(f"node{slot.node}-gpu{'.'.join(map(str, slot.gpus))}")


def present(ledger: Ledger) -> tuple[Slot, ...]:
    """The slots of the instances that are up."""
    slots = (instance.spec.slot for instance in ledger.instances.values())
    return tuple(sorted(slot for slot in slots if slot is not None))

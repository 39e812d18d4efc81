"""What a person who runs a cluster can see of it, and change: its layout.

A layout that is asked for is carried out like one that a planner chose
(``control.reconfigure``): instances to change drain, then the new ones are formed.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from stepserve.control.reconfigure import slot_id
from stepserve.core.errors import FieldError, StepserveError
from stepserve.core.events import PlanSolved
from stepserve.core.instance import InstanceSpec
from stepserve.core.plan import ClusterPlan, Slot
from stepserve.core.status import InstanceStatus

from .loop import ControlLoop

logger = logging.getLogger(__name__)


class LiveOperator:
    """See ``gateway.operator.Operator``. All methods run on the asyncio thread."""

    def __init__(
        self, loop: ControlLoop, specs: Sequence[InstanceSpec], tp_degrees: Sequence[int]
    ) -> None:
        """``specs``: what the cluster begins with; its GPUs are theirs (or shares of threads)."""
        self._loop, self._degrees = loop, tuple(tp_degrees)
        self._gpus = Counter(s.slot.node for s in specs if s.slot for _ in range(s.tp_degree))

    def state(self) -> dict[str, Any]:
        """Instances, and whether the layout is being changed, as values of JSON."""
        status, supervisor = self._loop.status(), self._loop.supervisor
        known = {instance.spec.id for instance in status.instances}
        rows = [_instance(instance) for instance in status.instances]
        rows += [_row(s, "asked") for s in supervisor.up.values() if s.id not in known]
        rows += [_row(s, "starting") for s in supervisor.starting.values()]
        return {
            "gpus": {str(node): count for node, count in self._gpus.items()},
            "tp_degrees": list(self._degrees),
            "layout": sorted((i.spec.tp_degree for i in status.instances), reverse=True),
            "changing": status.changing,
            "changes": supervisor.layout_changes,
            "losses": self._loop.losses,
            "scheduler_restarts": supervisor.restarts,
            "recovering": status.recovering,
            "running": status.running,
            "waiting": len(self._loop.records) - status.running,
            "instances": sorted(rows, key=lambda row: str(row["id"])),
        }

    def change(self, layout: Sequence[int]) -> None:
        """Begin to change to instances of these tensor-parallel degrees.

        Raises FieldError (``layout``) for one that the GPUs cannot form, StepserveError where
        no change can begin now.
        """
        self._check_free()
        unknown = sorted(set(layout) - set(self._degrees))
        if unknown:
            known = ", ".join(map(str, self._degrees))
            raise FieldError("layout", f"degree {unknown[0]} is not among {known}")
        slots = slots_for(layout, self._gpus, self._present())
        logger.info("asked for: layout %s", ",".join(map(str, layout)))
        self._begin(slots, "layout")

    def drain(self, name: str) -> None:
        """Begin to stop one instance; its running requests go on elsewhere.

        Raises KeyError for one that there is not, StepserveError where it cannot be stopped now.
        """
        self._check_free()
        present = self._present()
        gone = {slot for slot in present if slot_id(slot) == name}
        if not gone:
            raise KeyError(name)
        logger.info("asked for: drain of %s", name)
        self._begin(tuple(slot for slot in present if slot not in gone), "instance")

    def restart_scheduler(self) -> None:
        """Have a new global scheduler take over; instances and requests go on."""
        logger.info("asked for: a new scheduler")
        self._loop.restart()

    def _present(self) -> tuple[Slot, ...]:
        instances = self._loop.status().instances
        return tuple(i.spec.slot for i in instances if i.spec.slot is not None)

    def _check_free(self) -> None:
        """Raises StepserveError while it isn't known, or not settled, what is on the GPUs."""
        status = self._loop.status()
        if status.recovering:
            raise StepserveError("a new scheduler asks the instances what they hold")
        if status.forming:
            raise StepserveError("an instance is starting")

    def _begin(self, slots: tuple[Slot, ...], field: str) -> None:
        if not slots:
            raise FieldError(field, "nothing would be left to serve")
        if self._loop.status().changing:
            raise StepserveError("the layout is being changed already")
        if set(slots) == set(self._present()):
            return
        before = self._loop.supervisor.layout_changes
        self._loop.post(PlanSolved(ClusterPlan(slots, 0.0, 0.0, "asked for by the operator")))
        if self._loop.supervisor.layout_changes == before:
            raise StepserveError("an accepted request would find no room")


def _instance(instance: InstanceStatus) -> dict[str, Any]:
    counts = {"running": len(instance.running), "pages_free": instance.free_pages}
    return _row(instance.spec, instance.phase.value) | counts


def _row(spec: InstanceSpec, state: str) -> dict[str, Any]:
    """What is known of an instance without its books."""
    return {
        "id": spec.id,
        "state": state,
        "tp_degree": spec.tp_degree,
        "node": spec.slot.node if spec.slot else None,
        "gpus": list(spec.slot.gpus) if spec.slot else [],
        "running": 0,
        "max_running": spec.max_running_requests,
        "pages": spec.page_capacity,
        "pages_free": spec.page_capacity if state == "starting" else None,
    }


def slots_for(
    layout: Sequence[int], gpus: Mapping[int, int], present: Sequence[Slot] = ()
) -> tuple[Slot, ...]:
    """Instances of these degrees on the GPUs of each node, ``present`` ones kept if possible.

    Raises FieldError (``layout``) if they do not fit.
    """
    for kept in (present, ()):
        slots = _packed(layout, gpus, kept)
        if slots is not None:
            return slots
    raise FieldError("layout", f"{list(layout)} does not fit on nodes of {list(gpus.values())}")


def _packed(
    layout: Sequence[int], gpus: Mapping[int, int], kept: Sequence[Slot]
) -> tuple[Slot, ...] | None:
    wanted, slots = Counter(layout), []
    for slot in sorted(kept):
        if wanted[slot.tp_degree]:
            wanted[slot.tp_degree] -= 1
            slots.append(slot)
    for degree in sorted(wanted.elements(), reverse=True):
        places = [
            Slot(node, tuple(range(first, first + degree)))
            for node, count in sorted(gpus.items())
            for first in range(count - degree + 1)
        ]
        free = [slot for slot in places if not any(slot.overlaps(taken) for taken in slots)]
        if not free:
            return None
        slots.append(free[0])
    return tuple(sorted(slots))

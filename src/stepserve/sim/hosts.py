"""Which instances a setting has at the start: each with hardware, a degree, and GPUs of its own."""

from dataclasses import dataclass

from stepserve.control.reconfigure import slot_id
from stepserve.core.errors import FieldError
from stepserve.core.ids import InstanceId
from stepserve.core.instance import InstanceSpec
from stepserve.core.plan import Slot

from .a100 import known_models, model_shape
from .config import Setting, System


@dataclass(frozen=True, slots=True)
class Host:
    """An instance before any system says what it can hold. ``hardware``: empty for the usual."""

    id: InstanceId
    hardware: str
    degree: int
    slot: Slot | None = None

    def spec(self, system: System, kv_tokens: int) -> InstanceSpec:
        """The instance of a system; ``kv_tokens`` fit on all of its GPUs."""
        page, places = system.page_tokens, system.max_running_requests
        if system.running_per_gpu:
            places *= self.degree
        return InstanceSpec(self.id, self.degree, kv_tokens // page, page, places, self.slot)


def hosts(setting: Setting) -> tuple[Host, ...]:
    """The instances, in order; on nodes they take their GPUs in order.

    Raises FieldError if they do not fit there.
    """
    own = setting.degree
    if not own:
        known = setting.model in known_models()
        own = model_shape(setting.model).tp if known else 1
    wanted = [
        (group.hardware or setting.hardware, group.degree or own)
        for group in setting.instances
        for _ in range(group.count)
    ]
    if not setting.nodes:
        if not wanted:
            raise FieldError("setting.instances", "how many? give instances, or nodes to fill")
        return tuple(Host(InstanceId(f"i{n}"), *each) for n, each in enumerate(wanted))
    if not wanted:
        if any(gpus % own for gpus in setting.nodes):
            raise FieldError("setting.degree", "must divide the GPUs of every node")
        wanted = [(setting.hardware, own)] * (sum(setting.nodes) // own)
    return tuple(_placed(wanted, setting.nodes))


def _placed(wanted: list[tuple[str, int]], nodes: tuple[int, ...]) -> list[Host]:
    taken = [0] * len(nodes)
    placed = []
    for hardware, degree in wanted:
        node = next((n for n, gpus in enumerate(nodes) if taken[n] + degree <= gpus), None)
        if node is None:
            raise FieldError("setting.instances", "they need more GPUs than the nodes have")
        slot = Slot(node, tuple(range(taken[node], taken[node] + degree)))
        taken[node] += degree
        placed.append(Host(slot_id(slot), hardware, degree, slot))
    return placed

"""The instances that a server begins with."""

from stepserve.control.reconfigure import slot_id
from stepserve.core.config import ServeConfig
from stepserve.core.instance import InstanceSpec
from stepserve.core.plan import Slot
from stepserve.families.profiles import cores_per_share

from .listening import scheme


def first_specs(config: ServeConfig) -> tuple[InstanceSpec, ...]:
    """Instances side by side; pages and places grow with the shares (or GPUs) of each."""
    specs, first = [], 0
    for degree in config.degrees:
        slot = Slot(0, tuple(range(first, first + degree)))
        first += degree
        spec = InstanceSpec(
            id=slot_id(slot),
            tp_degree=degree,
            page_capacity=config.kv_pages * degree,
            page_tokens=config.page_tokens,
            max_running_requests=config.max_running_requests * degree,
            slot=slot,
        )
        specs.append(spec)
    return tuple(specs)


def _instances(config: ServeConfig) -> str:
    """How many, their degrees where not all are 1, and what they run on."""
    degrees, threads = config.degrees, cores_per_share(config)
    what = f"{len(degrees)} instance{'s' * (len(degrees) > 1)}"
    if max(degrees) > 1:
        what += f" of tensor-parallel degrees {'+'.join(map(str, degrees))}"
    each = "share" if max(degrees) > 1 else "instance"
    cpus = f"{threads} CPU thread{'s' * (threads > 1)} per {each}"
    return f"{what}, {cpus if config.device == 'cpu' else config.device}"


def announcement(config: ServeConfig, name: str, port: int) -> str:
    """What a server says once it serves the model of that name."""
    return f"serving {name} at {scheme(config)}://{config.host}:{port} ({_instances(config)})"

"""How fast a served model is: profiles from files or measured now, and the degrees they are of."""

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from stepserve.core.config import ServeConfig
from stepserve.core.errors import FieldError
from stepserve.core.ids import InstanceId
from stepserve.core.instance import InstanceSpec
from stepserve.core.model import Engine, ModelFacts
from stepserve.core.plan import Slot
from stepserve.core.protocols import Executor
from stepserve.core.request import Family
from stepserve.cost.batch_profile import BatchProfile
from stepserve.cost.measured_batches import measure_profile
from stepserve.cost.step_table import StepProfile

logger = logging.getLogger(__name__)

BATCH_PROFILE = "batch_profile.json"


def cores_per_share(config: ServeConfig) -> int:
    """CPU threads of each share: as configured, else the cores shared out evenly.

    An instance of tensor-parallel degree g has g shares, each a process of its own.
    """
    if config.threads_per_instance:
        return config.threads_per_instance
    return max(1, len(os.sched_getaffinity(0)) // sum(config.degrees))


def lone_executor(config: ServeConfig, engine: Engine, degree: int, threads: int) -> Executor:
    """That of an instance by itself, to be measured and closed."""
    engine.check((degree,))
    slot = Slot(0, tuple(range(degree)))
    pages, tokens = config.kv_pages, config.page_tokens
    spec = InstanceSpec(InstanceId("measured"), degree, pages, tokens, 1, slot)
    return engine.executor(spec, threads)


def batch_profile(config: ServeConfig, engine: Engine, lowest: int) -> BatchProfile:
    """Batch times of an autoregressive model.

    What was kept, else the profile that is named, or the model's own; else a few batches are
    measured now, on an instance of the ``lowest`` degree. Raises FieldError for a profile that
    is missing, or of another model.
    """
    facts = engine.facts
    field, path = "keep_profile", Path(config.keep_profile)
    if not (config.keep_profile and path.is_file()):
        field, path = "profile", Path(config.profile or facts.folder / BATCH_PROFILE)
    if not path.is_file():
        if config.profile:
            raise FieldError("profile", f"no file {path}; make one with: stepserve profile")
        if config.cluster != "local":
            command = f"stepserve profile --model {config.model} --out {path}"
            raise FieldError("profile", f"needed where instances live elsewhere: {command}")
        return _measured(config, engine, lowest)
    profile = BatchProfile.load(path, field)
    given, own = profile.line.weight_bytes, facts.weight_bytes
    if given != own:
        raise FieldError(field, f"{path} is of {given:.0f} bytes of weights; the model has {own}")
    return profile


def _measured(config: ServeConfig, engine: Engine, degree: int) -> BatchProfile:
    threads, began_s = cores_per_share(config), time.monotonic()
    with contextlib.closing(lone_executor(config, engine, degree, threads)) as executor:
        profile = measure_profile(executor, engine.facts, machine(degree, threads))
    logger.info("measured batches in %.1f s", time.monotonic() - began_s)
    return profile


def machine(degree: int, threads: int) -> str:
    """What an instance runs on, in words."""
    return f"{degree} x {threads} threads" if degree > 1 else f"{threads} threads"


def step_profiles(
    config: ServeConfig, facts: ModelFacts, degrees: Sequence[int]
) -> dict[int, StepProfile]:
    """The step-time table of every tensor-parallel degree that instances may have.

    That of degree 1 is the configured one, else the one in the model's folder; that of degree
    2, 3, ... is beside it: ``step_profile_tp2.json``. Raises FieldError for a missing one.
    """
    return {degree: _step_profile(config, facts, degree) for degree in degrees}


def _step_profile(config: ServeConfig, facts: ModelFacts, degree: int) -> StepProfile:
    path = _step_profile_path(config, facts, degree)
    if path.is_file():
        return StepProfile.load(path)
    options = f"--model {config.model} --device {config.device} --tp {degree}"
    how = f"no file {path}; make one with: stepserve profile {options} --out {path}"
    if degree == 1:
        raise FieldError("profile", how)
    raise FieldError("control.tp_degrees", f"nothing says how fast degree {degree} is: {how}")


def _step_profile_path(config: ServeConfig, facts: ModelFacts, degree: int) -> Path:
    first = Path(config.profile or facts.folder / "step_profile.json")
    return first if degree == 1 else first.with_name(f"{first.stem}_tp{degree}.json")


def tp_degrees(config: ServeConfig, engine: Engine) -> tuple[int, ...]:
    """Degrees that instances may have: those of the layout, and whatever a change may bring.

    A planner has those of ``control.tp_degrees`` that fit; an operator may ask for any of these
    that the engine can form and whose times are known. Raises FieldError if the planner could
    not begin with the layout.
    """
    control, first = config.control, set(config.degrees)
    if not control.plans and not config.operator_api:
        return tuple(sorted(first))
    degrees = {degree for degree in control.tp_degrees if degree <= sum(config.degrees)}
    if not control.plans:
        offered = (degree for degree in degrees - first if _known(config, engine, degree))
        return tuple(sorted(first.union(offered)))
    for degree in sorted(first - degrees):
        raise FieldError("control.tp_degrees", f"needs {degree}: there are instances of it")
    return tuple(sorted(degrees))


def _known(config: ServeConfig, engine: Engine, degree: int) -> bool:
    """Whether something says how fast a degree is, and the engine can form it."""
    facts = engine.facts
    timed = facts.family is Family.AUTOREGRESSIVE
    if not timed and not _step_profile_path(config, facts, degree).is_file():
        return False
    try:
        engine.check((*config.degrees, degree))
    except FieldError:
        return False
    return True

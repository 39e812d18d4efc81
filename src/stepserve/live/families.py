"""What a live cluster is made of that depends on the model's family.

A diffusion model brings step-time tables, an autoregressive one a profile of batches; everything
else, from the transport to the gateway, is the same.
"""

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import stepserve.engine.bundled
from stepserve.core.config import Choice, ServeConfig
from stepserve.core.errors import FieldError
from stepserve.core.ids import InstanceId
from stepserve.core.instance import InstanceSpec, Link
from stepserve.core.plan import Slot
from stepserve.core.protocols import KvPages, StepPredictor
from stepserve.core.request import Family
from stepserve.cost.batch_profile import BatchProfile
from stepserve.cost.step_table import StepProfile, StepProfiles
from stepserve.engine.ar_executor import AutoregressiveExecutor
from stepserve.engine.ar_profiling import measure_grid
from stepserve.engine.diffusion_executor import DiffusionExecutor
from stepserve.engine.loader import LoadedModel, load_model
from stepserve.engine.parallel import Share
from stepserve.engine.workers import (
    ParallelAutoregressiveExecutor,
    ParallelExecutor,
    Setup,
    prepare,
)
from stepserve.families.assemble import FAMILIES
from stepserve.families.autoregressive import AUTOREGRESSIVE
from stepserve.families.diffusion import DIFFUSION
from stepserve.families.forecasts import make_forecast, parts_of
from stepserve.families.setup import SchedulerSetup

from .hub import is_hub_name, snapshot
from .instance import Instance
from .recording import Listener

logger = logging.getLogger(__name__)

AnyExecutor = DiffusionExecutor | AutoregressiveExecutor | ParallelExecutor

BUNDLED = Path(stepserve.engine.bundled.__file__).parent / "model"
BATCH_PROFILE = "batch_profile.json"

COPY_BYTES_PER_S, COPY_S = 1e9, 0.002
"""Keys and values from one thread of this process to another: gathered, checked, scattered."""

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Recipe:
    """What instances are made of, wherever they will live: it can be pickled.

    Paths in ``config`` mean the same files there.
    """

    config: ServeConfig
    setup: SchedulerSetup

    def load(self, degree: int) -> LoadedModel:
        """The model for an instance of a degree; above 1 its workers read the weights themselves.

        Raises FieldError if it or its device cannot be had.
        """
        return load(self.config) if degree == 1 else describe(self.config)

    def predictor(self) -> StepPredictor:
        """A fresh predictor of what requests still need."""
        parts = parts_of(model_folder(self.config.model))
        return make_forecast(FAMILIES[self.setup.family], self.config.predictor, parts)

    def instance(
        self,
        loaded: LoadedModel,
        spec: InstanceSpec,
        incarnation: int,
        predictor: StepPredictor,
        now_s: Callable[[], float],
        listeners: Sequence[Listener],
    ) -> Instance:
        """An instance, on the thread that will run it: one of degree g is g processes."""
        threads = cores_per_share(self.config)
        torch.set_num_threads(threads)
        local = self.setup.new_local(spec)
        executor = make_executor(self.config, loaded, spec, threads)
        return Instance(local, executor, predictor, now_s, incarnation, listeners)


def load(config: ServeConfig) -> LoadedModel:
    """Load the configured model onto the configured device.

    Without its weights if no instance will ever have all of it.
    """
    dtype = _dtype(config)
    try:
        device = torch.device(config.device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise FieldError("device", f"{config.device!r} cannot be used: {error}") from error
    lasts = not config.control.plans and not config.operator_api
    if lasts and min(config.degrees) > 1:
        return describe(config)
    return load_model(model_folder(config.model), device, dtype)


def describe(config: ServeConfig) -> LoadedModel:
    """The configured model without its weights, for where none of it runs."""
    return load_model(model_folder(config.model), torch.device("meta"), _dtype(config))


def _dtype(config: ServeConfig) -> torch.dtype:
    if config.dtype not in DTYPES:
        raise FieldError("dtype", f"unknown {config.dtype!r}; known: {', '.join(DTYPES)}")
    return DTYPES[config.dtype]


def model_folder(name: str) -> Path:
    """The folder of a model: ``bundled``, a checkpoint's in Hugging Face layout, or of the hub."""
    folder = snapshot(name) if is_hub_name(name) else BUNDLED if name == "bundled" else Path(name)
    if not (folder / "config.json").is_file():
        raise FieldError("model", f"no config.json in {folder}; give 'bundled' or a model folder")
    return folder


def cores_per_share(config: ServeConfig) -> int:
    """CPU threads of each share: as configured, else the cores shared out evenly.

    An instance of tensor-parallel degree g has g shares, each a process of its own.
    """
    if config.threads_per_instance:
        return config.threads_per_instance
    return max(1, len(os.sched_getaffinity(0)) // sum(config.degrees))


def make_setup(config: ServeConfig, loaded: LoadedModel) -> SchedulerSetup:
    """What schedulers are made of. Raises FieldError for what the model cannot be served with."""
    if loaded.family is Family.AUTOREGRESSIVE:
        return _ar(config, loaded)
    return _diffusion(config, loaded)


def make_executor(
    config: ServeConfig, loaded: LoadedModel, spec: InstanceSpec, threads: int
) -> AnyExecutor:
    """What runs an instance's steps, with so many CPU threads for each of its shares."""
    causal = loaded.family is Family.AUTOREGRESSIVE
    tokens, pages = spec.page_tokens, spec.page_capacity
    if spec.tp_degree == 1:
        kind = AutoregressiveExecutor if causal else DiffusionExecutor
        return kind(loaded, page_tokens=tokens, page_capacity=pages, threads=threads)
    assert loaded.folder is not None, "checked at the start"
    assert spec.slot is not None, "instances are formed on slots"
    on_cpu = torch.device(config.device).type == "cpu"
    devices = tuple("cpu" if on_cpu else f"{config.device}:{gpu}" for gpu in spec.slot.gpus)
    dtype = next(loaded.model.parameters()).dtype
    setup = Setup(str(loaded.folder), devices, dtype, tokens, pages, threads, config.hang_s)
    return ParallelAutoregressiveExecutor(setup) if causal else ParallelExecutor(setup)


def lone_executor(
    config: ServeConfig, loaded: LoadedModel, degree: int, threads: int
) -> AnyExecutor:
    """That of an instance by itself, to be measured."""
    check_split(config, loaded, (degree,))
    pages, tokens = config.kv_pages, config.page_tokens
    slot = Slot(0, tuple(range(degree)))
    spec = InstanceSpec(InstanceId("measured"), degree, pages, tokens, 1, slot)
    return make_executor(config, loaded, spec, threads)


def check_split(config: ServeConfig, loaded: LoadedModel, degrees: Sequence[int]) -> None:
    """Raises FieldError if instances of these degrees cannot be formed."""
    if max(degrees) == 1:
        return
    for degree in degrees:
        Share.of(loaded.config, 0, degree)
    if loaded.folder is None:
        raise FieldError("model", "only a model in a folder can be split over processes")
    if torch.device(config.device).type != "cpu":
        if config.cluster != "local":
            raise FieldError("layout", "degrees above 1 on GPUs need --cluster local")
        if min(degrees) == 1:
            raise FieldError("layout", "degree 1 beside others needs --device cpu")
        gpus = sum(config.degrees)
        if config.device != "cuda" or torch.cuda.device_count() < gpus:
            raise FieldError("device", f"must be cuda, with {gpus} GPUs, or cpu")
    if config.cluster == "local":
        prepare()


def _diffusion(config: ServeConfig, loaded: LoadedModel) -> SchedulerSetup:
    if config.keep_profile:
        raise FieldError("keep_profile", "batch times are those of autoregressive models")
    control = DIFFUSION.resolved(config.control)
    degrees = tp_degrees(config, loaded)
    check_split(config, loaded, degrees)
    control = dataclasses.replace(control, tp_degrees=degrees)
    profiles = StepProfiles(step_profiles(config, degrees))
    return SchedulerSetup(Family.DIFFUSION, control, profiles)


def _ar(config: ServeConfig, loaded: LoadedModel) -> SchedulerSetup:
    """Without a profile in the model's folder (``stepserve profile`` makes one) a few batches are
    measured now, on an instance of the lowest degree; in any case the schedulers correct
    theirs while they serve, each degree its own.
    """
    if config.log_steps:
        raise FieldError("log_steps", "step logs are of diffusion models: they train predictors")
    if config.control.plans:
        raise FieldError("control.planner", "layouts are planned for diffusion models only")
    control = AUTOREGRESSIVE.resolved(config.control)
    placement, others = control.placement or Choice(), len(config.degrees) - 1
    first = placement.options.get("prefill_instances", 1)
    if placement.use == "disaggregated" and not 1 <= first <= others:
        what = f"must be in 1 .. {others}: some prefill, the others decode"
        raise FieldError("control.placement.prefill_instances", what)
    degrees = tp_degrees(config, loaded)
    check_split(config, loaded, degrees)
    control = dataclasses.replace(control, tp_degrees=degrees)
    profile = _batches(config, loaded, degrees[0])
    link = Link(profile.line.kv_bytes_per_token, COPY_BYTES_PER_S, COPY_S)
    return SchedulerSetup(Family.AUTOREGRESSIVE, control, profile, link)


def _batches(config: ServeConfig, loaded: LoadedModel, lowest: int) -> BatchProfile:
    """What was kept, else the profile that is named, or the model's own; else measured now.

    Raises FieldError for one that is missing, or of another model.
    """
    field, path = "keep_profile", Path(config.keep_profile)
    if not (config.keep_profile and path.is_file()):
        field, path = "profile", Path(config.profile or model_folder(config.model) / BATCH_PROFILE)
    if not path.is_file():
        if config.profile:
            raise FieldError("profile", f"no file {path}; make one with: stepserve profile")
        if config.cluster != "local":
            command = f"stepserve profile --model {config.model} --out {path}"
            raise FieldError("profile", f"needed where instances live elsewhere: {command}")
        threads = cores_per_share(config)
        with contextlib.closing(lone_executor(config, loaded, lowest, threads)) as executor:
            return batch_profile(loaded, threads, executor=executor)
    profile = BatchProfile.load(path, field)
    given, own = profile.line.weight_bytes, weight_bytes(loaded)
    if given != own:
        raise FieldError(field, f"{path} is of {given:.0f} bytes of weights; the model has {own}")
    return profile


def weight_bytes(loaded: LoadedModel) -> int:
    """Bytes of a model's parameters, in the type that they are served in."""
    return sum(p.numel() * p.element_size() for p in loaded.model.parameters())


def batch_profile(
    loaded: LoadedModel,
    threads: int,
    prefills: Sequence[int] = (0, 64, 256),
    contexts: Sequence[int] = (0, 128),
    decodes: Sequence[int] = (0, 1, 4),
    repeats: int = 2,
    executor: AnyExecutor | None = None,
) -> BatchProfile:
    """Measure batches of an autoregressive model on its device: by default a few, in seconds.

    ``executor``: of an instance of another degree than 1, which has ``threads`` for each share.
    """
    executor = executor or AutoregressiveExecutor(loaded, threads=threads)
    assert isinstance(executor, KvPages), "it is of an autoregressive model"
    began_s = time.monotonic()
    steps = measure_grid(executor, prefills, contexts, decodes, repeats)
    logger.info("measured %d batches in %.1f s", len(steps), time.monotonic() - began_s)
    shape = loaded.config
    value_bytes = next(loaded.model.parameters()).element_size()
    weights = weight_bytes(loaded) // value_bytes
    split = f"{executor.setup.size} x " if isinstance(executor, ParallelExecutor) else ""
    source = f"measured: {loaded.name}, {split}{threads} threads, {len(steps)} batches"
    return BatchProfile.fitted(
        parameters=weights,
        layers=shape.layers,
        hidden=shape.heads * shape.head_dim,
        kv_bytes_per_token=2 * shape.layers * shape.kv_heads * shape.head_dim * value_bytes,
        weight_bytes=weights * value_bytes,
        steps=steps,
        source=source,
    )


def step_profiles(config: ServeConfig, degrees: Sequence[int]) -> dict[int, StepProfile]:
    """The step-time table of every tensor-parallel degree that instances may have.

    That of degree 1 is the configured one, else the one in the model's folder; that of degree
    2, 3, ... is beside it: ``step_profile_tp2.json``. Raises FieldError for a missing one.
    """
    return {degree: _step_profile(config, degree) for degree in degrees}


def _step_profile_path(config: ServeConfig, degree: int) -> Path:
    first = Path(config.profile or model_folder(config.model) / "step_profile.json")
    return first if degree == 1 else first.with_name(f"{first.stem}_tp{degree}.json")


def _step_profile(config: ServeConfig, degree: int) -> StepProfile:
    path = _step_profile_path(config, degree)
    if path.is_file():
        return StepProfile.load(path)
    options = f"--model {config.model} --device {config.device} --tp {degree}"
    how = f"no file {path}; make one with: stepserve profile {options} --out {path}"
    if degree == 1:
        raise FieldError("profile", how)
    raise FieldError("control.tp_degrees", f"nothing says how fast degree {degree} is: {how}")


def tp_degrees(config: ServeConfig, loaded: LoadedModel) -> tuple[int, ...]:
    """Degrees that instances may have: those of the layout, and whatever a change may bring.

    A planner has those of ``control.tp_degrees`` that fit; an operator may ask for any of these
    that the model can be split by and whose times are known. Raises FieldError if the planner
    could not begin with the layout, or on a device that it cannot divide.
    """
    control, first = config.control, set(config.degrees)
    cpu = torch.device(config.device).type == "cpu"
    if not control.plans and not (config.operator_api and cpu):
        return tuple(sorted(first))
    if not cpu:
        raise FieldError("control.planner", f"cannot divide {config.device!r}; only cpu")
    degrees = {degree for degree in control.tp_degrees if degree <= sum(config.degrees)}
    if not control.plans:
        offered = (degree for degree in degrees if _known(config, loaded, degree))
        return tuple(sorted(first.union(offered)))
    for degree in sorted(first - degrees):
        raise FieldError("control.tp_degrees", f"needs {degree}: there are instances of it")
    return tuple(sorted(degrees))


def _known(config: ServeConfig, loaded: LoadedModel, degree: int) -> bool:
    """Whether a model can be split by a degree, and something says how fast that is."""
    try:
        Share.of(loaded.config, 0, degree)
    except FieldError:
        return False
    return loaded.family is Family.AUTOREGRESSIVE or _step_profile_path(config, degree).is_file()

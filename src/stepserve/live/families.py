"""What a live cluster is made of that depends on the model's family.

A diffusion model brings step-time tables, a causal one a profile of batches; everything else, from
the transport to the gateway, is the same. An event log's header holds what schedulers were made
with, so a replay makes them here, too.
"""

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

import stepserve.engine.bundled
from stepserve.control.assemble import assemble_global, assemble_local
from stepserve.control.global_scheduler import GlobalScheduler
from stepserve.control.local_scheduler import LocalScheduler
from stepserve.core.config import ControlConfig, ServeConfig
from stepserve.core.errors import FieldError
from stepserve.core.ids import InstanceId
from stepserve.core.instance import InstanceSpec
from stepserve.core.plan import Slot
from stepserve.core.protocols import CostModel, Executor, KvPages, StepPredictor
from stepserve.core.request import Family
from stepserve.cost.batch_profile import BatchProfile
from stepserve.cost.boosted_steps import HEALING_RATE, BoostedSteps, StepModel
from stepserve.cost.output_length import ClassMean, Hinted
from stepserve.cost.remaining_steps import PUBLISHED, MeanYield, Yields
from stepserve.cost.segment_cost import Elapsed, Link, Occupancy
from stepserve.cost.step_table import StepProfile, StepTable
from stepserve.engine.causal import AutoregressiveExecutor
from stepserve.engine.causal_profiling import measure_grid
from stepserve.engine.executor import DiffusionExecutor
from stepserve.engine.loader import LoadedModel
from stepserve.engine.parallel import Share
from stepserve.engine.workers import ParallelCausalExecutor, ParallelExecutor, Setup, prepare

from .event_log import Header

logger = logging.getLogger(__name__)

AnyExecutor = DiffusionExecutor | AutoregressiveExecutor | ParallelExecutor

BUNDLED = Path(stepserve.engine.bundled.__file__).parent / "model"
BATCH_PROFILE = "batch_profile.json"

COPY_BYTES_PER_S, COPY_S = 1e9, 0.002
"""Keys and values from one thread of this process to another: gathered, checked, scattered."""

FORECAST_TOKENS = 64
"""Decoded tokens between forecasts of a causal request: its length is all they foretell."""


@dataclass(frozen=True, slots=True)
class Parts:
    """``header``: what schedulers are made of.

    ``executor`` is made of a spec and the CPU threads of each share: one of the model that was
    loaded, or a group of processes with a share of its folder each.
    """

    header: Header
    predictor: StepPredictor
    executor: Callable[[InstanceSpec, int], Executor]


def model_folder(name: str) -> Path:
    """The folder of a model: ``bundled``, or a path to a Hugging Face checkpoint."""
    folder = BUNDLED if name == "bundled" else Path(name)
    if not (folder / "config.json").is_file():
        raise FieldError("model", f"no config.json in {folder}; give 'bundled' or a model folder")
    return folder


def cores_per_share(config: ServeConfig, layout: Sequence[int]) -> int:
    """CPU threads of each share: as configured, else the cores shared out evenly.

    An instance of tensor-parallel degree g has g shares, each a process of its own.
    """
    if config.threads_per_instance:
        return config.threads_per_instance
    return max(1, len(os.sched_getaffinity(0)) // sum(layout))


def parts(config: ServeConfig, loaded: LoadedModel, layout: Sequence[int]) -> Parts:
    """The parts of the model's family; ``layout`` has each instance's degree at the start.

    Raises FieldError for what the model cannot be served with.
    """
    if loaded.family is Family.AUTOREGRESSIVE:
        return _causal(config, loaded, layout)
    return _diffusion(config, loaded, layout)


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
    return ParallelCausalExecutor(setup) if causal else ParallelExecutor(setup)


def lone_executor(
    config: ServeConfig, loaded: LoadedModel, degree: int, threads: int
) -> AnyExecutor:
    """That of an instance by itself, to be measured."""
    check_split(config, loaded, (degree,), (degree,))
    pages, tokens = config.kv_pages, config.page_tokens
    slot = Slot(0, tuple(range(degree)))
    spec = InstanceSpec(InstanceId("measured"), degree, pages, tokens, 1, slot)
    return make_executor(config, loaded, spec, threads)


def check_split(
    config: ServeConfig, loaded: LoadedModel, degrees: Sequence[int], layout: Sequence[int]
) -> None:
    """Raises FieldError if instances of these degrees cannot be formed."""
    if max(degrees) == 1:
        return
    for degree in degrees:
        Share.of(loaded.config, 0, degree)
    if loaded.folder is None:
        raise FieldError("model", "only a model in a folder can be split over processes")
    if torch.device(config.device).type != "cpu":
        if min(layout) == 1:
            raise FieldError("layout", "degree 1 beside others needs --device cpu")
        if config.device != "cuda" or torch.cuda.device_count() < sum(layout):
            raise FieldError("device", f"must be cuda, with {sum(layout)} GPUs, or cpu")
    prepare()


def new_global(header: Header) -> GlobalScheduler:
    """A fresh scheduler of the cluster."""
    cost, profile = _cost(header), header.batches
    if profile is None:
        return assemble_global(header.control, cost)
    tokens = header.control.tokens
    link = Link(profile.line.kv_bytes_per_token, COPY_BYTES_PER_S, COPY_S)
    segments = {"occupancy": Occupancy, "elapsed": Elapsed}[tokens.cost](cost, tokens, link)
    return assemble_global(header.control, cost, segments)


def new_local(header: Header, spec: InstanceSpec) -> LocalScheduler:
    """A fresh scheduler of an instance, with its own copy of the cost model to correct."""
    return assemble_local(header.control, spec, _cost(header))


def _cost(header: Header) -> CostModel:
    if header.batches is None:
        return StepTable(header.profiles)
    return header.batches.table(header.control.tp_degrees)


def _diffusion(config: ServeConfig, loaded: LoadedModel, layout: Sequence[int]) -> Parts:
    degrees = tp_degrees(config, layout)
    check_split(config, loaded, degrees, layout)
    control = dataclasses.replace(config.control, tp_degrees=degrees, family=Family.DIFFUSION)
    header = Header(control, step_profiles(config, degrees))
    return Parts(header, step_predictor(config), partial(make_executor, config, loaded))


def _causal(config: ServeConfig, loaded: LoadedModel, layout: Sequence[int]) -> Parts:
    """Placement is ``tandem_split`` where the configuration has its default.

    Without a profile in the model's folder (``stepserve profile`` makes one) a few batches are
    measured now, on an instance of the lowest degree; in any case the schedulers correct
    theirs while they serve, each degree its own.
    """
    given, usual = config.control, ControlConfig()
    if given.planner != "none":
        raise FieldError("control.planner", "layouts are planned for diffusion models only")
    if config.predictor not in ("auto", "mean"):
        raise FieldError("predictor", "trained ones are of diffusion models")
    if config.log_steps:
        raise FieldError("log_steps", "step logs are of diffusion models: they train predictors")
    first = given.tokens.prefill_instances
    if given.placement == "disaggregated" and not 1 <= first < len(layout):
        what = f"must be in 1 .. {len(layout) - 1}: some prefill, the others decode"
        raise FieldError("control.tokens.prefill_instances", what)
    degrees = tuple(sorted(set(layout)))
    check_split(config, loaded, degrees, layout)
    split = given.placement == usual.placement
    rare = given.predict_every_tokens == usual.predict_every_tokens
    control = dataclasses.replace(
        given,
        family=Family.AUTOREGRESSIVE,
        tp_degrees=degrees,
        placement="tandem_split" if split else given.placement,
        predict_every_tokens=FORECAST_TOKENS if rare else given.predict_every_tokens,
    )

    path = Path(config.profile or model_folder(config.model) / BATCH_PROFILE)
    if path.is_file():
        profile = BatchProfile.load(path)
    elif config.profile:
        raise FieldError("profile", f"no file {path}; make one with: stepserve profile")
    else:
        threads = cores_per_share(config, layout)
        if degrees[0] == 1:
            profile = batch_profile(loaded, threads)
        else:
            with closing(lone_executor(config, loaded, degrees[0], threads)) as lone:
                profile = batch_profile(loaded, threads, executor=lone)
    executor = partial(make_executor, config, loaded)
    return Parts(Header(control, {}, profile), Hinted(ClassMean()), executor)


def batch_profile(
    loaded: LoadedModel,
    threads: int,
    prefills: Sequence[int] = (0, 64, 256),
    contexts: Sequence[int] = (0, 128),
    decodes: Sequence[int] = (0, 1, 4),
    repeats: int = 2,
    executor: AnyExecutor | None = None,
) -> BatchProfile:
    """Measure batches of a causal model on its device: by default a few, in seconds of time.

    ``executor``: of an instance of another degree than 1, which has ``threads`` for each share.
    """
    executor = executor or AutoregressiveExecutor(loaded, threads=threads)
    assert isinstance(executor, KvPages), "it is of a causal model"
    began_s = time.monotonic()
    steps = measure_grid(executor, prefills, contexts, decodes, repeats)
    logger.info("measured %d batches in %.1f s", len(steps), time.monotonic() - began_s)
    shape, width = loaded.config, loaded.config.hidden_size // loaded.config.heads
    weights = sum(parameter.numel() for parameter in loaded.model.parameters())
    value_bytes = next(loaded.model.parameters()).element_size()
    split = f"{executor.setup.size} x " if isinstance(executor, ParallelExecutor) else ""
    source = f"measured: {loaded.name}, {split}{threads} threads, {len(steps)} batches"
    return BatchProfile.fitted(
        parameters=weights,
        layers=shape.layers,
        hidden=shape.hidden_size,
        kv_bytes_per_token=2 * shape.layers * shape.kv_heads * width * value_bytes,
        weight_bytes=weights * value_bytes,
        steps=steps,
        source=source,
    )


def step_profiles(config: ServeConfig, degrees: Sequence[int]) -> dict[int, StepProfile]:
    """The step-time table of every tensor-parallel degree that instances may have.

    That of degree 1 is the configured one, else the one in the model's folder; that of degree
    2, 3, ... is beside it: ``step_profile_tp2.json``. Raises FieldError for a missing one.
    """
    first = Path(config.profile or model_folder(config.model) / "step_profile.json")
    return {degree: _step_profile(config, first, degree) for degree in degrees}


def _step_profile(config: ServeConfig, first: Path, degree: int) -> StepProfile:
    path = first if degree == 1 else first.with_name(f"{first.stem}_tp{degree}.json")
    if path.is_file():
        return StepProfile.load(path)
    options = f"--model {config.model} --device {config.device} --tp {degree}"
    how = f"no file {path}; make one with: stepserve profile {options} --out {path}"
    if degree == 1:
        raise FieldError("profile", how)
    raise FieldError("control.tp_degrees", f"nothing says how fast degree {degree} is: {how}")


def tp_degrees(config: ServeConfig, layout: Sequence[int]) -> tuple[int, ...]:
    """Degrees that instances may have: with a planner, those configured that fit.

    Raises FieldError if the planner could not begin with the layout, or on a device that it
    cannot divide.
    """
    control = config.control
    if control.planner == "none":
        return tuple(sorted(set(layout)))
    if torch.device(config.device).type != "cpu":
        raise FieldError("control.planner", f"cannot divide {config.device!r}; only cpu")
    degrees = tuple(degree for degree in control.tp_degrees if degree <= sum(layout))
    for degree in sorted(set(layout) - set(degrees)):
        raise FieldError("control.tp_degrees", f"needs {degree}: there are instances of it")
    return degrees


def step_predictor(config: ServeConfig) -> StepPredictor:
    """The trained predictor of the model's folder, else mean yields (measured, or published).

    Raises FieldError if the trained one is asked for and there is none.
    """
    folder = model_folder(config.model)
    trained = folder / "step_predictor.txt"
    if config.predictor == "boosted" or (config.predictor == "auto" and trained.is_file()):
        return BoostedSteps(StepModel.load(trained), HEALING_RATE)
    path = folder / "yields.json"
    return MeanYield(Yields.load(path) if path.is_file() else PUBLISHED)

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
from dataclasses import dataclass
from pathlib import Path

import torch

import stepserve.engine.bundled
from stepserve.control.assemble import assemble_global, assemble_local
from stepserve.control.global_scheduler import GlobalScheduler
from stepserve.control.local_scheduler import LocalScheduler
from stepserve.core.config import ControlConfig, ServeConfig
from stepserve.core.errors import FieldError
from stepserve.core.instance import InstanceSpec
from stepserve.core.protocols import CostModel, Executor, StepPredictor
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
from stepserve.engine.loader import LoadedModel, load_model

from .event_log import Header
from .hub import is_hub_name, snapshot
from .instance import Instance
from .recording import Listener

logger = logging.getLogger(__name__)

BUNDLED = Path(stepserve.engine.bundled.__file__).parent / "model"
BATCH_PROFILE = "batch_profile.json"

COPY_BYTES_PER_S, COPY_S = 1e9, 0.002
"""Keys and values from one thread of this process to another: gathered, checked, scattered."""

FORECAST_TOKENS = 64
"""Decoded tokens between forecasts of a causal request: its length is all they foretell."""


DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Recipe:
    """What instances are made of, wherever they will live: it can be pickled.

    Paths in ``config`` mean the same files there.
    """

    config: ServeConfig
    header: Header

    def load(self) -> LoadedModel:
        """The model. Raises FieldError if it or its device cannot be had."""
        return load(self.config)

    def predictor(self) -> StepPredictor:
        """A fresh predictor of what requests still need."""
        if self.header.batches is not None:
            return Hinted(ClassMean())
        return step_predictor(self.config)

    def instance(
        self,
        loaded: LoadedModel,
        spec: InstanceSpec,
        incarnation: int,
        predictor: StepPredictor,
        now_s: Callable[[], float],
        listeners: Sequence[Listener],
    ) -> Instance:
        """An instance, on the thread that will run it: one of degree g has g shares of threads."""
        threads = cores_per_instance(self.config) * spec.tp_degree
        torch.set_num_threads(threads)
        local, executor = new_local(self.header, spec), new_executor(loaded, spec, threads)
        return Instance(local, executor, predictor, now_s, incarnation, listeners)


def load(config: ServeConfig) -> LoadedModel:
    """Load the configured model onto the configured device."""
    dtype = _dtype(config)
    try:
        device = torch.device(config.device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise FieldError("device", f"{config.device!r} cannot be used: {error}") from error
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


def cores_per_instance(config: ServeConfig) -> int:
    """CPU threads of each instance: as configured, else the cores shared out evenly."""
    if config.threads_per_instance:
        return config.threads_per_instance
    return max(1, len(os.sched_getaffinity(0)) // config.instances)


def make_header(config: ServeConfig, loaded: LoadedModel) -> Header:
    """What schedulers are made of. Raises FieldError for what the family cannot be served with."""
    if loaded.family is Family.AUTOREGRESSIVE:
        return _causal(config, loaded)
    return _diffusion(config)


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


def new_executor(loaded: LoadedModel, spec: InstanceSpec, threads: int) -> Executor:
    """The executor of an instance, with pages of its own."""
    causal = loaded.family is Family.AUTOREGRESSIVE
    kind = AutoregressiveExecutor if causal else DiffusionExecutor
    return kind(
        loaded,
        page_tokens=spec.page_tokens,
        page_capacity=spec.page_capacity,
        threads=threads,
    )


def _cost(header: Header) -> CostModel:
    return StepTable(header.profiles) if header.batches is None else header.batches.table()


def _diffusion(config: ServeConfig) -> Header:
    if config.keep_profile:
        raise FieldError("keep_profile", "batch times are those of causal models")
    degrees = tp_degrees(config)
    control = dataclasses.replace(config.control, tp_degrees=degrees, family=Family.DIFFUSION)
    return Header(control, step_profiles(config, degrees))


def _causal(config: ServeConfig, loaded: LoadedModel) -> Header:
    """Instances of degree 1. Placement is ``tandem_split`` where the configuration has its default.

    Without a profile in the model's folder (``stepserve profile`` makes one) a few batches are
    measured now; in any case the schedulers correct theirs while they serve.
    """
    given, usual = config.control, ControlConfig()
    if given.planner != "none":
        raise FieldError("control.planner", "layouts are planned for diffusion models only")
    if config.predictor not in ("auto", "mean"):
        raise FieldError("predictor", "trained ones are of diffusion models")
    if config.log_steps:
        raise FieldError("log_steps", "step logs are of diffusion models: they train predictors")
    first = given.tokens.prefill_instances
    if given.placement == "disaggregated" and not 1 <= first < config.instances:
        what = f"must be in 1 .. {config.instances - 1}: some prefill, the others decode"
        raise FieldError("control.tokens.prefill_instances", what)
    split = given.placement == usual.placement
    rare = given.predict_every_tokens == usual.predict_every_tokens
    control = dataclasses.replace(
        given,
        family=Family.AUTOREGRESSIVE,
        tp_degrees=(1,),
        placement="tandem_split" if split else given.placement,
        predict_every_tokens=FORECAST_TOKENS if rare else given.predict_every_tokens,
    )
    return Header(control, {}, _batches(config, loaded))


def _batches(config: ServeConfig, loaded: LoadedModel) -> BatchProfile:
    """What was kept, else the profile that is named, or the model's own; else measured now.

    Raises FieldError for one that is missing, or of another model.
    """
    field, path = "keep_profile", Path(config.keep_profile)
    if not (config.keep_profile and path.is_file()):
        field, path = "profile", Path(config.profile or model_folder(config.model) / BATCH_PROFILE)
    if not path.is_file():
        if config.profile:
            raise FieldError("profile", f"no file {path}; make one with: stepserve profile")
        if next(loaded.model.parameters()).is_meta:
            raise FieldError("profile", "needed where instances live elsewhere: stepserve profile")
        return batch_profile(loaded, cores_per_instance(config))
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
) -> BatchProfile:
    """Measure batches of a causal model on its device: by default a few, in seconds of time."""
    executor = AutoregressiveExecutor(loaded, threads=threads)
    began_s = time.monotonic()
    steps = measure_grid(executor, prefills, contexts, decodes, repeats)
    logger.info("measured %d batches in %.1f s", len(steps), time.monotonic() - began_s)
    shape = loaded.config
    value_bytes = next(loaded.model.parameters()).element_size()
    weights = weight_bytes(loaded) // value_bytes
    source = f"measured: {loaded.name}, {threads} threads, {len(steps)} batches"
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


def _profile_path(config: ServeConfig, degree: int) -> Path:
    first = Path(config.profile or model_folder(config.model) / "step_profile.json")
    return first if degree == 1 else first.with_name(f"{first.stem}_tp{degree}.json")


def _step_profile(config: ServeConfig, degree: int) -> StepProfile:
    path = _profile_path(config, degree)
    if path.is_file():
        return StepProfile.load(path)
    options = f"--model {config.model} --device {config.device} --tp {degree}"
    how = f"no file {path}; make one with: stepserve profile {options} --out {path}"
    if degree == 1:
        raise FieldError("profile", how)
    raise FieldError("control.tp_degrees", f"nothing says how fast degree {degree} is: {how}")


def tp_degrees(config: ServeConfig) -> tuple[int, ...]:
    """Degrees that instances may have: with a planner, those configured that fit.

    Raises FieldError if the planner could not begin with instances of degree 1, or on a device
    where an instance cannot be given more threads.
    """
    control = config.control
    cpu = torch.device(config.device).type == "cpu"
    if control.planner == "none" and not (config.operator_api and cpu):
        return (1,)
    if not cpu:
        raise FieldError("control.planner", f"cannot split {config.device!r}; only cpu threads")
    degrees = tuple(degree for degree in control.tp_degrees if degree <= config.instances)
    if control.planner == "none":  # the operator may ask for what there are profiles of
        degrees = tuple(d for d in degrees if d == 1 or _profile_path(config, d).is_file())
    if 1 not in degrees:
        raise FieldError("control.tp_degrees", "needs 1: every instance begins with one share")
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

"""Puts a simulated cluster together: requests, instances, step times, schedulers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from stepserve.control.reconfigure import slot_id
from stepserve.core.ids import RequestId
from stepserve.core.instance import InstanceSpec
from stepserve.core.plan import Slot
from stepserve.core.protocols import CostModel, StepPredictor
from stepserve.core.request import (
    SLO,
    CacheMode,
    DiffusionOptions,
    Family,
    OnMiss,
    RefreshScope,
    Request,
    ThresholdBounds,
)
from stepserve.cost.step_table import StepProfile, StepTable
from stepserve.families.assemble import assemble_global, assemble_local, make_planner
from stepserve.families.diffusion import DIFFUSION

from .config import Setting, System
from .datasets import SimRequest, published_run
from .executors import Executors
from .faults import Faults
from .known_steps import KnownSteps
from .profiles import host_overhead, measured_profile, step_profile
from .record import DiffusionRecord
from .world import Learn, OnHandled, Timed, World, untimed

Profiles = Mapping[int, StepProfile]
CLASSES = 3
"""Stream of chance of the SLO classes, beside those of ``datasets``."""


def profiles(setting: Setting, system: System) -> dict[int, StepProfile]:
    """The step tables of a setting's hardware, host overhead included, by TP degree.

    Raises FieldError for hardware of which nothing is known, at a degree that is needed.
    """
    hardware = setting.hardware or published_run(setting.model, setting.dataset).gpu
    if hardware.endswith(".json"):
        planned = system.control.plans
        degrees = {setting.tp_degree, *(system.control.tp_degrees if planned else ())}
        return {degree: measured_profile(Path(hardware), degree) for degree in sorted(degrees)}
    overhead = host_overhead(hardware)
    return {
        degree: replace(
            step_profile(hardware, setting.model, degree),
            host_s=overhead.base_s,
            host_row_s=overhead.per_row_s,
        )
        for degree in (1, 2, 4)
    }


def specs(setting: Setting, system: System) -> tuple[InstanceSpec, ...]:
    """The instances at the start: every node in groups of ``tp_degree`` GPUs."""
    degree = setting.tp_degree
    slots = [
        Slot(node, tuple(range(first, first + degree)))
        for node, gpus in enumerate(setting.nodes)
        for first in range(0, gpus, degree)
    ]
    pages = math.ceil(degree * system.kv_tokens / system.page_tokens)
    return tuple(
        InstanceSpec(
            slot_id(slot), degree, pages, system.page_tokens, system.max_running_requests, slot
        )
        for slot in slots
    )


def slo_classes(setting: Setting, seed: int, requests: int) -> list[int]:
    """The SLO class of each request; for a seed, that of the n-th is always the same."""
    edges = np.cumsum(setting.class_shares)
    drawn = np.random.default_rng([seed, CLASSES]).random(requests) * edges[-1]
    classes: list[int] = np.searchsorted(edges, drawn, side="right").tolist()
    return classes


def make_request(
    setting: Setting, system: System, drawn: SimRequest, e2e_s: float | None, slo_class: int = 0
) -> Request:
    """A drawn request with the options of a system, of the ``slo_class``-th class.

    ``e2e_s``: the deadline that those of classes are relative to.
    """
    options = system.request
    slo = SLO(
        slo_class=f"class{slo_class}",
        e2e_s=None if e2e_s is None else e2e_s * setting.class_deadlines[slo_class],
        on_miss=OnMiss(options.on_miss),
        weight=setting.class_weights[slo_class],
    )
    return Request(
        id=RequestId(str(drawn.index)),
        family=Family.DIFFUSION,
        model=setting.model,
        prompt_tokens=drawn.prompt_tokens,
        max_output_tokens=drawn.output_tokens,
        arrival_s=drawn.arrival_s,
        slo=slo,
        diffusion=DiffusionOptions(
            thresholds=ThresholdBounds(options.preferred, options.floor),
            block_tokens=setting.block_tokens,
            cache_mode=CacheMode(setting.cache_mode),
            refresh_blocks=options.refresh_blocks,
            refresh_scope=RefreshScope(options.refresh_scope),
        ),
    )


def make_world(
    setting: Setting,
    system: System,
    tables: Profiles,
    executors: Executors,
    predictor: StepPredictor,
    seed: int,
    learn: Sequence[Learn] = (),
    timed: Timed = untimed,
    on_handled: OnHandled | None = None,
) -> World:
    """A world that has not started. Every scheduler has its own policies and cost model."""
    control = system.control_for(setting.gpus)
    known = KnownSteps(tables)

    def cost() -> CostModel:
        return StepTable(tables) if system.learn_steps else known

    return World(
        lambda: assemble_global(DIFFUSION, control, cost()),
        lambda spec: assemble_local(DIFFUSION, control, spec, cost()),
        executors=executors,
        record=DiffusionRecord,
        truth=known,
        predictor=predictor,
        planner=make_planner(DIFFUSION, control),
        delays=setting.delays,
        faults=Faults(setting.faults, seed),
        learn=learn,
        timed=timed,
        on_handled=on_handled,
    )

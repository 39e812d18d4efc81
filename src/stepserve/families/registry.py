"""Parts by name: what is built in, what other packages register, and any class by its path.

A name is one of ``BUILT_IN``, the name of an entry point of another package (``GROUPS``), or
``package.module:Class``. A part is a class with ``Options``, a frozen dataclass, and the
constructor ``(options, parts)``; modules are imported when one of their classes is asked for.
"""

import contextlib
import dataclasses
import importlib
from collections.abc import Collection, Iterator, Mapping
from importlib import metadata
from typing import Any

from stepserve.core.config import Choice
from stepserve.core.errors import FieldError, check_known
from stepserve.core.request import Family
from stepserve.tables import from_table

NOTHING = ""
"""In place of a class: the name stands for doing without."""

BUILT_IN: Mapping[str, Mapping[str, str]] = {
    "placement": {
        "least_loaded": "stepserve.policies.placement.least_loaded:LeastLoaded",
        "step_completion": "stepserve.policies.placement.step_completion:StepCompletion",
        "tandem_split": "stepserve.policies.placement.tandem_split:TandemSplit",
        "prompt_split": "stepserve.policies.placement.prompt_split:PromptSplit",
        "no_split": "stepserve.policies.placement.no_split:NoSplit",
        "disaggregated": "stepserve.policies.placement.disaggregated:Disaggregated",
    },
    "batching": {
        "all_running": "stepserve.policies.batching.all_running:AllRunning",
        "latency_budget": "stepserve.policies.batching.latency_budget:LatencyBudget",
        "age_budget": "stepserve.policies.batching.age_budget:AgeBudget",
        "tbt_budget": "stepserve.policies.batching.tbt_budget:TbtBudget",
        "static_chunk": "stepserve.policies.batching.static_chunk:StaticChunk",
    },
    "threshold": {
        "fixed": "stepserve.policies.threshold.fixed:FixedThreshold",
        "deadline_fit": "stepserve.policies.threshold.deadline_fit:DeadlineFit",
        "early_fit": "stepserve.policies.threshold.early_fit:EarlyFit",
        "schedule_fit": "stepserve.policies.threshold.schedule_fit:ScheduleFit",
        "at_cap": "stepserve.policies.threshold.at_cap:AtCap",
    },
    "load_control": {
        "none": NOTHING,
        "load_caps": "stepserve.policies.caps.load_caps:LoadCaps",
        "horizon_caps": "stepserve.policies.caps.horizon_caps:HorizonCaps",
        "marginal_caps": "stepserve.policies.caps.marginal_caps:MarginalCaps",
    },
    "migration": {
        "none": NOTHING,
        "recompute_step": "stepserve.policies.migration.recompute_step:RecomputeStep",
        "any_step": "stepserve.policies.migration.any_step:AnyStep",
    },
    "refresh": {
        "as_asked": NOTHING,
        "when_slack": "stepserve.policies.refresh.when_slack:WhenSlack",
    },
    "segment_cost": {
        "occupancy": "stepserve.cost.segment_cost:Occupancy",
        "elapsed": "stepserve.cost.segment_cost:Elapsed",
    },
    "forecast": {
        "mean": "stepserve.cost.remaining_steps:MeanYield",
        "boosted": "stepserve.cost.boosted_steps:BoostedSteps",
        "class_mean": "stepserve.cost.output_length:ClassMean",
        "hinted": "stepserve.cost.output_length:Hinted",
        "longest": "stepserve.cost.output_length:MaxTokens",
        "oracle": "stepserve.sim.oracle:Oracle",
        "known": "stepserve.sim.known_lengths:KnownLengths",
    },
    "planner": {
        "none": NOTHING,
        "greedy": "stepserve.planning.greedy:GreedyPlanner",
        "capacity_ilp": "stepserve.planning.two_stage:TwoStagePlanner",
    },
    "engine": {
        "torch": "stepserve.engine.torch_engine:TorchEngine",
    },
}

GROUPS = {
    "forecast": "stepserve.forecasts",
    "planner": "stepserve.planners",
    "engine": "stepserve.engines",
    "workload": "stepserve.workloads",
    "hardware": "stepserve.hardware",
}
"""Entry points by kind, under their plain names. All other kinds are in one group, each as
``KIND.NAME``: ``POLICIES``."""

POLICIES = "stepserve.policies"


def names(kind: str) -> dict[str, str]:
    """What every known name of a kind stands for: ``package.module:Class``, or ``NOTHING``."""
    group, prefix = GROUPS.get(kind, POLICIES), "" if kind in GROUPS else f"{kind}."
    outside = {
        entry.name.removeprefix(prefix): entry.value
        for entry in metadata.entry_points(group=group)
        if entry.name.startswith(prefix)
    }
    return {**outside, **BUILT_IN.get(kind, {})}


def load(kind: str, name: str, field: str = "") -> type[Any] | None:
    """The class of a name; ``None`` of one that stands for doing without.

    Raises FieldError naming ``field`` (default: ``control.KIND``) for a name without a class.
    """
    field = field or f"control.{kind}"
    path = name if ":" in name else _known(kind, name, field)
    if path == NOTHING:
        return None
    module, _, attribute = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever a module of somebody else does
        if isinstance(error, ModuleNotFoundError) and not module.startswith(error.name or "?"):
            raise  # a package that the part needs, which the command line knows how to get
        raise FieldError(field, f"{path} cannot be loaded: {error}") from error
    if not isinstance(found, type) or not dataclasses.is_dataclass(getattr(found, "Options", None)):
        raise FieldError(field, f"{path} is no {kind}: it needs a dataclass Options")
    return found


def _known(kind: str, name: str, field: str) -> str:
    built_in = BUILT_IN.get(kind, {})
    if name in built_in:  # looking for entry points takes milliseconds
        return built_in[name]
    known = names(kind)
    check_known(name, known, field, ", or package.module:Class")
    return known[name]


def chosen(
    kind: str, choice: Choice, family: Family | None = None, field: str = ""
) -> tuple[type[Any], Any] | None:
    """The class that is chosen and its options; ``None`` where it is none.

    Raises FieldError naming the dotted key at fault, and for a part of the other family (a class
    says with an attribute ``family`` that it is of one alone).
    """
    field = field or f"control.{kind}"
    cls = load(kind, choice.use, field)
    if cls is None:
        if choice.options:
            raise FieldError(
                f"{field}.{next(iter(choice.options))}", f"{choice.use} has no options"
            )
        return None
    of = getattr(cls, "family", None)
    if None not in (of, family) and of != family:
        raise FieldError(field, f"{choice.use} is for {of} models only")
    with inside(field):
        return cls, from_table(cls.Options, choice.options)


def build(
    kind: str, choice: Choice, parts: Any, family: Family | None = None, field: str = ""
) -> Any:
    """The part that is ``chosen``, made of its options and ``parts``."""
    found = chosen(kind, choice, family, field)
    if found is None:
        return None
    cls, options = found
    own = {one.name for one in dataclasses.fields(cls.Options)}
    with inside(field or f"control.{kind}", own):
        return cls(options, parts)


@contextlib.contextmanager
def inside(field: str, own: Collection[str] | None = None) -> Iterator[None]:
    """Errors of a part name its ``own`` keys (any, if they are not given).

    ``use`` stands for the choice of it. Errors that name something else are left as they are.
    """
    try:
        yield
    except FieldError as error:
        others = own is not None and error.field.partition(".")[0] not in {"use", *own}
        if others or error.field.startswith("control."):
            raise
        inside = field if error.field == "use" else f"{field}.{error.field}"
        raise FieldError(inside, error.message) from error

"""The systems that experiments compare, by name.

The published ones are as their artifact runs them (dilaserve.md B1, B6, B7, B9): all residents
in every batch, residency bounded by 8,192 full-length tokens, at most 100 admitted requests on
16 GPUs, first come first served, those whose deadline passed in the queue dropped. The
``stepserve`` ones bound residency by KV pages and batch by deadline.
"""

from dataclasses import replace

from stepserve.core.config import ControlConfig

from .config import System

NEVER = 10**9
"""More tokens than any request settles: the first forecast is the only one."""

_PUBLISHED = System(
    control=ControlConfig(
        placement="step_completion",
        batching="all_resident",
        threshold="deadline_fit",
        load_control="load_caps",
        migration="recompute_step",
        planner="none",
        queue="fcfs_drop",
        queue_limit=10**6,
        resident_tokens=8192,
        margin=0.9,
        predict_every_tokens=8,
    ),
    predictor="boosted",
    learn_steps=False,
    max_residents=256,
    admitted_per_gpu=100 / 16,
)


def _variant(system: System, **control: object) -> System:
    return replace(system, control=replace(system.control, **control))  # type: ignore[arg-type]


_FIXED = replace(
    _variant(
        _PUBLISHED,
        threshold="fixed",
        load_control="none",
        migration="none",
        predict_every_tokens=NEVER,
    ),
    predictor="mean",
)

_STEPSERVE = System()

SYSTEMS = {
    "infaas": _FIXED,
    "llumnix": _variant(_FIXED, migration="recompute_step"),
    "dilaserve": _PUBLISHED,
    "dilaserve-reconfigured": _variant(_PUBLISHED, planner="capacity_ilp"),
    "dilaserve-no-load-control": _variant(_PUBLISHED, load_control="none"),
    "dilaserve-no-slo-aware": _variant(_PUBLISHED, threshold="at_cap"),
    "dilaserve-one-shot": _variant(_PUBLISHED, predict_every_tokens=NEVER),
    "dilaserve-oracle": replace(_PUBLISHED, predictor="oracle"),
    "dilaserve-no-migration": _variant(_PUBLISHED, migration="none"),
    "dilaserve-any-step-migration": _variant(_PUBLISHED, migration="any_step"),
    "stepserve": _STEPSERVE,
    "stepserve-fixed": _variant(_STEPSERVE, threshold="fixed", load_control="none"),
    "stepserve-all-resident": _variant(_STEPSERVE, batching="all_resident"),
}
"""Name -> system. ``dilaserve-no-reconfiguration`` is ``dilaserve``: only the experiments that
ask for the planner have it."""
SYSTEMS["dilaserve-no-reconfiguration"] = _PUBLISHED

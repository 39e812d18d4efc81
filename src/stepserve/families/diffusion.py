"""Diffusion models: tokens are unmasked in any order, at a threshold that is chosen per step."""

from stepserve.core.config import Choice
from stepserve.core.request import Family
from stepserve.families.programs.diffusion import DiffusionProgram
from stepserve.gateway.contract import DIFFUSION_FIELDS

from .family import ModelFamily

DIFFUSION = ModelFamily(
    name=Family.DIFFUSION,
    program=lambda control: DiffusionProgram(),
    defaults={
        "placement": Choice("step_completion"),
        "batching": Choice("latency_budget"),
        "threshold": Choice("deadline_fit"),
        "load_control": Choice("load_caps"),
        "migration": Choice("recompute_step"),
        "refresh": Choice("as_asked"),
        "planner": Choice("none"),
    },
    predict_every_tokens=8,
    without_effect={
        "segment_cost": "requests are not cut into segments",
        "tbt_s": "tokens do not come one by one",
        "chunk_tokens": "there is no chunked prefill",
        "push_pages": "keys and values are not moved",
    },
    request_fields=DIFFUSION_FIELDS,
    forecast=lambda parts: "boosted" if parts.trees else "mean",
)

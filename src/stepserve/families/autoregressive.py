"""Autoregressive models: prompts are prefilled in chunks, then every step decodes a token."""

from stepserve.core.config import Choice
from stepserve.core.request import Family
from stepserve.families.programs.autoregressive import AutoregressiveProgram

from .family import ModelFamily

_EXACT = "their steps have no confidence threshold"

AUTOREGRESSIVE = ModelFamily(
    name=Family.AUTOREGRESSIVE,
    program=lambda control: AutoregressiveProgram(control.chunk_tokens),
    defaults={
        "placement": Choice("tandem_split"),
        "batching": Choice("age_budget"),
        "threshold": Choice("fixed"),
        "load_control": Choice("none"),
        "migration": Choice("none"),
        "refresh": Choice("as_asked"),
        "segment_cost": Choice("occupancy"),
        "planner": Choice("none"),
    },
    predict_every_tokens=64,  # forecasts foretell the length only
    without_effect={
        "threshold": _EXACT,
        "thresholds": _EXACT,
        "infeasible": _EXACT,
        "load_control": _EXACT,
        "caps_every_s": _EXACT,
        "migration": "a request moves where its placement says",
        "refresh": "every step is exact",
    },
    request_fields=frozenset(),
    forecast=lambda parts: "hinted",
)

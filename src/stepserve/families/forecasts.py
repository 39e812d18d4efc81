"""Forecasts of what requests still need, by name."""

from pathlib import Path
from typing import cast

from stepserve.core.config import Choice
from stepserve.core.protocols import StepPredictor
from stepserve.cost.boosted_steps import StepModel
from stepserve.cost.forecast_parts import ForecastParts
from stepserve.cost.remaining_steps import Yields

from .family import ModelFamily
from .registry import build

AUTO = "auto"
"""The family's choice, among what there are parts of."""


def parts_of(folder: Path) -> ForecastParts:
    """What a model's folder has of ``yields.json`` and ``step_predictor.txt``."""
    yields, trees = folder / "yields.json", folder / "step_predictor.txt"
    return ForecastParts(
        Yields.load(yields) if yields.is_file() else None,
        StepModel.load(trees) if trees.is_file() else None,
        folder,
    )


def make_forecast(family: ModelFamily, choice: Choice, parts: ForecastParts) -> StepPredictor:
    """The forecast that is chosen. Raises FieldError naming the key of ``predictor`` at fault."""
    if choice.use in ("", AUTO):
        choice = Choice(family.forecast(parts), choice.options)
    return cast(StepPredictor, build("forecast", choice, parts, family.name, "predictor"))

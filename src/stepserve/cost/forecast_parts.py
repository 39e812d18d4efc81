"""What forecasts of remaining steps are made of."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepserve.core.ids import RequestId

if TYPE_CHECKING:  # both have forecasts beside them, which are made of these parts
    from stepserve.cost.boosted_steps import StepModel
    from stepserve.cost.remaining_steps import Yields


@dataclass(frozen=True, slots=True)
class ForecastParts:
    """All that a forecast (a ``StepPredictor``) may be given beside its options.

    ``yields`` and ``trees``: what was measured of the model and trained on it, as far as it was;
    ``folder``: the model's, for whatever else was. ``truths``: of a simulation's requests, with
    its ``seed``.
    """

    yields: "Yields | None" = None
    trees: "StepModel | None" = None
    folder: Path | None = None
    truths: Mapping[RequestId, Any] | None = None
    seed: int = 0

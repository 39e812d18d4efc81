"""Forecasts by name: which one a family takes by itself, and what is refused."""

import pytest

from stepserve.core.config import Choice
from stepserve.core.errors import FieldError
from stepserve.cost.boosted_steps import BoostedSteps
from stepserve.cost.forecast_parts import ForecastParts
from stepserve.cost.output_length import ClassMean, Hinted
from stepserve.cost.remaining_steps import MeanYield
from stepserve.engine.bundled import __file__ as bundled
from stepserve.families.autoregressive import AUTOREGRESSIVE
from stepserve.families.diffusion import DIFFUSION
from stepserve.families.forecasts import make_forecast, parts_of

AUTO = Choice("auto")


def test_a_family_takes_the_best_that_there_is(tmp_path):
    folder = type(tmp_path)(bundled).parent / "model"
    assert isinstance(make_forecast(DIFFUSION, AUTO, parts_of(folder)), BoostedSteps)
    assert isinstance(make_forecast(DIFFUSION, AUTO, parts_of(tmp_path)), MeanYield)
    assert isinstance(make_forecast(AUTOREGRESSIVE, AUTO, parts_of(folder)), Hinted)


def test_options_reach_a_forecast():
    choice = Choice("class_mean", {"output_tokens": 70.0})
    made = make_forecast(AUTOREGRESSIVE, choice, ForecastParts())
    assert isinstance(made, ClassMean)
    assert made._all.tokens == 70.0


@pytest.mark.parametrize(
    ("family", "choice", "message"),
    [
        (DIFFUSION, Choice("boosted"), "predictor: nothing was trained"),
        (DIFFUSION, Choice("oracle"), "predictor: only a trace knows"),
        (DIFFUSION, Choice("hinted"), "predictor: hinted is for autoregressive models only"),
        (AUTOREGRESSIVE, Choice("boosted"), "predictor: boosted is for diffusion models only"),
        (AUTOREGRESSIVE, Choice("known"), "predictor: only a simulation knows"),
        (AUTOREGRESSIVE, Choice("class_meen"), r"did you mean class_mean\?"),
        (AUTOREGRESSIVE, Choice("hinted", {"output_tokens": 0.5}), "predictor.output_tokens: must"),
    ],
)
def test_what_cannot_forecast_is_named(family, choice, message):
    with pytest.raises(FieldError, match=message):
        make_forecast(family, choice, ForecastParts())

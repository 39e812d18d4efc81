"""Workloads, hardware and forecasts of other packages, by their path."""

from dataclasses import dataclass

import pytest

from stepserve.core.config import NoOptions
from stepserve.core.errors import FieldError
from stepserve.core.step import Mix
from stepserve.cost.batch_profile import BatchProfile
from stepserve.cost.output_length import MaxTokens
from stepserve.cost.roofline import roofline_on_a100
from stepserve.cost.step_table import StepProfile
from stepserve.sim.experiment import read_experiment
from stepserve.sim.requests import draw
from stepserve.sim.run import SIMULATIONS
from stepserve.sim.simulate import simulate
from stepserve.sim.simulation import Point

HERE = __name__


@dataclass(frozen=True, slots=True)
class Options:
    """Of the workload."""

    prompt_tokens: int = 50


class Short:
    """A workload."""

    Options = Options

    def __init__(self, options, parts):
        self.options = options

    def lengths(self, count, seed):
        return [(self.options.prompt_tokens, 10 + n % 3) for n in range(count)]


class Card:
    """Hardware for both families."""

    Options = NoOptions

    def __init__(self, options, parts):
        """Nothing."""

    def profile(self, model, degree):
        if model == "llada-8b":
            return StepProfile((64, 4096), (0.01, 0.1), "a card")
        line = roofline_on_a100("qwen2.5-14b")
        mixes = [Mix(n, n * n // 2) for n in (64, 512)]
        return BatchProfile(line, tuple((m, line.seconds(m)) for m in mixes), "a card")


class Longest(MaxTokens):
    """A forecast for both families."""

    family = None


def experiment(model, **changes):
    workload = {"name": f"{HERE}:Short", "requests": 20, "rates_per_s": [4.0]} | changes
    setting = {"model": model, "hardware": f"{HERE}:Card", "instances": 1, "base_s": 1.0}
    system = {"name": "mine", "predictor": f"{HERE}:Longest"}
    found = read_experiment({"setting": setting, "workload": workload, "system": [system]})
    SIMULATIONS[found.family].check(found)
    return found


@pytest.mark.parametrize("model", ["llada-8b", "own"])
def test_parts_of_others_are_simulated(model):
    one = experiment("qwen2.5-14b" if model == "own" else model)
    assert {r.prompt_tokens for r in draw(one, 4.0, 0)} == {50}
    run = SIMULATIONS[one.family](one, Point("mine", "mine", 4.0, 0))
    assert isinstance(run.predictor, Longest)
    row = simulate(run).row
    assert row["finished_share"] == 1.0
    assert row["workload"] == f"{HERE}:Short"


def test_what_cannot_be_loaded_is_named():
    with pytest.raises(FieldError) as error:
        draw(experiment("llada-8b", name="nowhere:Short"), 4.0, 0)
    assert error.value.field == "workload.name"

"""Steps of the bundled model are logged as they ran, and its predictor fits them."""

import numpy as np

from stepserve.cli.main import main
from stepserve.cost.boosted_steps import BoostedSteps, StepModel
from stepserve.cost.step_log import read_step_logs
from stepserve.engine.bundled.evaluate import BUNDLED_MODEL
from support.parts import make_forecast


def test_a_log_of_the_bundled_model_tells_every_step(tmp_path):
    out = tmp_path / "log.gz"
    sizes = ["--problems", "3", "--thresholds", "0.9", "0.5", "--limits", "16", "32"]
    assert main(["fit", "step-log", *sizes, "--out", str(out)]) == 0
    rows = read_step_logs([out])
    starts = np.flatnonzero(rows.steps == 0)
    ends = np.append(starts[1:], len(rows.steps)) - 1
    assert len(starts) == 6
    assert sorted(rows.threshold[starts]) == [0.5] * 3 + [0.9] * 3
    assert set(rows.limit_tokens) == {16, 32}
    assert not rows.confidence[starts].any()
    later = rows.steps > 0
    assert (rows.confidence[later, 4] > 0).all()
    assert np.isin(rows.finished[ends], ("stop", "length")).all()
    assert not np.delete(rows.finished, ends).astype(bool).any()
    assert np.array_equal(
        rows.unmasked[later], (rows.unmasked + rows.settled)[np.flatnonzero(later) - 1]
    )


def test_the_shipped_predictor_loads_and_knows_its_error():
    model = StepModel.load(BUNDLED_MODEL / "step_predictor.txt")
    assert model.thresholds == (0.5, 0.6, 0.7, 0.8, 0.9)
    assert 0.0 < model.wmape < 0.25
    assert model.output
    make_forecast(BoostedSteps, trees=model)

import re

import pytest

from stepserve.cli.fit import PREDICTOR_FILE
from stepserve.cli.main import main
from stepserve.cost.boosted_steps import StepModel
from support.step_logs import write_log


def test_a_predictor_is_trained_measured_and_saved(tmp_path, capsys):
    logs = [write_log(tmp_path / "a.gz", 1, 20), write_log(tmp_path / "b.gz", 2, 20)]
    words = ["fit", "predictor", "--log", *map(str, logs), "--out"]
    assert main([*words, str(tmp_path / "made")]) == 0
    said = capsys.readouterr().out
    assert "200 requests" in said
    model = StepModel.load(tmp_path / "made" / PREDICTOR_FILE)
    (here,) = re.findall(r"\+ confidence +([\d.]+) +19\.3", said)
    assert float(here) == pytest.approx(model.wmape * 100, abs=0.06)
    assert re.search(r"first only +[\d.]+ +54\.3", said)
    assert "a.gz, b.gz" in model.source
    assert main([*words, str(tmp_path / "one.txt"), "--seed", "5"]) == 0
    assert StepModel.load(tmp_path / "one.txt").steps != model.steps


def test_too_few_requests_are_said_before_training(tmp_path, capsys):
    log = write_log(tmp_path / "a.gz", 1, 3)
    assert main(["fit", "predictor", "--log", str(log), "--out", str(tmp_path / "made")]) == 2
    assert "15 of 15 requests" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()

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


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ("predictor --log nowhere.gz --out made", "log"),
        ("predictor --log nowhere.gz --out file/made", "--out"),
        ("predictor --log nowhere.gz --out made --seed -1", "--seed"),
        ("step-log --out nowhere/log.gz", "--out"),
        ("step-log --out log.gz --problems 0", "--problems"),
        ("step-log --out log.gz --thresholds 0.9 nan", "--thresholds"),
        ("step-log --out log.gz --limits 48 0", "--limits"),
        ("bundled-model --out file", "--out"),
        ("bundled-model --out made --minutes nan", "--minutes"),
        ("bundled-model --out made --processes 0", "--processes"),
    ],
)
def test_what_cannot_be_is_one_line_before_any_work(tmp_path, monkeypatch, capsys, words, field):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert main(["fit", *words.split()]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"stepserve fit: {field}: ")
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]

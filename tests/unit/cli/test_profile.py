"""What ``stepserve profile`` refuses, before a model is loaded or a step is timed."""

import pytest

from stepserve.cli.main import main
from stepserve.live import instance_factory


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--out nowhere/x.json", "--out: no folder nowhere"),
        ("--out .", "--out: . is a folder, not a file"),
        ("--repeats 0", "--repeats: must be at least 1"),
        ("--tp 0", "--tp: must be at least 1"),
        ("--threads -1", "--threads: must be at least 1"),
    ],
)
def test_what_cannot_be_is_one_line_before_any_work(tmp_path, monkeypatch, capsys, words, said):
    def loaded(config):
        raise AssertionError("the model was asked for")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(instance_factory, "make_engine", loaded)
    assert main(["profile", *words.split()]) == 2
    assert capsys.readouterr().err == f"stepserve profile: {said}\n"

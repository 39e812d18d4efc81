"""Files that somebody points at: any of them is read, or named in one line."""

import gzip
import json

import pytest

from stepserve.cli.main import main
from stepserve.core.errors import FieldError
from stepserve.cost.batch_profile import BatchProfile
from stepserve.cost.boosted_steps import StepModel
from stepserve.cost.remaining_steps import Yields
from stepserve.cost.step_table import StepProfile
from stepserve.files import LFS_POINTER, read_json, read_text, read_toml
from stepserve.sim.datasets import requests_of
from stepserve.sim.workload import Arrival, read_trace

TEXT = 'name = "Zoë"\n'


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_mark_at_the_beginning_is_no_part_of_the_text(tmp_path, encoding):
    path = tmp_path / "file.toml"
    path.write_text(TEXT, encoding=encoding)
    assert read_text(path, "config") == TEXT
    assert read_toml(path, "config") == {"name": "Zoë"}
    path.write_text('{"a": 1}', encoding=encoding)
    assert read_json(path, "model") == {"a": 1}


UNREADABLE = {
    "UTF-16": (TEXT.encode("utf-16"), r"is not in UTF-8 \(byte 0\)"),
    "Latin-1": (TEXT.encode("latin-1"), r"is not in UTF-8 \(byte 10\)"),
    "pointer": (LFS_POINTER.encode() + b"v1\n", "is a git-lfs pointer"),
    "missing": (None, "cannot read .*: .*No such file"),
    "deep": (b"[" * 100_000, "is no (JSON|TOML)"),
    "empty": (b"", "is no JSON"),
    "list": (b"[1]", "holds no JSON object"),
}


@pytest.mark.parametrize(("content", "message"), UNREADABLE.values(), ids=UNREADABLE)
@pytest.mark.parametrize("read", [read_json, read_toml])
def test_what_cannot_be_read_is_named(tmp_path, read, content, message):
    if read is read_toml and content in (b"", b"[1]"):
        return  # tables, both
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FieldError, match=message) as caught:
        read(path, "config")
    assert caught.value.field == "config"
    assert str(path) in caught.value.message
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("command", ["serve --config", "simulate --out out", "plan --workload"])
@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_commands_name_a_configuration_of_another_encoding(
    tmp_path, monkeypatch, capsys, command, encoding
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "given.toml").write_text(TEXT, encoding=encoding)
    assert main([*command.split(), "given.toml"]) == 2
    said = capsys.readouterr().err
    assert "given.toml is not in UTF-8" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


STEPS = {"source": "", "sizes": [8, 16], "seconds": [0.1, 0.2]}
LINE = dict.fromkeys(
    ("parameters", "layers", "hidden", "kv_bytes_per_token", "weight_bytes"), 1.0
) | {"flops_per_s": 1.0, "bytes_per_s": 1.0}
BATCHES = {"source": "", "line": LINE, "steps": [[1, 1, 0, 0, 0.1]]}
YIELDS = {"source": "", "tokens_per_step": {"0.9": 2.0}, "output_tokens": 9}


@pytest.mark.parametrize(
    ("kind", "content", "field"),
    [
        (StepProfile, STEPS | {"sizes": [8.5, 16]}, "profile.sizes"),
        (StepProfile, STEPS | {"sizes": ["8", "16"]}, "profile.sizes"),
        (StepProfile, STEPS | {"seconds": [0.1, -1]}, "profile.seconds"),
        (StepProfile, STEPS | {"seconds": [0.1, None]}, "profile"),
        (StepProfile, STEPS | {"host_s": "none"}, "profile"),
        (BatchProfile, BATCHES | {"steps": [[1, 1, 0, 0, float("nan")]]}, "profile.steps"),
        (BatchProfile, BATCHES | {"line": LINE | {"layers": float("nan")}}, "roofline.layers"),
        (BatchProfile, BATCHES | {"line": LINE | {"weight_bytes": "1"}}, "profile"),
        (Yields, {}, "yields"),
        (Yields, YIELDS | {"output_tokens": None}, "yields"),
        (Yields, YIELDS | {"output_tokens": float("nan")}, "yields.output_tokens"),
        (Yields, YIELDS | {"tokens_per_step": {"0.9": float("inf")}}, "yields.tokens_per_step"),
        (Yields, YIELDS | {"tokens_per_step": [1]}, "yields"),
        (StepModel, {"format": "stepserve step model 1", "features": []}, "predictor"),
    ],
)
def test_a_table_that_cannot_be_is_named_with_its_field(tmp_path, kind, content, field):
    path = tmp_path / "table.json"
    path.write_text(json.dumps(content))
    with pytest.raises(FieldError) as caught:
        kind.load(path)
    assert caught.value.field == field
    assert str(path) in caught.value.message


def test_traces_are_read_with_a_mark_and_named_in_another_encoding(tmp_path):
    path = tmp_path / "trace.csv"
    text = "arrival_s,class\n0.5,Zoë\n"
    path.write_text(text, encoding="utf-8-sig")
    assert [a.at_s for a in read_trace(path)] == [0.5]
    for encoding in ("utf-16", "latin-1"):
        path.write_text(text, encoding=encoding)
        with pytest.raises(FieldError, match=r"trace\.csv cannot be read"):
            read_trace(path)


@pytest.mark.parametrize(
    "content",
    [
        b"no gzip",
        gzip.compress(b"input_tokens,output_tokens\n1,x\n"),
        gzip.compress(b"other\n1\n"),
        gzip.compress(b"input_tokens,output_tokens\n1,2\n")[:-9],
        gzip.compress("input_tokens\n1\n".encode("utf-16")),
        gzip.compress(b"input_tokens,output_tokens\n"),
    ],
    ids=["plain", "word", "columns", "cut", "encoding", "empty"],
)
def test_a_data_set_that_is_damaged_is_named(tmp_path, monkeypatch, content):
    monkeypatch.setenv("STEPSERVE_DATA", str(tmp_path))
    path = tmp_path / "lengths/sharegpt8k.csv.gz"
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(FieldError, match=r"sharegpt8k\.csv\.gz") as caught:
        requests_of("sharegpt", [Arrival(0.0)], 0)
    assert caught.value.field == "STEPSERVE_DATA"

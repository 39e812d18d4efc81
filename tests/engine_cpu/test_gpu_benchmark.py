"""A dry run of the GPU benchmark: tiny models on the CPU, and what its files are read as."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from stepserve.cost.batch_profile import BatchProfile
from stepserve.cost.step_table import StepProfile
from stepserve.sim.profiles import profiles

SCRIPT = Path(__file__).parents[2] / "benchmarks/gpu/run.py"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("gpu_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(SCRIPT.parent))
    return module


def test_every_kind_of_step_is_measured_and_the_files_can_be_used(script, tmp_path, capsys):
    assert script.main(["--small", "--device", "cpu", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "as on the CPU" in said
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["skipped"], results["failed"]) == ([], [])
    kinds = {(row["model"], row["kind"], row["graphs"]) for row in results["measurements"]}
    diffusion = {("cached", "on"), ("cached", "off"), ("recompute", "off")}
    causal = {("decode", "on"), ("decode", "off"), ("prefill", "off")}
    assert kinds == {(m, *kind) for m in ("llada-8b", "dream-7b") for kind in diffusion} | {
        ("causal-7b", *kind) for kind in causal
    }
    for row in results["measurements"]:
        assert row["ratio"] == pytest.approx(row["seconds"] / row["roofline_s"])
    for model in ("llada-8b", "dream-7b"):
        table = profiles(str(tmp_path / f"{model}.json"), model, (1,))[1]
        assert table.sizes == (8, 16, 24, 32, 96)
        assert "random weights" in table.source
        assert StepProfile.load(tmp_path / f"{model}_cached_eager.json").sizes == (8, 24)
    batches = BatchProfile.load(tmp_path / "causal-7b.json")
    assert {mix.decodes for mix, _ in batches.steps} == {0, 1, 2, 3}
    assert {mix.prefill_tokens for mix, _ in batches.steps} == {0, 32}


def test_without_time_what_is_left_out_is_named(script, tmp_path):
    assert (
        script.main(["--small", "--device", "cpu", "--budget-s", "0", "--out", str(tmp_path)]) == 0
    )
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["measurements"] == []
    assert all("no time left" in what for what in results["skipped"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.json"]


def test_the_roofline_is_that_of_the_shape(script):
    """Weights as published: 8.0 and 7.6 billion with the embedding."""
    for name, parameters in (("llada-8b", 8.02e9), ("dream-7b", 7.62e9)):
        config = script.SHAPES[name]
        weights = script.layer_weights(config) + 2 * config.hidden_size * config.vocab_size
        assert weights == pytest.approx(parameters, rel=0.01)
    assert script.kv_bytes_per_token(script.SHAPES["llada-8b"], 2) == 524_288


def test_a_machine_without_a_device_is_told(script, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script.main(["--device", "cpu", "--out", str(tmp_path)])
    assert "needs a CUDA device" in capsys.readouterr().err

"""Rows and results as experiments/lib reads them."""

import json
import sys
from pathlib import Path

import matplotlib
import pytest
from matplotlib import pyplot

matplotlib.use("Agg")
EXPERIMENTS = Path(__file__).parents[3] / "experiments"
sys.path.insert(0, str(EXPERIMENTS))

COLUMNS = list(json.loads((EXPERIMENTS / "bundled" / "bundled.json").read_text())["rows"][0])
DIFFUSION = {
    "kind": "run", "family": "diffusion", "model": "llada-8b", "workload": "gsm8k", "gpus": 16,
    "instances": 16, "slo_multiple": 5.0, "seed": 0, "requests": 1319, "accuracy": 0.8,
    "accuracy_kind": "proxy",
}  # fmt: skip
AUTOREGRESSIVE = {
    "kind": "run", "family": "autoregressive", "model": "qwen2.5-14b", "workload": "hybrid",
    "gpus": 2, "instances": 2, "seed": 0, "requests": 500, "rate_per_s": 7.0, "tbt_p99_s": 0.09,
    "tbt_attainment": 0.99, "goodput_tokens_per_s": 100.0, "mfu": [0.4, 0.4],
    "splits": {"solo": 0.5, "below": 0.25, "at": 0.25, "above": 0.0},
}  # fmt: skip


@pytest.fixture
def row():
    """A row of a diffusion experiment: system, requests/s per GPU, and what else is said."""

    def make(system, rate, attainment=None, **more):
        measured = {"rate_per_gpu_per_s": rate, "rate_per_s": 16 * rate, "attainment": attainment}
        return dict.fromkeys(COLUMNS) | DIFFUSION | {"system": system} | measured | more

    return make


@pytest.fixture
def ar_row():
    """A row of an autoregressive experiment: a system, and what else is said."""
    return lambda system, **more: (
        dict.fromkeys(COLUMNS) | AUTOREGRESSIVE | {"system": system} | more
    )


@pytest.fixture
def save(tmp_path):
    """Keeps rows as the results of an experiment, below ``tmp_path`` or another folder."""

    def keep(name, rows, command="stepserve simulate x", root=tmp_path):
        path = root / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        seeds = sorted({row["seed"] for row in rows})
        path.write_text(json.dumps({"command": command, "seeds": seeds, "rows": rows}))

    return keep


@pytest.fixture(autouse=True)
def no_figure_stays():
    """Figures are closed after each test."""
    yield
    pyplot.close("all")

"""What simulated diffusion clusters do is pinned: other work may not change it unnoticed.

The pins are SHA-256 of result rows, floats at 9 significant digits, from the tables that the
package ships: a data folder is hidden. A change that is meant to change results, or adds a column,
moves them. Then look at what changed (``stepserve simulate`` before and after), say it in
the commit, and put the values that the failing test prints in ``PINS``.
"""

import hashlib
import json
from pathlib import Path

import pytest

from stepserve.sim.config import Setting
from stepserve.sim.diffusion import train_predictor
from stepserve.sim.experiment import read_experiments, read_table
from stepserve.sim.run import Runner, run_experiments

SMOKE = Path(__file__).parent / "data" / "smoke.toml"

PINS = {
    "smoke": "d42e5a7e9654406ee0ac113eb08e6a1f0382c8ecebc1a33e2500f0e29a9a73ae",
    "busy": "69a03780a46eb51aad8f302e63c3ed97462cbd68671c066ecd246e2df16fb430",
}

BUSY = """
seeds = [1]
systems = ["stepserve", "stepserve-marginal-caps", "dilaserve-oracle", "drops"]
[setting]
model = "llada-8b"
nodes = [4]
faults = { losses_per_hour = 600.0, late_share = 0.05, step_cv = 0.1 }
delays.rebuild_s = 2.0
[workload]
name = "gsm8k"
requests = 150
rates_per_gpu_per_s = [14.0]
early_stop = true
[[slo]]
share = 0.25
weight = 4.0
relative_deadline = 0.7
[[slo]]
share = 0.75
relative_deadline = 1.1
[[system]]
name = "drops"
base = "infaas"
control.queue = "fcfs_drop"
"""

COLUMNS = (
    "system", "model", "gpus", "rate_per_gpu_per_s", "slo_multiple", "seed", "requests",
    "accuracy", "accuracy_in_time", "accuracy_kind", "attainment", "latency_mean_s",
    "latency_p50_s", "latency_p99_s", "threshold_mean", "rejected", "failed",
    "goodput_requests_per_s", "steps", "refreshes", "migrations", "layout_changes", "losses",
    "batches",
)  # fmt: skip
"""What rows had when they were pinned; beside it what only some of them had."""


def pinned(row):
    """A row as it was when it was pinned: others of today's columns did not exist."""
    rare = ("skipped_share", "accuracy_weighted", "classes")
    kept = {name: row[name] for name in COLUMNS}
    return {**kept, "dataset": row["workload"]} | {n: row[n] for n in rare if row[n] is not None}


def simulated(path):
    (experiment,) = read_experiments(read_table(path))
    boosted = any(system.predictor.use == "boosted" for system in experiment.systems.values())
    early = experiment.workload.early_stop
    model = train_predictor(Setting(), "gsm8k", early) if boosted else None
    outcomes = run_experiments([experiment], [Runner(model)], 1, lambda rows: None)
    return [pinned(outcome.row) for outcome in outcomes]


def rounded(value):
    if isinstance(value, float):
        return f"{value:.9g}"
    if isinstance(value, dict):
        return {str(key): rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value


def digest(rows):
    return hashlib.sha256(json.dumps(rounded(rows), sort_keys=True).encode()).hexdigest()


@pytest.fixture(autouse=True)
def _no_data_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("STEPSERVE_DATA", str(tmp_path))


def test_the_smoke_experiment_is_unmoved():
    assert digest(simulated(SMOKE)) == PINS["smoke"]


def test_a_busy_cluster_with_losses_is_unmoved(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(BUSY)
    rows = simulated(path)
    assert digest(rows[0]) != digest({**rows[1], "system": "stepserve"}), "caps act"
    for name in ("losses", "migrations", "rejected"):
        assert any(row[name] for row in rows), f"the pin covers {name}"
    assert digest(rows) == PINS["busy"]


def test_a_pin_sees_the_ninth_digit_and_not_the_twelfth():
    assert digest([{"a": 1.0 / 3.0}]) == digest([{"a": 1.0 / 3.0 + 1e-12}])
    assert digest([{"a": 1.0 / 3.0}]) != digest([{"a": 1.0 / 3.0 + 1e-9}])

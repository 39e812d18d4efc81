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

from stepserve.sim import traced
from stepserve.sim.config import read
from stepserve.sim.run import points, run_point
from stepserve.sim.systems import SYSTEMS

SMOKE = Path(__file__).parent.parent.parent / "experiments" / "smoke" / "smoke.toml"

PINS = {
    "smoke": "d42e5a7e9654406ee0ac113eb08e6a1f0382c8ecebc1a33e2500f0e29a9a73ae",
    "busy": "69a03780a46eb51aad8f302e63c3ed97462cbd68671c066ecd246e2df16fb430",
}

BUSY = """
dataset = "gsm8k"
nodes = [4]
requests = 150
rates_per_gpu_per_s = [14.0]
class_shares = [0.25, 0.75]
class_weights = [4.0, 1.0]
class_deadlines = [0.7, 1.1]
early_stop = true
seeds = [1]
systems = ["stepserve", "stepserve-marginal-caps", "dilaserve-oracle", "drops"]
[system.drops]
base = "infaas"
control.queue = "fcfs_drop"
[faults]
losses_per_hour = 600.0
late_share = 0.05
step_cv = 0.1
[delays]
rebuild_s = 2.0
"""


def simulated(path):
    experiment = read(path, SYSTEMS)
    boosted = any(system.predictor == "boosted" for system in experiment.systems.values())
    model = traced.train_predictor(experiment.setting) if boosted else None
    return [
        run_point(
            experiment,
            point,
            traced.make_load(experiment.setting, experiment.systems[point.system], point),
            model=model,
        ).row
        for point in points(experiment)
    ]


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

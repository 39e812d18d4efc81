"""``stepserve simulate`` with autoregressive models, from config to files."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from stepserve.cli.main import main
from stepserve.core.request import Family
from stepserve.core.step import Mix
from stepserve.cost.batch_profile import BatchProfile
from stepserve.cost.roofline import roofline_on_a100
from stepserve.sim.autoregressive import AutoregressiveSimulation, first_rate_per_s
from stepserve.sim.experiment import Experiment, put, read_experiment
from stepserve.sim.results import COLUMNS, IDENTITY, Row
from stepserve.sim.simulate import simulate
from stepserve.sim.simulation import Point
from stepserve.sim.verdict import held

CONFIG = """
seeds = [0, 1]
systems = ["colocated", "colocated-budget"]
[setting]
model = "qwen2.5-14b"
instances = 2
faults.step_cv = 0.03
[workload]
name = "azure-code"
duration_s = 20.0
warm_up_s = 2.0
least_requests = 40
rates_of_capacity = [0.5]
rates_per_s = [2.0]
[[slo]]
tbt_s = 0.1
[capacity]
search = "all"
patience_s = 3.0
share = 0.2
step_per_s = 1.0
tuning_duration_s = 20.0
"""

APPLY = (*IDENTITY, "finished_share", "served_share", "attainment", "tbt_attainment", "tbt_p50_s",
    "tbt_p99_s", "tbt_max_s", "goodput_tokens_per_s", "goodput_tokens_with_first_per_s",
    "goodput_requests_per_s", "ttft_p50_s", "ttft_p99_s", "latency_mean_s", "queue_growth", "mfu",
    "busy", "kv_bytes_moved", "splits", "segment_error", "profile_error",
    "stalled_handovers")  # fmt: skip
"""Columns that have a value here, but for ``tuned`` and ``slo_multiple``."""


def run(folder: Path, *options: str, config: str = CONFIG) -> bytes:
    path = folder / "config.toml"
    path.write_text(config)
    assert main(["simulate", str(path), "--out", str(folder / "out"), *options]) == 0
    return (folder / "out" / "results.json").read_bytes()


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return run(tmp_path_factory.mktemp("simulate"), "--jobs", "1")


def rows(result: bytes, kind: str) -> list[dict[str, Any]]:
    return [row for row in json.loads(result)["rows"] if row["kind"] == kind]


def test_the_same_seed_gives_the_same_bytes_in_any_number_of_processes(
    result: bytes, tmp_path: Path
) -> None:
    assert run(tmp_path, "--jobs", "2") == result
    timing = json.loads((tmp_path / "out" / "timing.json").read_text())["rows"]
    assert len(timing) == len(json.loads(result)["rows"])
    assert all(row["place_us_p99"] > 0.0 for row in timing)


def test_rows_have_the_promised_columns_in_the_order_of_the_config(result: bytes) -> None:
    found = json.loads(result)["rows"]
    for row in found:
        assert row.keys() == set(COLUMNS), "and nothing that is measured on the machine"
        missing = {name for name in APPLY if row[name] is None}
        assert missing <= {"tuned", "slo_multiple"}
        assert row["accuracy"] is row["threshold_mean"] is None
    order = [(r["kind"], r["system"], r["seed"]) for r in found]
    names = ("colocated", "colocated-budget")
    capacities = [("capacity", name, seed) for name in names for seed in (0, 1)]
    runs = [("run", name, seed) for name in names for _ in range(2) for seed in (0, 1)]
    assert order == capacities + runs


def test_capacities_are_rates_that_were_held_next_to_one_that_was_not(result: bytes) -> None:
    for row in rows(result, "capacity"):
        assert row["capacity_per_s"] == row["rate_per_s"] > 0.0
        assert row["tbt_attainment"] >= 0.99
        assert row["served_share"] >= 0.99
        probes = dict(map(tuple, row["probes"]))
        assert probes[row["capacity_per_s"]]
        assert not probes[min(rate for rate in probes if rate > row["capacity_per_s"])]


def test_the_tuned_system_says_what_was_chosen_and_runs_it(result: bytes) -> None:
    found = rows(result, "capacity") + rows(result, "run")
    tuned = {row["tuned"] for row in found if row["system"] == "colocated"}
    assert len(tuned) == 1
    assert tuned.pop() in ("colocated-256", "colocated-512", "colocated-1024")
    assert {row["tuned"] for row in found if row["system"] == "colocated-budget"} == {None}


def test_rates_of_capacity_are_shares_of_the_best(result: bytes) -> None:
    means = {}
    for row in rows(result, "capacity"):
        means.setdefault(row["system"], []).append(row["capacity_per_s"])
    best = max(sum(values) / len(values) for values in means.values())
    rates = {row["rate_per_s"] for row in rows(result, "run")}
    assert sorted(rates) == pytest.approx([2.0, best / 2.0], rel=1e-3)


def experiment(**changes: Any) -> Experiment:
    """``CONFIG`` for 30 seconds, changed by dotted keys."""
    table = tomllib.loads(CONFIG)
    for key, value in {"workload.duration_s": 30.0, "workload.warm_up_s": 3.0}.items():
        table = put(table, key, value)
    for key, value in changes.items():
        table = put(table, key.replace("__", "."), value)
    return read_experiment(table)


def row(system: str, rate_per_s: float, *, early: bool = False, **changes: Any) -> Row | None:
    """What comes of one run."""
    one = experiment(
        systems=[system], capacity__search="none", workload__rates_of_capacity=[], **changes
    )
    run = AutoregressiveSimulation(one, Point(system, system, rate_per_s, 0))
    outcome = simulate(run, until_missed=early)
    return None if outcome is None else outcome.row


@pytest.mark.parametrize("system", ["colocated-256", "colocated-512", "colocated-2048"])
@pytest.mark.parametrize("rate_per_s", [2.0, 6.0, 9.0, 14.0])
def test_giving_a_run_up_early_changes_no_verdict(system: str, rate_per_s: float) -> None:
    whole, judged = row(system, rate_per_s), row(system, rate_per_s, early=True)
    assert whole is not None
    assert held(whole, 0.99) is (judged is not None and held(judged, 0.99))
    assert judged is None or judged == whole


def test_a_large_static_chunk_breaks_gaps_and_a_budget_keeps_them() -> None:
    large, budget = (row(name, 5.0) for name in ("colocated-2048", "colocated-budget"))
    assert large is not None
    assert budget is not None
    assert large["tbt_p99_s"] > 0.2
    assert budget["tbt_p99_s"] <= 0.1


def test_requests_that_are_cut_show_it_in_their_row() -> None:
    found = row("dynaserve", 6.0, workload__name="hybrid")
    assert found is not None
    assert sum(found["splits"].values()) == pytest.approx(1.0)
    assert found["splits"]["solo"] < 0.9
    assert found["finished_share"] == 1.0
    assert found["kv_bytes_moved"] > 0
    assert 0.0 < found["exposed_transfer_mean_s"] < 0.1
    assert found["handoff_gap_p99_s"] <= found["tbt_max_s"]
    assert found["segment_error"]["t2"]["median"] is not None
    assert found["profile_error"]["median"] < 0.08


def test_pushing_chunks_hides_most_of_a_slow_transfer() -> None:
    """Prompts alone on their instance, over a link that takes 0.1 s for 500 tokens."""
    name = "disaggregated-1p1d"
    exposed = []
    for pages in (8, 0):
        changes = {f"system__{name}__control__push_pages": pages}
        found = row(name, 1.0, setting__links__bytes_per_s=1e9, **changes)
        assert found is not None
        exposed.append(found["exposed_transfer_mean_s"])
        assert found["splits"]["at"] > 0.9
    assert exposed[0] < exposed[1]


def test_the_first_rate_of_a_search_is_of_the_right_order() -> None:
    for workload, low, high in (("azure-code", 2.0, 8.0), ("mini-reasoning", 0.4, 3.0)):
        assert low < first_rate_per_s(experiment(workload__name=workload), 0) < high


def test_instances_of_other_hardware_run_at_their_own_speed() -> None:
    """``a100-aic`` is the faster profile of the same GPU: a mixed pair is between."""
    latency_s = {}
    for name, groups in {
        "slow": [{"count": 2}],
        "mixed": [{"hardware": "a100"}, {"hardware": "a100-aic"}],
        "fast": [{"count": 2, "hardware": "a100-aic"}],
    }.items():
        found = row("colocated-512", 3.0, setting__instances=groups)
        assert found is not None
        latency_s[name] = found["latency_mean_s"]
    assert latency_s["fast"] < latency_s["mixed"] < latency_s["slow"]


def test_a_model_of_ones_own_runs_on_a_profile_of_ones_own(tmp_path: Path) -> None:
    """A batch profile as ``stepserve profile`` writes it; of its peak nothing is known."""
    path = tmp_path / "card.json"
    line = roofline_on_a100("qwen2.5-14b")
    mixes = [Mix(n, n * n // 2, d, d * 500) for n in (0, 256, 1024) for d in (0, 16) if n or d]
    BatchProfile(line, tuple((mix, line.seconds(mix)) for mix in mixes), "made up").save(path)
    changes = {"setting__model": "mine", "setting__family": Family.AUTOREGRESSIVE.value}
    found = row("dynaserve", 2.0, setting__hardware=str(path), **changes)
    assert found is not None
    assert found["model"] == "mine"
    assert found["finished_share"] == 1.0
    assert found["mfu"] == [None, None]


def test_each_class_has_targets_of_its_own() -> None:
    classes = [{"name": "fast", "tbt_s": 0.05}, {"name": "slow", "tbt_s": 0.5, "share": 3.0}]
    found = row("colocated-2048", 4.0, slo=classes)
    assert found is not None
    of = found["classes"]
    assert of["fast"]["requests"] < of["slow"]["requests"]
    assert of["fast"]["attainment"] < of["slow"]["attainment"]


def test_event_logs_are_kept_and_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = CONFIG.replace('search = "all"', 'search = "none"').replace("[0, 1]", "[0]")
    config = config.replace("rates_of_capacity = [0.5]", "").replace('"colocated", ', "")
    run(tmp_path, "--jobs", "1", "--events", str(tmp_path / "events"), config=config)
    (log,) = (tmp_path / "events").iterdir()
    assert main(["replay", str(log)]) == 0
    assert "every action came out again" in capsys.readouterr().out


def test_timelines_are_kept_too(tmp_path: Path) -> None:
    config = CONFIG.replace('search = "all"', 'search = "none"').replace("[0, 1]", "[0]")
    config = config.replace("rates_of_capacity = [0.5]", "").replace('"colocated", ', "")
    config = config.replace("[setting]", "[setting]\ntimeline_s = 5.0")
    (timeline,) = json.loads(run(tmp_path, "--jobs", "1", config=config))["timelines"]
    assert sum(bucket["arrivals"] for bucket in timeline["buckets"]) >= 40
    assert timeline["buckets"][0]["instances"] == {"1": 2}

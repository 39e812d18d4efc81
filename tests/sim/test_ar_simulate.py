"""``stepserve simulate`` with autoregressive models, from config to files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepserve.cli.main import main
from stepserve.sim.token_cluster import Run, first_rate_per_s, run_world
from stepserve.sim.token_config import TokenSetting
from stepserve.sim.token_results import held
from stepserve.sim.token_systems import TOKEN_SYSTEMS

CONFIG = """
family = "autoregressive"
workloads = ["azure-code"]
duration_s = 20.0
warm_up_s = 2.0
least_requests = 40
tuning_duration_s = 20.0
patience_s = 3.0
capacity_share = 0.2
capacity_step_per_s = 1.0
rates_of_capacity = [0.5]
rates_per_s = [2.0]
seeds = [0, 1]
systems = ["colocated", "colocated-budget"]
"""

FIELDS = {
    "kind", "system", "tuned", "model", "workload", "gpus", "instances", "rate_per_s", "seed",
    "requests", "finished_share", "served_share", "attainment", "tbt_p50_s", "tbt_p99_s",
    "tbt_max_s", "goodput_tokens_per_s", "goodput_tokens_with_first_per_s",
    "goodput_requests_per_s", "ttft_p50_s", "ttft_p99_s", "e2e_mean_s", "queue_growth", "mfu",
    "busy", "kv_bytes_moved", "exposed_transfer_mean_s", "exposed_transfer_p99_s",
    "handoff_gap_p99_s", "splits", "segment_error", "profile_error", "stalled_handovers",
}  # fmt: skip


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


def test_rows_have_the_promised_fields_in_the_order_of_the_config(result: bytes) -> None:
    found = json.loads(result)["rows"]
    assert all(row.keys() >= FIELDS for row in found)
    assert all("place_us_p99" not in row for row in found)  # measured on the machine
    order = [(r["kind"], r["system"], r["seed"]) for r in found]
    names = ("colocated", "colocated-budget")
    capacities = [("capacity", name, seed) for name in names for seed in (0, 1)]
    runs = [("run", name, seed) for name in names for _ in range(2) for seed in (0, 1)]
    assert order == capacities + runs


def test_capacities_are_rates_that_were_held_next_to_one_that_was_not(result: bytes) -> None:
    for row in rows(result, "capacity"):
        assert row["capacity_per_s"] == row["rate_per_s"] > 0.0
        assert row["attainment"] >= 0.99
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


SETTING = TokenSetting(duration_s=30.0, warm_up_s=3.0, least_requests=40, patience_s=3.0)


@pytest.mark.parametrize("system", ["colocated-256", "colocated-512", "colocated-2048"])
@pytest.mark.parametrize("rate_per_s", [2.0, 6.0, 9.0, 14.0])
def test_giving_a_run_up_early_changes_no_verdict(system: str, rate_per_s: float) -> None:
    load = Run("qwen2.5-14b", "azure-code", rate_per_s, 0)
    whole = run_world(SETTING, TOKEN_SYSTEMS[system], load)
    judged = run_world(SETTING, TOKEN_SYSTEMS[system], load, until_hopeless=True)
    assert whole is not None
    assert held(whole[0], SETTING) is (judged is not None and held(judged[0], SETTING))
    if judged is not None:
        batches = [row[0].pop("batches") for row in (whole, judged)]
        assert batches[0] == batches[1]
        assert judged[0] == whole[0]


def test_a_large_static_chunk_breaks_gaps_and_a_budget_keeps_them() -> None:
    load = Run("qwen2.5-14b", "azure-code", 5.0, 0)
    large, budget = (
        run_world(SETTING, TOKEN_SYSTEMS[name], load)
        for name in ("colocated-2048", "colocated-budget")
    )
    assert large is not None
    assert budget is not None
    assert large[0]["tbt_p99_s"] > 0.2
    assert budget[0]["tbt_p99_s"] <= 0.1


def test_requests_that_are_cut_show_it_in_their_row() -> None:
    load = Run("qwen2.5-14b", "hybrid", 6.0, 0)
    outcome = run_world(SETTING, TOKEN_SYSTEMS["dynaserve"], load)
    assert outcome is not None
    row = outcome[0]
    assert sum(row["splits"].values()) == pytest.approx(1.0)
    assert row["splits"]["solo"] < 0.9
    assert row["finished_share"] == 1.0
    assert row["kv_bytes_moved"] > 0
    assert 0.0 < row["exposed_transfer_mean_s"] < 0.1
    assert row["handoff_gap_p99_s"] <= row["tbt_max_s"]
    assert row["segment_error"]["t2"]["median"] is not None
    assert row["profile_error"]["median"] < 0.08


def test_pushing_chunks_hides_most_of_a_slow_transfer() -> None:
    """Prompts alone on their instance, over a link that takes 0.1 s for 500 tokens."""
    load = Run("qwen2.5-14b", "azure-code", 1.0, 0)
    systems = [TOKEN_SYSTEMS["disaggregated-1p1d"], TOKEN_SYSTEMS["disaggregated-1p1d"]]
    systems = [
        replace(s, control=replace(s.control, push_pages=pages))
        for s, pages in zip(systems, (8, 0), strict=True)
    ]
    exposed = []
    for system in systems:
        outcome = run_world(SETTING, replace(system, link_bytes_per_s=1e9), load)
        assert outcome is not None
        exposed.append(outcome[0]["exposed_transfer_mean_s"])
        assert outcome[0]["splits"]["at"] > 0.9
    assert exposed[0] < exposed[1]


def test_the_first_rate_of_a_search_is_of_the_right_order() -> None:
    for workload, low, high in (("azure-code", 2.0, 8.0), ("mini-reasoning", 0.4, 3.0)):
        rate = first_rate_per_s(replace(SETTING, instances=2), "qwen2.5-14b", workload, 0)
        assert low < rate < high

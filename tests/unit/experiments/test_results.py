"""Committed results have one schema; rows are chosen and averaged as they say."""

import json
import math

import pytest
from lib.results import ROOT, Rows, Spread, experiments, read

COMMITTED = sorted(
    f"{path.parent.name}/{path.stem}" for path in ROOT.glob("*/*.json")
    if path.with_suffix(".toml").exists()
)  # fmt: skip


def test_every_experiment_but_smoke_has_results():
    assert set(experiments()) - set(COMMITTED) == {"smoke/smoke"}


def test_all_committed_rows_have_the_same_columns():
    columns = {tuple(sorted(set(row) - {"file"})) for name in COMMITTED for row in read(name).rows}
    assert len(columns) == 1


@pytest.mark.parametrize("name", COMMITTED)
def test_committed_rows_say_who_ran_where_at_what_rate(name):
    results = read(name)
    for row in results.rows:
        assert row["kind"] in ("run", "capacity")
        assert row["family"] in ("diffusion", "autoregressive")
        assert row["seed"] in results.seeds
        assert row["rate_per_s"] == pytest.approx(row["gpus"] * row["rate_per_gpu_per_s"], rel=1e-5)
    recorded = json.loads((ROOT / f"{name}.json").read_text()).get("recorded_with")
    if recorded:  # version 0.3 had no attainment of all targets for autoregressive models
        for row in results.rows:
            assert (row["attainment"] is None) == (row["family"] == "autoregressive")
            assert (row["slo_multiple"] is None) == (row["family"] == "autoregressive")
        assert recorded["config"]


def test_rows_are_chosen_by_values_lists_and_numbers_that_are_nearly_the_same():
    rows = Rows(({"a": "x", "rate": 1.625}, {"a": "y", "rate": 2.0}, {"a": "z", "rate": None}))
    assert rows.where(rate=1.6251).distinct("a") == ["x"]
    assert rows.where(a=["x", "y"]).numbers("rate") == [1.625, 2.0]
    assert len(rows.where(a="x", rate=2.0)) == 0


def test_a_spread_is_of_the_values_there_are(ar_row):
    rows = Rows((ar_row("a", capacity_per_s=2.0), ar_row("a", capacity_per_s=4.0), ar_row("a")))
    spread = rows.spread("capacity_per_s")
    assert (spread.mean, spread.low, spread.high) == (3.0, 2.0, 4.0)
    assert spread.text("{:.1f}") == "3.0 [2.0..4.0]"
    assert Spread((1.0,)).text("{:.0f} %", 100.0) == "100 %"
    assert rows.spread("attainment") is None


def test_ratios_are_of_the_same_seed(ar_row):
    at = {"dynaserve": (4.0, 4.0), "colocated": (2.0, 4.0)}
    rows = Rows(
        tuple(ar_row(s, seed=i, capacity_per_s=v) for s, vs in at.items() for i, v in enumerate(vs))
    )
    assert rows.ratio("dynaserve", "colocated", "capacity_per_s").values == (2.0, 1.0)
    assert rows.ratio("dynaserve", "nobody", "capacity_per_s") is None


def test_a_baseline_that_holds_no_rate_is_beaten_without_end(ar_row):
    rows = Rows((ar_row("a", capacity_per_s=4.0), ar_row("b", capacity_per_s=0.0)))
    assert rows.ratio("a", "b", "capacity_per_s").mean == math.inf

"""A tenant that floods, and one that asks for a fifth of its share: experiments/tenants, short."""

from pathlib import Path

import pytest

from stepserve.core.config import Choice
from stepserve.sim.experiment import read_experiments, read_table
from stepserve.sim.run import Runner, run_experiments

FOLDER = Path(__file__).parents[2] / "experiments" / "tenants"


def rows(name, *changes):
    changes = ["seeds=[3]", 'system.predictor.use="mean"', *changes]
    (experiment,) = read_experiments(read_table(FOLDER / f"{name}.toml", changes=changes))
    assert all(system.predictor == Choice("mean") for system in experiment.systems.values())
    found = run_experiments([experiment], [Runner(None)], 1, lambda rows: None)
    return {outcome.row["system"]: outcome.row for outcome in found}


@pytest.fixture(scope="module")
def flood():
    systems = 'systems=["stepserve-fair", "stepserve-together"]'
    return rows("flood", systems, "workload.requests=620")


def test_with_the_fair_order_a_flood_of_others_costs_no_deadline(flood):
    systems = 'system=[{name="stepserve", base="stepserve", predictor={use="mean"}}]'
    alone = rows("alone", 'systems=["stepserve"]', systems, "workload.requests=20")["stepserve"]
    modest = flood["stepserve-fair"]["classes"]["modest"]
    assert modest["requests"] >= 15
    assert modest["attainment"] >= alone["attainment"]


def test_in_one_queue_it_costs_most_of_them(flood):
    assert flood["stepserve-together"]["classes"]["modest"]["attainment"] < 0.6


def test_the_machines_do_as_much_either_way(flood):
    fair, together = flood["stepserve-fair"], flood["stepserve-together"]
    assert fair["attainment"] == pytest.approx(together["attainment"], abs=0.06)
    assert fair["finished_share"] == together["finished_share"] == 1.0

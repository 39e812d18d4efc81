"""Experiments with autoregressive models, read from tables."""

from pathlib import Path
from typing import Any

import pytest

from stepserve.core.config import Choice
from stepserve.core.errors import FieldError
from stepserve.sim.config import read_table
from stepserve.sim.token_config import TokenExperiment, TokenSetting, from_tables
from stepserve.sim.token_systems import MOST_INSTANCES, TOKEN_SYSTEMS, candidates

TABLE = {
    "family": "autoregressive",
    "workloads": ["azure-code", "hybrid"],
    "systems": ["colocated", "disaggregated", "wide"],
    "system": {"wide": {"base": "dynaserve", "control": {"placement": {"probes": 10}}}},
}


def read(**changes: Any) -> TokenExperiment:
    return from_tables({**TABLE, **changes}, TOKEN_SYSTEMS, candidates)


def test_a_system_may_change_one_number_of_another() -> None:
    experiment = read()
    wide, base = experiment.systems["wide"], TOKEN_SYSTEMS["dynaserve"]
    options = {**base.control.placement.options, "probes": 10}
    assert wide.control.placement == Choice("tandem_split", options)
    assert wide.control.batching == base.control.batching


def test_some_names_stand_for_the_best_of_several() -> None:
    experiment = read(instances=3)
    chunks = ("colocated-256", "colocated-512", "colocated-1024", "colocated-2048")
    assert experiment.compared == {
        "colocated": chunks,
        "disaggregated": ("disaggregated-1p2d", "disaggregated-2p1d"),
        "wide": ("wide",),
    }
    assert set(experiment.systems) == {*chunks, "disaggregated-1p2d", "disaggregated-2p1d", "wide"}


@pytest.mark.parametrize("instances", range(2, MOST_INSTANCES + 1))
def test_every_ratio_has_a_system(instances: int) -> None:
    for name in candidates("disaggregated", instances):
        prefill, decode = name.removeprefix("disaggregated-").rstrip("d").split("p")
        assert int(prefill) + int(decode) == instances
        assert TOKEN_SYSTEMS[name].control.placement.options["prefill_instances"] == int(prefill)


def test_the_published_mode_and_ours_differ_where_the_documents_say() -> None:
    paper, ours = (TOKEN_SYSTEMS[name].control for name in ("dynaserve", "stepserve"))
    assert paper.placement == Choice("tandem_split", {"gain": 0.05, "ignore_ttft": True})
    assert paper.batching == Choice("tbt_budget", {"ignore_ttft": True})
    assert ours.placement == Choice("tandem_split")
    assert ours.batching == Choice("age_budget", {"order": "deadline"})


def test_a_run_lasts_its_time_and_has_its_requests() -> None:
    setting = TokenSetting(duration_s=600.0, least_requests=1000)
    assert setting.requests_at(5.0) == 3000
    assert setting.requests_at(0.5) == 1000


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"family": "diffusion"}, "family"),
        ({"rate": 1.0}, "rate"),
        ({"systems": ["nobody"]}, "systems"),
        ({"models": []}, "models"),
        ({"capacity": "nobody"}, "capacity"),
        ({"capacity": "none", "rates_of_capacity": [0.5]}, "rates_of_capacity"),
        ({"rates_per_s": [0.0]}, "rates_per_s"),
        (
            {"systems": ["disaggregated-2p1d"]},
            "system.disaggregated-2p1d.control.placement.prefill_instances",
        ),
        ({"system": {"wide": {"base": "dynaserve", "sigma": 1.0}}}, "system.wide.sigma"),
    ],
)
def test_what_makes_no_sense_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError) as error:
        read(**changes)
    assert error.value.field == field


def test_the_resolved_configuration_can_be_read_again() -> None:
    experiment = read(rates_per_s=[1.0, 2.0], ttft_s=1.5)
    table = experiment.as_table()
    again = from_tables(table, {}, candidates)
    assert again == experiment


@pytest.mark.parametrize("quick", [False, True])
def test_a_quick_table_is_laid_over_or_left_out(tmp_path: Path, quick: bool) -> None:
    path = tmp_path / "config.toml"
    path.write_text("duration_s = 600.0\nseeds = [0, 1]\n[quick]\nseeds = [0]\n")
    assert read_table(path, quick=quick) == {"duration_s": 600.0, "seeds": [0] if quick else [0, 1]}


EXPERIMENTS = Path(__file__).parents[3] / "experiments"


@pytest.mark.parametrize("quick", [False, True])
def test_the_committed_experiments_can_be_read(quick: bool) -> None:
    tables = [read_table(path, quick=quick) for path in EXPERIMENTS.glob("*/*.toml")]
    causal = [table for table in tables if table.get("family") == "autoregressive"]
    assert causal
    for table in causal:
        from_tables(table, TOKEN_SYSTEMS, candidates)

"""Experiments are read strictly: an unknown key is an error that names it."""

import pytest

from stepserve.core.errors import FieldError
from stepserve.sim.config import Setting, as_table, from_tables, read
from stepserve.sim.systems import SYSTEMS


def tables(**changes):
    return from_tables({"systems": ["infaas"], **changes}, SYSTEMS)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"dataste": "gsm8k"}, "dataste"),
        ({"requests": 0}, "requests"),
        ({"requests": "many"}, "requests"),
        ({"nodes": []}, "nodes"),
        ({"seeds": [1.5]}, "seeds"),
        ({"tp_degree": 3}, "tp_degree"),
        ({"cache_mode": "full"}, "cache_mode"),
        ({"faults": {"losses": 1.0}}, "faults.losses"),
        ({"faults": {"late_share": 2.0}}, "faults.late_share"),
        ({"delays": {"stop_s": -1.0}}, "delays.stop_s"),
        ({"systems": []}, "systems"),
        ({"systems": ["nobody"]}, "systems"),
        ({"system": {"mine": {"base": "nobody"}}}, "system.mine.base"),
        ({"system": {"infaas": {"control": {"treshold": "fixed"}}}}, "system.infaas.control.tr"),
        ({"system": {"infaas": {"predictor": "guess"}}}, "predictor"),
        ({"system": {"infaas": {"request": {"on_miss": "weep"}}}}, "request.on_miss"),
    ],
)
def test_what_is_wrong_is_named(changes, field):
    with pytest.raises(FieldError) as error:
        tables(**changes)
    assert error.value.field.startswith(field)


def test_a_system_is_made_from_another_by_what_it_changes():
    changes = {"base": "dilaserve", "control": {"margin": 0.5, "thresholds": [0.9, 0.6]}}
    experiment = from_tables({"systems": ["mine"], "system": {"mine": changes}}, SYSTEMS)
    mine, base = experiment.systems["mine"], SYSTEMS["dilaserve"]
    assert mine.control.margin == 0.5
    assert mine.control.thresholds == (0.9, 0.6)
    assert mine.control.batching == base.control.batching
    assert mine.predictor == base.predictor


def test_a_known_system_can_be_changed_under_its_name():
    experiment = tables(system={"infaas": {"max_running_requests": 3}})
    assert experiment.systems["infaas"].max_running_requests == 3
    assert SYSTEMS["infaas"].max_running_requests != 3


def test_quick_lays_its_table_over_the_rest(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(
        'systems = ["infaas"]\nrequests = 500\n[faults]\nlate_s = 2.0\nlate_share = 0.5\n'
        "[quick]\nrequests = 5\nfaults.late_s = 1.0\n"
    )
    slow, quick = read(path, SYSTEMS).setting, read(path, SYSTEMS, quick=True).setting
    assert (slow.requests, quick.requests) == (500, 5)
    assert (quick.faults.late_s, quick.faults.late_share) == (1.0, 0.5)


def test_a_resolved_config_reads_back_as_itself():
    experiment = tables(nodes=[4, 2], seeds=[3, 4])
    assert from_tables(experiment.as_table(), {}) == experiment
    assert from_tables({"systems": ["infaas"], **as_table(Setting())}, SYSTEMS).setting == Setting()


@pytest.mark.parametrize(("gpus", "limit"), [(4, 50), (16, 100), (64, 400)])
def test_published_systems_admit_by_the_size_of_the_cluster(gpus, limit):
    assert SYSTEMS["dilaserve"].control_for(gpus).admitted_limit == limit
    assert SYSTEMS["stepserve"].control_for(gpus).admitted_limit == 0


def test_the_ablations_differ_from_the_whole_in_one_thing():
    whole = as_table(SYSTEMS["dilaserve"])
    others = ("dilaserve-five-thresholds", "dilaserve-reconfigured")
    for name in SYSTEMS:
        if name.startswith("dilaserve-") and name not in others:
            other = as_table(SYSTEMS[name])
            control = {k for k in whole["control"] if whole["control"][k] != other["control"][k]}
            rest = {k for k in whole if k != "control" and whole[k] != other[k]}
            assert len(control | rest) == 1, name

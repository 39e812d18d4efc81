"""Experiments are read strictly: an unknown key is an error that names it."""

import tomllib
from pathlib import Path

import pytest

from stepserve.core.config import Choice
from stepserve.core.errors import FieldError
from stepserve.core.request import Family
from stepserve.sim.experiment import put, read_experiment, read_experiments, read_table
from stepserve.sim.run import SIMULATIONS
from stepserve.sim.systems import SYSTEMS, candidates
from stepserve.tables import as_table

DIFFUSION = """
systems = ["infaas"]
[setting]
model = "llada-8b"
nodes = [4, 4]
[workload]
name = "gsm8k"
requests = 20
rates_per_gpu_per_s = [1.0]
"""
AUTOREGRESSIVE = """
systems = ["colocated", "disaggregated", "wide"]
[setting]
model = "qwen2.5-14b"
instances = 2
[workload]
name = "hybrid"
duration_s = 60.0
rates_per_s = [2.0]
[[slo]]
tbt_s = 0.1
[[system]]
name = "wide"
base = "dynaserve"
control.placement.probes = 10
"""
TEXTS = {"diffusion": DIFFUSION, "autoregressive": AUTOREGRESSIVE}
EXPERIMENTS = Path(__file__).parents[3] / "experiments"


def table(family="diffusion", **changes):
    result = tomllib.loads(TEXTS[family])
    for key, value in changes.items():
        result = put(result, key.replace("__", "."), value)
    return result


def read(family="diffusion", **changes):
    experiment = read_experiment(table(family, **changes))
    SIMULATIONS[experiment.family].check(experiment)
    return experiment


WRONG = [
    ({"setting__modle": "llada-8b"}, "setting.modle"),
    ({"seed": [1]}, "seed"),
    ({"seeds": [1.5]}, "seeds"),
    ({"seeds": [-1]}, "seeds"),
    ({"setting__model": "llada-9b"}, "setting.family"),
    ({"setting__family": "autoregressive"}, "setting.family"),
    ({"setting__nodes": []}, "setting.instances"),
    ({"setting__nodes": [0]}, "setting.nodes"),
    ({"setting__degree": 3}, "setting.degree"),
    ({"setting__instances": 9}, "setting.instances"),
    ({"setting__instances": [{"count": 1, "gpus": 2}]}, "setting.instances.gpus"),
    ({"setting__cache_mode": "full"}, "setting.cache_mode"),
    ({"setting__hardware": "nowhere.json"}, "setting.hardware"),
    ({"setting__hardware": "A100"}, "setting.hardware"),
    ({"setting__slo_multiple": float("nan")}, "setting.slo_multiple"),
    ({"setting__slo_multiple": float("inf")}, "setting.slo_multiple"),
    ({"setting__faults__losses": 1.0}, "setting.faults.losses"),
    ({"setting__faults__late_share": 2.0}, "setting.faults.late_share"),
    ({"setting__delays__stop_s": -1.0}, "setting.delays.stop_s"),
    ({"setting__links__bytes_per_s": 0.0}, "setting.links.bytes_per_s"),
    ({"workload__name": "gsm9k"}, "workload.name"),
    ({"workload__file": "trace.csv"}, "workload.name"),
    ({"workload__requests": "many"}, "workload.requests"),
    ({"workload__requests": 0}, "workload.requests"),
    ({"workload__arrivals": "sometimes"}, "workload.arrivals"),
    ({"workload__arrivals": "recorded"}, "workload.arrivals"),
    ({"workload__cv": -1.0}, "workload.cv"),
    ({"workload__rates_per_gpu_per_s": [float("nan")]}, "workload.rates_per_gpu_per_s"),
    ({"workload__rates_per_gpu_per_s": [float("inf")]}, "workload.rates_per_gpu_per_s"),
    ({"workload__rates_per_gpu_per_s": [-1.0]}, "workload.rates_per_gpu_per_s"),
    ({"workload__rates_per_gpu_per_s": []}, "workload.rates_per_s"),
    ({"workload__rates_of_capacity": [0.5]}, "workload.rates_of_capacity"),
    ({"slo__share": 0.0}, "slo.share"),
    ({"slo__e2e": 1.0}, "slo.e2e"),
    ({"slo": [{"name": "a"}, {"name": "a"}]}, "slo.name"),
    ({"capacity__search": "nobody"}, "capacity.search"),
    ({"capacity__hold": 1.0}, "capacity.hold"),
    ({"systems": []}, "systems"),
    ({"systems": ["nobody"]}, "systems"),
    ({"systems": [5]}, "systems"),
    ({"systems": "infaas"}, "systems"),
    ({"system": 5}, "system"),
    ({"system": ["a"]}, "system.name"),
    ({"system": [{"name": 5}]}, "system.name"),
    ({"system": [{"name": "mine", "base": ["infaas"]}]}, "system.mine.base"),
    ({"system": [{"name": "mine", "best_of": 5}]}, "system.mine.best_of"),
    ({"setting": 5}, "setting"),
    ({"workload": 5}, "workload"),
    ({"capacity": 5}, "capacity"),
    ({"sweep": 3}, "sweep"),
    ({"system__mine__base": "nobody"}, "system.mine.base"),
    ({"system__infaas__control__treshold": "fixed"}, "system.infaas.control.tr"),
    ({"system__infaas__predictor": "guess"}, "system.infaas.predictor"),
    ({"system__infaas__predictor": {"sigma_tokens": 5.0}}, "system.infaas.predictor.sigma_tokens"),
    ({"system__infaas__request__on_miss": "weep"}, "request.on_miss"),
    ({"setting__nodes": [], "setting__instances": 2, "system__infaas__control__planner": "greedy"},
     "system.infaas.control.planner"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "field"), WRONG)
def test_what_is_wrong_is_named(changes, field):
    with pytest.raises(FieldError) as error:
        read(**changes)
    assert error.value.field.startswith(field)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"setting__hardware": "h100"}, "setting.hardware"),
        ({"setting__degree": 2}, "setting.instances.degree"),
        ({"capacity__search": "none", "workload__rates_of_capacity": [0.5]}, "workload.rates_of"),
        ({"systems": ["disaggregated-2p1d"]}, "system.disaggregated-2p1d.control"),
        ({"system__wide__sigma": 1.0}, "system.wide.sigma"),
        ({"system__wide__learn_steps": False}, "system.wide.learn_steps"),
        ({"system__wide__request__floor": 0.7}, "system.wide.request"),
        ({"system__wide__control__planner": "greedy"}, "system.wide.control.planner"),
        ({"system__wide__control__threshold": "at_cap"}, "system.wide.control.threshold"),
    ],
)
def test_what_makes_no_sense_of_autoregressive_models_is_named(changes, field):
    with pytest.raises(FieldError) as error:
        read("autoregressive", **changes)
    assert error.value.field.startswith(field)


def test_an_unknown_key_is_told_the_nearest_known_one():
    with pytest.raises(FieldError, match="did you mean workload"):
        read(worklaod={"name": "gsm8k"})
    with pytest.raises(FieldError, match="did you mean infaas"):
        read(systems=["infas"])


def test_a_system_is_made_from_another_by_what_it_changes():
    changes = {"name": "mine", "base": "dilaserve", "control": {"margin": 0.5}}
    experiment = read(systems=["mine"], system=[changes])
    mine, base = experiment.systems["mine"], SYSTEMS[Family.DIFFUSION]["dilaserve"]
    assert mine.control.margin == 0.5
    assert mine.control.batching == base.control.batching
    assert mine.predictor == base.predictor
    wide = read("autoregressive").systems["wide"]
    base = SYSTEMS[Family.AUTOREGRESSIVE]["dynaserve"].control
    options = {**base.placement.options, "probes": 10}
    assert wide.control.placement == Choice("tandem_split", options)
    assert wide.control.batching == base.batching


def test_a_known_system_can_be_changed_under_its_name():
    experiment = read(system__infaas__max_running_requests=3)
    assert experiment.systems["infaas"].max_running_requests == 3
    assert SYSTEMS[Family.DIFFUSION]["infaas"].max_running_requests != 3


def test_some_names_stand_for_the_best_of_several():
    experiment = read("autoregressive", setting__instances=3)
    chunks = tuple(f"colocated-{n}" for n in (256, 512, 1024, 2048))
    assert experiment.compared == {
        "colocated": chunks,
        "disaggregated": ("disaggregated-1p2d", "disaggregated-2p1d"),
        "wide": ("wide",),
    }
    own = read(systems=["best"], system=[{"name": "best", "best_of": ["infaas", "llumnix"]}])
    assert own.compared == {"best": ("infaas", "llumnix")}
    assert set(own.systems) == {"infaas", "llumnix"}


@pytest.mark.parametrize("instances", range(2, 9))
def test_every_ratio_has_a_system(instances):
    for name in candidates(Family.AUTOREGRESSIVE, "disaggregated", instances):
        prefill, decode = name.removeprefix("disaggregated-").rstrip("d").split("p")
        assert int(prefill) + int(decode) == instances
        control = SYSTEMS[Family.AUTOREGRESSIVE][name].control
        assert control.placement.options["prefill_instances"] == int(prefill)


def test_instances_may_differ_and_have_their_gpus_on_nodes():
    groups = [{"count": 2, "degree": 2, "hardware": "GH200-graphs"}, {"count": 3}]
    hosts = read(setting__instances=groups).hosts
    assert [(h.hardware, h.degree) for h in hosts] == [("GH200-graphs", 2)] * 2 + [("", 1)] * 3
    assert [(h.slot.node, h.slot.gpus) for h in hosts] == [
        (0, (0, 1)), (0, (2, 3)), (1, (0,)), (1, (1,)), (1, (2,)),
    ]  # fmt: skip
    filled = read(setting__degree=2).hosts
    assert [(h.id, h.degree) for h in filled][:1] == [(filled[0].id, 2)]
    assert len(filled) == 4
    (first, second) = read("autoregressive").hosts
    assert (first.id, second.id, first.slot) == ("i0", "i1", None)
    big = read("autoregressive", setting__model="qwen2.5-72b")
    assert (big.hosts[0].degree, big.gpus) == (4, 8)


def test_any_key_can_be_swept_and_rows_will_say_so():
    sweep = {"setting.slo_multiple": [2.0, 4.0], "system.infaas.max_running_requests": [3, 5]}
    found = read_experiments(table(sweep=sweep))
    assert [list(one.swept.values()) for one in found] == [[2.0, 3], [2.0, 5], [4.0, 3], [4.0, 5]]
    assert found[2].setting.slo_multiple == 4.0
    assert found[1].systems["infaas"].max_running_requests == 5
    nested = read_experiments(table(sweep={"workload": {"name": ["gsm8k", "mbpp"]}}))
    assert [one.workload.name for one in nested] == ["gsm8k", "mbpp"]
    for wrong in (3.0, []):
        with pytest.raises(FieldError, match=r"sweep\.setting\.base_s"):
            read_experiments(table(sweep={"setting.base_s": wrong}))


def test_keys_of_arrays_of_tables_mean_one_or_all():
    slo = {"slo": [{"name": "a", "tbt_s": 0.1}, {"name": "b"}]}
    assert [one.get("tbt_s") for one in put(slo, "slo.tbt_s", 0.2)["slo"]] == [0.2, 0.2]
    assert [one.get("tbt_s") for one in put(slo, "slo.b.tbt_s", 0.2)["slo"]] == [0.1, 0.2]
    assert [one.get("tbt_s") for one in put(slo, "slo.0.tbt_s", 0.2)["slo"]] == [0.2, None]
    assert put({}, "slo.tbt_s", 0.2) == {"slo": [{"tbt_s": 0.2}]}
    instances = put({"setting": {"instances": 3}}, "setting.instances.hardware", "a100-aic")
    assert instances == {"setting": {"instances": [{"count": 3, "hardware": "a100-aic"}]}}
    with pytest.raises(FieldError, match=r"slo\.7"):
        put(slo, "slo.7.tbt_s", 0.2)


def test_quick_and_changes_are_laid_over_the_file(tmp_path):
    path = tmp_path / "config.toml"
    quick = "[quick]\nworkload.requests = 5\nsetting.faults.late_s = 1.0\nsystems = ['llumnix']\n"
    path.write_text(DIFFUSION + "[setting.faults]\nlate_s = 2.0\nlate_share = 0.5\n" + quick)
    plain, short = (read_experiment(read_table(path, quick=q)) for q in (False, True))
    assert (plain.workload.requests, short.workload.requests) == (20, 5)
    faults = short.setting.faults
    assert (faults.late_s, faults.late_share) == (1.0, 0.5)
    assert list(short.compared) == ["llumnix"]
    changes = ["workload.requests=7", "system.infaas.control.threshold=at_cap", "seeds=[3]"]
    changed = read_experiment(read_table(path, changes=changes))
    assert changed.workload.requests == 7
    assert changed.systems["infaas"].control.threshold == Choice("at_cap")
    assert changed.seeds == (3,)


@pytest.mark.parametrize("content", [b"\xff\xfes\x00", b"seeds = ", b"seeds = [0]\n"])
def test_a_file_that_is_no_experiment_is_told_in_one_line(tmp_path, content):
    path = tmp_path / "config.toml"
    path.write_bytes(content)
    with pytest.raises(FieldError):
        read_table(path)
    with pytest.raises(FieldError):
        read_table(tmp_path / "nowhere.toml")


@pytest.mark.parametrize("family", list(TEXTS))
def test_a_resolved_config_reads_back_as_itself(family):
    experiment = read(family, seeds=[3, 4], slo=[{"name": "a", "ttft_s": 1.5, "e2e_s": 9.0}])
    assert read_experiment(experiment.as_table()) == experiment


def test_a_run_lasts_its_time_and_has_its_requests():
    workload = read("autoregressive", workload__least_requests=300).workload
    assert workload.requests_at(50.0) == 3000
    assert workload.requests_at(0.5) == 300


@pytest.mark.parametrize(("gpus", "limit"), [(4, 50), (16, 100), (64, 400)])
def test_published_systems_admit_by_the_size_of_the_cluster(gpus, limit):
    systems = SYSTEMS[Family.DIFFUSION]
    assert systems["dilaserve"].control_for(gpus).admitted_limit == limit
    assert systems["stepserve"].control_for(gpus).admitted_limit == 0


def test_the_ablations_differ_from_the_whole_in_one_thing():
    systems = SYSTEMS[Family.DIFFUSION]
    whole = as_table(systems["dilaserve"])
    others = ("dilaserve-five-thresholds", "dilaserve-reconfigured", "dilaserve-two-settings")
    for name in systems:
        if name.startswith("dilaserve-") and name not in others:
            other = as_table(systems[name])
            keys = whole["control"].keys() | other["control"].keys()
            control = {k for k in keys if whole["control"].get(k) != other["control"].get(k)}
            rest = {k for k in whole if k != "control" and whole[k] != other[k]}
            assert len(control | rest) == 1, name


def test_the_published_mode_and_ours_differ_where_the_documents_say():
    systems = SYSTEMS[Family.AUTOREGRESSIVE]
    paper, ours = (systems[name].control for name in ("dynaserve", "stepserve"))
    assert paper.placement == Choice("tandem_split", {"gain": 0.05, "ignore_ttft": True})
    assert paper.batching == Choice("tbt_budget", {"ignore_ttft": True})
    assert ours.placement == Choice("tandem_split")
    assert ours.batching == Choice("age_budget", {"order": "deadline"})


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize(
    "path", sorted(EXPERIMENTS.glob("*/config.toml")), ids=lambda p: p.parent.name
)
def test_the_committed_experiments_can_be_run(path, quick):
    table = read_table(path, quick=quick)
    experiments = read_experiments(table)
    for experiment in experiments:
        SIMULATIONS[experiment.family].check(experiment)
    sweep = {"sweep": table["sweep"]} if "sweep" in table else {}
    assert read_experiments({**experiments[0].as_table(), **sweep}) == experiments

"""``stepserve simulate`` from config to files: same seed, same bytes, and the books balance."""

import json
import tomllib

import numpy as np
import pytest

from stepserve.cli.main import main
from stepserve.core.ids import InstanceId
from stepserve.core.payload import Payload, SettledToken
from stepserve.core.protocols import BatchResult
from stepserve.core.request import Progress
from stepserve.core.step import Batch, Step, StepKind, StepOutcome
from stepserve.cost.step_table import StepProfile
from stepserve.sim.diffusion import DiffusionSimulation
from stepserve.sim.executors import EngineExecutors, TraceExecutors
from stepserve.sim.experiment import put, read_experiment
from stepserve.sim.outcomes import TraceOutcomes
from stepserve.sim.results import COLUMNS, IDENTITY, rounded
from stepserve.sim.simulate import simulate
from stepserve.sim.simulation import Point
from support.toy_world import make_request

CONFIG = """
seeds = [0, 1]
systems = ["infaas", "oracle"]
[setting]
model = "llada-8b"
nodes = [4]
timeline_s = 5.0
faults = { losses_per_hour = 200.0, step_cv = 0.1 }
delays.rebuild_s = 2.0
[workload]
name = "gsm8k"
requests = 30
rates_per_gpu_per_s = [1.0, 2.5]
[[system]]
name = "oracle"
base = "dilaserve-oracle"
"""

APPLY = (*IDENTITY, "attainment", "accuracy", "accuracy_kind", "latency_mean_s", "latency_p50_s",
    "latency_p99_s", "threshold_mean", "migrations", "layout_changes", "finished_share", "busy",
    "queue_growth")  # fmt: skip
"""Columns that have a value here."""


def run(folder, *options, config=CONFIG):
    path = folder / "config.toml"
    path.write_text(config)
    assert main(["simulate", str(path), "--out", str(folder / "out"), *options]) == 0
    return (folder / "out" / "results.json").read_bytes()


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return run(tmp_path_factory.mktemp("simulate"), "--jobs", "1")


def test_the_same_seed_gives_the_same_bytes_in_any_number_of_processes(result, tmp_path):
    assert run(tmp_path, "--jobs", "2") == result


def test_another_seed_gives_other_numbers(result, tmp_path):
    other = json.loads(run(tmp_path, "--seed", "7", "--jobs", "1"))
    assert other["seeds"] == [7]
    assert other["rows"][0]["latency_mean_s"] != json.loads(result)["rows"][0]["latency_mean_s"]


def test_rows_come_in_the_order_of_the_config_with_the_promised_fields(result):
    content = json.loads(result)
    rows = content["rows"]
    order = [(r["system"], r["rate_per_gpu_per_s"], r["seed"]) for r in rows]
    systems = ("infaas", "oracle")
    assert order == [(s, r, seed) for s in systems for r in (1.0, 2.5) for seed in (0, 1)]
    for row in rows:
        assert row.keys() == set(COLUMNS)
        assert not [name for name in APPLY if row[name] is None and name != "tuned"]
        assert row["tbt_attainment"] is row["splits"] is None
        assert 0.0 <= row["attainment"] <= 1.0
        assert 0.0 < row["latency_p50_s"] <= row["latency_p99_s"]
        assert 0.5 <= row["threshold_mean"] <= 0.9
    assert "tmp" not in content["command"]


def test_timelines_account_for_every_request(result):
    content = json.loads(result)
    for row, timeline in zip(content["rows"], content["timelines"], strict=True):
        buckets = timeline["buckets"]
        assert sum(b["arrivals"] for b in buckets) == row["requests"]
        met = sum(b["arrivals"] * b["attainment"] for b in buckets if b["arrivals"])
        assert met / row["requests"] == pytest.approx(row["attainment"], abs=1e-4)


def test_measured_times_are_kept_apart(result, tmp_path):
    assert b"us_per_event" not in result
    run(tmp_path, "--jobs", "1", "--seed", "0")
    rows = json.loads((tmp_path / "out" / "timing.json").read_text())["rows"]
    assert all(row["scheduler_us_per_event"] > 0.0 for row in rows)


def test_event_logs_replay_and_step_logs_are_whole(tmp_path, capsys):
    config = CONFIG.replace("[1.0, 2.5]", "[2.0]").replace("step_cv = 0.1", "step_cv = 0.0")
    logs = ("--events", str(tmp_path / "events"), "--log-steps", str(tmp_path / "steps"))
    rows = json.loads(run(tmp_path, "--jobs", "1", "--seed", "0", *logs, config=config))["rows"]
    assert sum(row["losses"] for row in rows) > 0, "incarnations must be told apart"
    files = sorted((tmp_path / "events").iterdir())
    assert len(files) == len(list((tmp_path / "steps").iterdir())) == 2
    for file in files:
        assert main(["replay", str(file)]) == 0
    assert capsys.readouterr().out.count("every action came out again") == 2


def test_an_event_log_that_could_not_be_replayed_is_refused(tmp_path, capsys):
    (tmp_path / "config.toml").write_text(CONFIG)
    paths = ("--out", str(tmp_path), "--events", str(tmp_path))
    assert main(["simulate", str(tmp_path / "config.toml"), "--jobs", "1", *paths]) == 2
    assert "--events" in capsys.readouterr().err


def simulation(system="infaas", rate_per_s=4.0, **changes):
    """One run of the model and requests of ``CONFIG``, without faults."""
    table = tomllib.loads(CONFIG) | {"systems": [system]}
    table = put(table, "setting.faults", {})
    table = put(table, "setting.timeline_s", 0.0)
    for key, value in changes.items():
        table = put(table, key.replace("__", "."), value)
    return DiffusionSimulation(read_experiment(table), Point(system, system, rate_per_s, 0))


def ran(*args, **changes):
    world = simulation(*args, **changes).world()
    world.run()
    return world


def test_an_unloaded_request_takes_the_published_base_latency():
    """Calibration (DiLaServe D5): 1.9 s at TP1 and 0.9, give or take the request's own steps."""
    world = ran(rate_per_s=0.1, setting__nodes=[1], workload__requests=60)
    seconds = [r.latency_s for r in world.records.values()]
    assert np.mean(seconds) == pytest.approx(1.9, rel=0.1)


def test_a_step_after_the_end_says_so_again():
    """The news of an end is lost with its instance, and the request is run again."""
    rows = TraceExecutors(TraceOutcomes(0))
    request = make_request(output=32, block=32)
    rows.arrive(0, request)
    batch = Batch(0, (Step(request.id, StepKind.RECOMPUTE, 52, 52, 0.5),))
    place = InstanceId("i0")
    while (last := rows.run(place, batch)[0]).finished is None:
        pass
    rows.lost(place)
    (again,) = rows.run(place, batch)
    assert (again.settled, again.emitted, again.finished) == (0, 32, last.finished)


class OneByOne:
    """An executor that writes 100 + offset, one token a step."""

    def __init__(self):
        self.rows = {}

    def add(self, request, payload, progress, settled):
        self.rows[request.id] = dict(settled)

    def run(self, batch):
        outcomes, settled = [], {}
        for step in batch.steps:
            row = self.rows[step.request_id]
            token = SettledToken(len(row), 100 + len(row))
            row[token.offset] = token.token_id
            settled[step.request_id] = (token,)
            outcomes.append(StepOutcome(step.request_id, 1, len(row)))
        return BatchResult(tuple(outcomes), settled, 0.1)

    def remove(self, request_id):
        self.rows.pop(request_id, None)


def test_settled_tokens_outlive_the_instance_that_computed_them():
    request = make_request(output=32)
    rows = EngineExecutors(lambda _: OneByOne(), {request.id: Payload((1, 2))})
    batch = Batch(0, (Step(request.id, StepKind.CACHED, 16, 52, 0.5),))
    rows.arrive(0, request)
    one, two = InstanceId("i0"), InstanceId("i1")
    rows.load(one, request, Progress(20))
    rows.run(one, batch)
    rows.lost(one)
    rows.load(two, request, Progress(21))
    (outcome,) = rows.run(two, batch)
    assert outcome.emitted == 2
    assert rows.settled[request.id] == {0: 100, 1: 101}


def test_rounding_leaves_values_that_json_knows():
    given = {"a": 1 / 3, "b": (float("inf"), 2), "c": {1: True}, "d": None}
    assert rounded(given) == {"a": 0.333333, "b": [None, 2], "c": {"1": True}, "d": None}


def test_requests_that_end_by_themselves_take_fewer_steps():
    steps = {
        early: sum(r.step_count for r in ran(workload__early_stop=early).records.values())
        for early in (False, True)
    }
    assert steps[True] < 0.8 * steps[False]


def test_a_block_causal_model_recomputes_once_and_is_quicker():
    """The published latencies are of a model that recomputes at every block."""
    ends, refreshes = {}, {}
    for cache in ("dual", "block"):
        world = ran(setting__cache_mode=cache)
        records = world.records.values()
        refreshes[cache] = sum(r.refreshes for r in records) / len(records)
        ends[cache] = world.now_s
    assert refreshes["block"] == 1.0 < refreshes["dual"]
    assert ends["block"] < ends["dual"]


CLASSES = [
    {"share": 1.0, "weight": 4.0, "relative_deadline": 0.5},
    {"share": 3.0, "relative_deadline": 2.0},
]


def test_classes_have_their_share_weight_and_deadline_and_are_told_apart():
    name = "stepserve-marginal-caps"
    changes = {f"system__{name}__predictor": "mean"}
    load = simulation(name, slo=CLASSES, workload__requests=200, **changes)
    told = {(r.slo.slo_class, r.slo.weight, round(r.slo.e2e_s, 6)) for r in load.requests}
    assert told == {("class0", 4.0, 4.75), ("class1", 1.0, 19.0)}
    row = simulate(load).row
    first, second = row["classes"]["class0"], row["classes"]["class1"]
    assert first["requests"] + second["requests"] == 200
    assert 30 <= first["requests"] <= 70
    shares = 4.0 * first["requests"], 1.0 * second["requests"]
    weighted = shares[0] * first["accuracy"] + shares[1] * second["accuracy"]
    assert row["accuracy_weighted"] == pytest.approx(weighted / sum(shares))


def test_instances_of_other_hardware_run_at_their_own_speed():
    """A mixed cluster is between the two; each instance's batches take its own times."""
    ends = {}
    for name, groups in {
        "fast": [{"count": 2, "hardware": "GH200-graphs"}],
        "slow": [{"count": 2, "hardware": "H100"}],
        "mixed": [{"hardware": "GH200-graphs"}, {"hardware": "H100"}],
    }.items():
        run = simulation(rate_per_s=1.0, setting__instances=groups)
        ends[name] = simulate(run).row["latency_mean_s"]
        if name == "mixed":
            one, two = run.specs
            assert run.truth.step_time_s(512, 4, one) < run.truth.step_time_s(512, 4, two)
    assert ends["fast"] < ends["mixed"] < ends["slow"]


def test_a_capacity_of_diffusion_models_is_searched_by_deadlines(tmp_path):
    config = CONFIG.replace('"infaas", "oracle"', '"infaas"').replace("[0, 1]", "[0]")
    config = config.replace("rates_per_gpu_per_s = [1.0, 2.5]", "rates_of_capacity = [0.5]")
    config = config.replace("requests = 30", "duration_s = 40.0")
    config += '[capacity]\nsearch = "infaas"\nhold = 0.9\nshare = 0.2\nstep_per_s = 1.0\n'
    best, half = json.loads(run(tmp_path, "--jobs", "1", config=config))["rows"]
    assert (best["kind"], half["kind"]) == ("capacity", "run")
    assert best["attainment"] >= 0.9
    assert best["capacity_per_s"] == best["rate_per_s"]
    assert half["rate_per_s"] == pytest.approx(best["rate_per_s"] / 2, rel=1e-3)
    probes = dict(map(tuple, best["probes"]))
    assert not probes[min(rate for rate in probes if rate > best["capacity_per_s"])]


def test_a_system_that_holds_no_rate_has_a_row_with_names_and_no_rate(tmp_path):
    config = CONFIG.replace('"infaas", "oracle"', '"infaas"').replace("[0, 1]", "[0]")
    config = config.replace("rates_per_gpu_per_s = [1.0, 2.5]", "rates_of_capacity = [0.5]")
    config = config.replace("requests = 30", "duration_s = 10.0")
    config += '[capacity]\nsearch = "infaas"\nshare = 0.2\nstep_per_s = 1.0\n'
    config += "[[slo]]\ne2e_s = 0.001\n"
    (row,) = json.loads(run(tmp_path, "--jobs", "1", config=config))["rows"]
    assert (row["kind"], row["system"], row["seed"]) == ("capacity", "infaas", 0)
    assert row["capacity_per_s"] == 0.0
    assert row["rate_per_s"] is None
    assert not any(held for _, held in row["probes"])


@pytest.mark.parametrize("option", ["--out", "--events", "--log-steps"])
def test_a_folder_that_is_a_file_is_refused_before_any_work(tmp_path, capsys, option):
    (tmp_path / "config.toml").write_text(CONFIG)
    (tmp_path / "file").write_text("")
    paths = {"--out": tmp_path, option: tmp_path / "file"}
    words = [str(word) for pair in paths.items() for word in pair]
    assert main(["simulate", str(tmp_path / "config.toml"), "--jobs", "1", *words]) != 0
    assert f"{option}: " in capsys.readouterr().err


BUNDLED = """
systems = ["stepserve"]
[setting]
model = "bundled"
block_tokens = 16
nodes = [2]
base_s = 1.0
faults.losses_per_hour = 2000.0
delays = { rebuild_s = 0.5, detect_s = 0.1 }
[workload]
name = "bundled"
requests = 12
rates_per_gpu_per_s = [4.0]
"""


def test_the_bundled_model_answers_through_losses_as_it_does_alone(tmp_path):
    """Real tokens in simulated time: what a lost instance had settled is not computed again."""
    (row,) = json.loads(run(tmp_path, "--jobs", "1", config=BUNDLED))["rows"]
    assert row["losses"] > 0
    assert row["accuracy_kind"] == "measured"
    assert row["failed"] == 0
    assert row["accuracy"] >= 0.5, "held-out accuracy of the model is above 0.8 at 0.9"


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("base_s = 1.0\n", "", "setting.base_s"),
        ("base_s = 1.0\n", 'base_s = 1.0\nhardware = "H100"\n', "setting.hardware"),
        ("base_s = 1.0\n", 'base_s = 1.0\nhardware = "nowhere.json"\n', "setting.hardware"),
        ("nodes = [2]", "nodes = [2]\ndegree = 2", "setting.degree"),
    ],
)
def test_what_the_bundled_model_cannot_be_run_with_is_named(tmp_path, capsys, old, new, field):
    (tmp_path / "config.toml").write_text(BUNDLED.replace(old, new))
    assert main(["simulate", str(tmp_path / "config.toml"), "--out", str(tmp_path)]) != 0
    assert f" {field}: " in capsys.readouterr().err


def test_the_bundled_model_runs_on_the_hardware_of_a_file(tmp_path):
    """Ten times the seconds of a step: requests that hardly meet take ten times as long."""
    latency_s = []
    for seconds in (0.01, 0.1):
        path = tmp_path / f"{seconds}.json"
        StepProfile((4096,), (seconds,), "made up").save(path)
        config = BUNDLED.replace("base_s", f'hardware = "{path}"\nbase_s')
        config = config.replace("[4.0]", "[0.01]").replace("= 2000.0", "= 0.0")
        (row,) = json.loads(run(tmp_path, "--jobs", "1", config=config))["rows"]
        latency_s.append(row["latency_mean_s"])
    assert latency_s[1] == pytest.approx(10 * latency_s[0], rel=0.1)

from dataclasses import replace

import pytest

from stepserve.core.errors import FieldError
from stepserve.cost.step_table import StepProfile
from stepserve.sim import data
from stepserve.sim.datasets import published_run
from stepserve.sim.diffusion import DiffusionSimulation
from stepserve.sim.experiment import read_experiment
from stepserve.sim.outcomes import MEAN_STEPS
from stepserve.sim.profiles import HostOverhead, host_overhead, profiles, step_profile
from stepserve.sim.simulation import Point

NAMES = [(gpu, "llada-8b", tp) for gpu in ("H100", "GH200", "GH200-graphs") for tp in (1, 2, 4)]
NAMES += [("H100", "dream-7b", tp) for tp in (1, 2, 4)]
has_data = pytest.mark.skipif(
    data.data_file("dlm/step_latency.csv") is None, reason="needs the published data sets"
)


@pytest.fixture
def no_data(monkeypatch, tmp_path):
    monkeypatch.setenv("STEPSERVE_DATA", str(tmp_path))


@pytest.mark.parametrize("name", NAMES)
def test_every_profile_covers_the_grid_without_data(name, no_data):
    profile = step_profile(*name)
    assert profile.sizes == tuple(range(32, 8193, 32))
    assert 0.005 < profile.seconds[0] < profile.seconds[-1] < 0.4


@has_data
@pytest.mark.parametrize("name", NAMES)
def test_the_shipped_extract_stays_close_to_the_full_profile(name, monkeypatch, tmp_path):
    full = step_profile(*name)
    monkeypatch.setenv("STEPSERVE_DATA", str(tmp_path))
    short = step_profile(*name)
    assert full.sizes == short.sizes
    assert full.source != short.source
    mean = sum(full.seconds) / sum(short.seconds)
    assert mean == pytest.approx(1.0, abs=0.05)


@has_data
def test_the_full_profile_keeps_its_jags():
    profile = step_profile("H100", "llada-8b", 1)
    at = dict(zip(profile.sizes, profile.seconds, strict=True))
    assert at[576] > at[608]


def test_published_points_come_out(no_data):
    at = dict(zip(*_table("H100", "llada-8b", 1), strict=True))
    assert at[32] == pytest.approx(0.0122)
    assert at[2048] == pytest.approx(0.0583)


def test_dream_scales_with_the_speed_up_of_llada(no_data):
    ratio = [
        a / b
        for a, b in zip(
            _table("H100", "dream-7b", 1)[1], _table("H100", "dream-7b", 4)[1], strict=True
        )
    ]
    known = [
        a / b
        for a, b in zip(
            _table("H100", "llada-8b", 1)[1], _table("H100", "llada-8b", 4)[1], strict=True
        )
    ]
    assert ratio == pytest.approx(known)
    assert "not measured" in step_profile("H100", "dream-7b", 4).source


def test_graphs_never_slow_a_step_down(no_data):
    for tp in (1, 2, 4):
        with_graphs, without = (_table(gpu, "llada-8b", tp)[1] for gpu in ("GH200-graphs", "GH200"))
        assert all(a <= b for a, b in zip(with_graphs, without, strict=True))
        assert with_graphs[0] < 0.5 * without[0]


def _table(*name):
    profile = step_profile(*name)
    return profile.sizes, profile.seconds


@pytest.mark.parametrize(
    ("name", "field"),
    [
        (("A100", "llada-8b", 1), "gpu"),
        (("GH200", "dream-7b", 1), "gpu"),
        (("H100", "llama", 1), "model"),
        (("H100", "llada-8b", 8), "tp"),
    ],
)
def test_what_nobody_measured_is_refused(name, field):
    with pytest.raises(FieldError) as error:
        step_profile(*name)
    assert error.value.field == field


def test_host_overhead_grows_with_the_rows():
    overhead = HostOverhead(0.005, 0.001)
    assert [overhead.seconds(n) for n in (0, 1, 5)] == pytest.approx([0.0, 0.005, 0.009])
    with pytest.raises(FieldError):
        HostOverhead(per_row_s=-1.0)
    with pytest.raises(FieldError):
        host_overhead("A100")


def test_calibration_reproduces_the_published_unloaded_latency():
    profile, overhead = step_profile("H100", "llada-8b", 1), host_overhead("H100")
    full_s, cached_s = (profile.step_time_s(n, 1) + overhead.seconds(1) for n in (1318, 32))
    unloaded_s = 8 * full_s + (MEAN_STEPS[0] - 8) * cached_s
    assert unloaded_s == pytest.approx(published_run("llada-8b", "gsm8k").base_s, rel=0.03)


def test_a_measured_table_is_hardware(tmp_path, no_data):
    """A file, and beside it those of further degrees, as far as they are needed."""
    path = tmp_path / "card.json"
    table = StepProfile((32, 512, 8192), (0.004, 0.01, 0.2), "measured: a card")
    table.save(path)
    assert profiles(str(path), "mine", (1,)) == {1: table}
    with pytest.raises(FieldError, match=r"hardware: no file .*card_tp2.json .* TP degree 2"):
        profiles(str(path), "mine", (1, 2, 4))
    for degree in (2, 4):
        replace(table, host_s=degree).save(tmp_path / f"card_tp{degree}.json")
    assert [p.host_s for p in profiles(str(path), "mine").values()] == [0.0, 2, 4]
    with pytest.raises(FieldError, match="hardware: no file"):
        profiles("nowhere.json", "mine")


def test_a_simulation_runs_on_a_measured_table(tmp_path, no_data):
    """Steps of ten times the seconds: requests on their own take nearly ten times as long."""
    lasted = []
    for seconds in (0.02, 0.2):
        path = tmp_path / f"{seconds}.json"
        StepProfile((8192,), (seconds,), "made up").save(path)
        workload = {"name": "gsm8k", "requests": 3, "rates_per_s": [1e-4]}
        setting = {"model": "llada-8b", "hardware": str(path), "instances": 1}
        table = {"systems": ["infaas"], "setting": setting, "workload": workload}
        point = Point("infaas", "infaas", 1e-4, 0)
        world = DiffusionSimulation(read_experiment(table), point).world()
        world.run()
        lasted.append(sum(r.latency_s for r in world.records.values()))
    assert lasted[1] == pytest.approx(10 * lasted[0], rel=0.05)

"""``stepserve simulate --from``: a recorded live run of each family, and three what-ifs of it."""

import asyncio
import dataclasses
import json
from itertools import product
from pathlib import Path

import pytest

from stepserve.cli.main import main
from stepserve.cli.recorded_run import recorded_table
from stepserve.core.config import ServeConfig
from stepserve.core.request import SLO, CacheMode
from stepserve.core.step import Mix
from stepserve.cost.batch_profile import BatchProfile
from stepserve.cost.step_table import StepProfile
from stepserve.engine.loader import load_model
from support.ar_models import make, write_checkpoint
from support.live_cluster import collect, make_live_request, running_cluster
from support.parts import make_control

REQUESTS = 12


def batch_profile(loaded):
    """2 ms, 1 ms a prefilled token, 1 ms a decode."""
    grid = product((0, 64, 512), (0, 1, 8), (0, 512))
    steps = [(Mix(p, p * p // 2, d, d * c), 0.002 + 1e-3 * (p + d)) for p, d, c in grid if p + d]
    shape = {"parameters": 1e5, "layers": 2, "hidden": 32}
    weights = float(sum(p.numel() * p.element_size() for p in loaded.model.parameters()))
    bytes_ = {"kv_bytes_per_token": 256.0, "weight_bytes": weights}
    return BatchProfile.fitted(**shape, **bytes_, steps=steps, source="made up")


async def serve(config, loaded, made):
    """All requests at once; every third has a class of its own."""
    async with running_cluster(config, loaded=loaded) as cluster:
        while len(cluster.loop.status().instances) < config.instances:
            await asyncio.sleep(0)
        jobs = []
        for index in range(REQUESTS):
            request, payload = made(cluster.frontend, index)
            slo = SLO(slo_class="rare" if index % 3 == 0 else "usual", e2e_s=30.0)
            request = dataclasses.replace(request, arrival_s=cluster.frontend.now_s(), slo=slo)
            jobs.append(collect(cluster.frontend, request, payload))
        await asyncio.gather(*jobs)


def config_of(folder: Path, **options) -> ServeConfig:
    usual = {"instances": 1, "threads_per_instance": 1, "kv_pages": 200, "profile": "profile.json"}
    usual["profile"] = str(folder / "profile.json")
    return ServeConfig(events=str(folder / "run.jsonl"), **usual | options)


@pytest.fixture(scope="module")
def diffusion(tmp_path_factory):
    folder = tmp_path_factory.mktemp("diffusion")
    StepProfile((16, 256, 2048), (0.01, 0.02, 0.1), "made up").save(folder / "profile.json")
    config = config_of(folder, max_running_requests=4, control=make_control(threshold="fixed"))

    def made(frontend, index):
        return make_live_request(frontend, str(index), output=40, cache=CacheMode.DUAL, floor=0.5)

    asyncio.run(serve(config, None, made))
    return folder / "run.jsonl"


@pytest.fixture(scope="module")
def autoregressive(tmp_path_factory):
    folder = tmp_path_factory.mktemp("autoregressive")
    loaded = load_model(write_checkpoint(folder))
    batch_profile(loaded).save(folder / "profile.json")

    def made(frontend, index):
        return make(str(index), 60 + index, 20 + index, ignore_eos=True)

    asyncio.run(serve(config_of(folder, control=make_control(tbt_s=0.03)), loaded, made))
    return folder / "run.jsonl"


@pytest.fixture
def ask(tmp_path):
    """The row that comes of a log with changes."""

    def asked(log, *changes):
        words = [word for change in changes for word in ("--set", change)]
        out = ("--out", str(tmp_path / "out"))
        assert main(["simulate", "--from", str(log), *words, *out, "--jobs", "1"]) == 0
        (row,) = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
        return row

    return asked


def test_a_diffusion_run_is_simulated_as_it_was(diffusion, ask):
    recording, _ = recorded_table(diffusion)
    row = ask(diffusion)
    assert row["requests"] == len(recording.requests) == REQUESTS
    assert row["finished_share"] == row["attainment"] == 1.0
    assert row["threshold_mean"] == 0.9
    assert row["instances"] == 1
    assert set(row["classes"]) == {"rare", "usual"}
    usual = 85.70 * 40 / 256
    steps = [usual * r.difficulty for r in recording.requests]
    assert row["steps"] == pytest.approx(sum(steps) / REQUESTS, abs=1e-3), "each step, no more"


def test_a_diffusion_run_answers_what_if(diffusion, ask):
    base = ask(diffusion)
    threshold = "system.recorded.control.threshold=at_cap"
    caps = "system.recorded.control.load_control=load_caps"
    hurried = ask(diffusion, threshold, caps, "slo.e2e_s=0.3")
    assert hurried["threshold_mean"] < base["threshold_mean"], "another policy"
    assert hurried["steps"] < base["steps"]
    assert ask(diffusion, "setting.instances=2")["latency_mean_s"] < base["latency_mean_s"]
    tight = ask(diffusion, f"slo.rare.e2e_s={base['latency_mean_s'] / 4}")
    assert tight["classes"]["rare"]["attainment"] < 1.0 == tight["classes"]["usual"]["attainment"]


def test_an_autoregressive_run_is_simulated_as_it_was(autoregressive, ask):
    recording, _ = recorded_table(autoregressive)
    row = ask(autoregressive)
    assert [r.output_tokens for r in recording.requests] == [20 + n for n in range(REQUESTS)]
    assert row["finished_share"] == row["attainment"] == 1.0
    assert row["served_share"] == 1.0
    assert row["family"] == "autoregressive"
    assert row["mfu"] == [None]


def test_an_autoregressive_run_answers_what_if(autoregressive, ask):
    base = ask(autoregressive)
    whole = ask(autoregressive, "system.recorded.control.batching=static_chunk")
    assert whole["ttft_p50_s"] > base["ttft_p50_s"], "another policy: all prompts in one batch"
    assert ask(autoregressive, "setting.instances=2")["latency_mean_s"] < base["latency_mean_s"]
    tight = ask(autoregressive, f"slo.tbt_s={base['tbt_p50_s']}")
    assert tight["attainment"] < base["attainment"], "a tighter target"
    assert tight["tbt_attainment"] < 1.0


def test_a_recorded_run_can_be_swept_and_scaled(diffusion, tmp_path):
    words = ["--set", "sweep.setting.instances=[1, 2, 3]", "--set", "workload.rates_per_s=[20.0]"]
    out = ("--out", str(tmp_path))
    assert main(["simulate", "--from", str(diffusion), *words, *out, "--jobs", "1"]) == 0
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["swept"] for row in rows] == [{"setting.instances": n} for n in (1, 2, 3)]
    assert {row["rate_per_s"] for row in rows} == {20.0}


def test_what_is_no_event_log_is_named(tmp_path, capsys):
    (tmp_path / "file.jsonl").write_text("{}\n")
    path = str(tmp_path / "file.jsonl")
    assert main(["simulate", "--from", path, "--out", str(tmp_path / "out")]) != 0
    assert "events" in capsys.readouterr().err

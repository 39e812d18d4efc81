"""The example package, installed as pip would: named, served, replayed, simulated, measured."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from stepserve.core.config import Choice, ControlConfig, NoOptions, ServeConfig
from stepserve.core.errors import FieldError, StepserveError
from stepserve.core.ids import RequestId
from stepserve.core.payload import Payload, SamplingParams
from stepserve.core.protocols import KvPages
from stepserve.core.request import DiffusionOptions, Family, FinishReason, Progress, Request
from stepserve.core.step import Batch, Step, StepKind
from stepserve.families.registry import load
from stepserve.live import deploy
from stepserve.live.instance_factory import make_engine
from support.live_cluster import assert_at_rest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "examples" / "outside-package"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the package and its entry points, on the path of this process."""
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(PACKAGE / "src" / "stepserve_example", site / "stepserve_example")
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    info = site / f"stepserve_example-{project['version']}.dist-info"
    info.mkdir()
    named = f"Name: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\n{named}")
    groups = [
        "\n".join([f"[{group}]", *(f"{name} = {path}" for name, path in entries.items())])
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        yield site
    for name in [name for name in sys.modules if name.startswith("stepserve_example")]:
        del sys.modules[name]


def environment(site):
    return os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT / 'src'}"}


def command(site, *words, folder=None):
    """``stepserve`` with these words, in a process of its own; what it printed."""
    line = [sys.executable, "-m", "stepserve.cli.main", *map(str, words)]
    done = subprocess.run(
        line, env=environment(site), cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# names


@pytest.mark.parametrize(
    ("kind", "name", "path"),
    [
        ("threshold", "low_early", "stepserve_example.policies:LowEarly"),
        ("placement", "cut_in_two", "stepserve_example.policies:CutInTwo"),
        ("engine", "hash", "stepserve_example.engine:HashEngine"),
    ],
)
def test_a_part_is_found_by_its_name_and_by_its_path(installed, kind, name, path):
    found = load(kind, name)
    assert found is load(kind, path)
    assert f"{found.__module__}:{found.__name__}" == path


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"placement": Choice("cut_in_two", {"share": 1.0})}, "control.placement.share"),
        ({"placement": Choice("cut_in_tow")}, "control.placement"),
        ({"threshold": Choice("low_early")}, "control.threshold"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_key(installed, options, field):
    config = config_of("autoregressive", control=ControlConfig(**options))
    with pytest.raises(FieldError) as error:
        deploy.build_cluster(config, make_engine(config))
    assert error.value.field == field


@pytest.mark.parametrize(
    ("change", "field"), [({"model": "x"}, "model"), ({"layout": "2"}, "layout")]
)
def test_the_engine_refuses_what_it_has_not(installed, change, field):
    config = replace(config_of("autoregressive"), **change)
    with pytest.raises(FieldError) as error:
        deploy.build_cluster(config, make_engine(config))
    assert error.value.field.split(".")[-1] == field


def test_the_engine_is_built_without_torch(installed):
    code = (
        "import sys; from stepserve.core.config import *; from stepserve.live import deploy;"
        "from stepserve.live.instance_factory import make_engine;"
        "c = ServeConfig(model='autoregressive', engine=Choice('hash'));"
        "deploy.build_cluster(c, make_engine(c)); print('torch' in sys.modules)"
    )
    line = [sys.executable, "-c", code]
    out = subprocess.run(
        line, env=environment(installed), capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "False"


# executors


def executor(family, page_tokens=4):
    config = config_of(family, page_tokens=page_tokens)
    spec = deploy.first_specs(config)[0]
    return load("engine", "hash")(NoOptions(), config).executor(spec, 1)


def made(family, name="r", output=40, **options):
    prompt = tuple(b"What comes next?")
    diffusion = DiffusionOptions(**options)
    shape = (RequestId(name), Family(family), "m", len(prompt), output, 0.0)
    return Request(*shape, diffusion=diffusion), Payload(prompt, SamplingParams(ignore_eos=True))


def step_over(name, start, stop):
    kind = StepKind.DECODE if stop == start + 1 else StepKind.PREFILL
    return Step(RequestId(name), kind, stop - start, stop)


def decode(made_by, name, start, stop):
    """Run single steps over inputs; the tokens."""
    tokens = []
    for at in range(start, stop):
        result = made_by.run(Batch(0, (step_over(name, at, at + 1),)))
        assert result.outcomes[0].error is None
        tokens += [token.token_id for token in result.settled[name]]
    return tokens


def test_keys_and_values_come_along_in_any_order_and_only_intact(installed):
    first, second = executor("autoregressive"), executor("autoregressive")
    assert isinstance(first, KvPages)
    request, payload = made("autoregressive")
    first.add(request, payload, Progress(), {})
    whole = decode(first, "r", 0, 50)
    second.add(request, payload, Progress(), dict(enumerate(whole[:10])))
    chunks = [first.export_kv("r", 1, a, b) for a, b in ((10, 25), (0, 10))]
    assert [len(chunk.checksums) for chunk in chunks] == [5, 3], "one for each page"
    for chunk in chunks:
        damaged = bytes([chunk.data[0] ^ 1]) + chunk.data[1:]
        assert not second.import_kv(replace(chunk, data=damaged))
        assert not second.import_kv(replace(chunk, data=chunk.data[:-1]))
        assert not second.import_kv(replace(chunk, request_id="unknown"))
        assert second.import_kv(chunk)
    assert decode(second, "r", 25, 50) == whole[10:]
    assert not second.import_kv(chunks[0]), "it has started"
    with pytest.raises(StepserveError):
        first.export_kv("r", 1, 0, 51)


def test_a_row_that_fails_leaves_its_neighbour_alone(installed):
    one = executor("autoregressive")
    for name in ("a", "b"):
        one.add(*made("autoregressive", name), Progress(), {})
    steps = (step_over("a", 3, 5), step_over("b", 0, 16), step_over("c", 0, 16))
    result = one.run(Batch(0, steps))
    assert [outcome.finished for outcome in result.outcomes] == [
        FinishReason.ERROR,
        None,
        FinishReason.ERROR,
    ]
    assert len(result.settled["b"]) == 1
    assert set(one.rows) == {"b"}


def denoise(threshold, **options):
    one = executor("diffusion")
    request, payload = made("diffusion", block_tokens=8, **options)
    one.add(request, payload, Progress(settled=16), {})
    tokens, steps, finished = {}, 0, None
    while finished is None:
        step = Step(request.id, StepKind.RECOMPUTE, 56, 56, threshold)
        result = one.run(Batch(0, (step,)))
        (outcome,), settled = result.outcomes, result.settled[request.id]
        assert outcome.settled == len(settled) >= 1
        tokens |= {token.offset: token.token_id for token in settled}
        steps, finished = steps + 1, outcome.finished
    assert sorted(tokens) == list(range(40))
    return [tokens[offset] for offset in range(40)], steps


def test_a_lower_threshold_takes_fewer_steps_to_the_same_text(installed):
    (high, many), (low, few) = denoise(0.9), denoise(0.5)
    assert high == low
    assert few < many
    assert denoise(0.9, max_steps_per_block=1) == (high, 5)


# served


def config_of(family, **options):
    usual = {"instances": 2, "threads_per_instance": 1, "kv_pages": 256}
    return ServeConfig(model=family, engine=Choice("hash"), **usual | options)


POLICIES = {
    "autoregressive": {"placement": Choice("cut_in_two")},
    "diffusion": {"threshold": Choice("low_early")},
}


async def texts(config, count=4):
    """Answers through the gateway, hand-overs and mean thresholds."""
    engine = make_engine(config)
    cluster = deploy.build_cluster(config, engine)
    app = deploy.build_app(config, engine.facts, cluster.frontend, cluster.control_reading)
    cluster.start()
    try:
        while len(cluster.loop.status().instances) < len(cluster.specs):
            await deploy.asyncio.sleep(0)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            replies = []
            for index in range(count):
                body = {"model": engine.facts.name, "prompt": f"Say {index}.", "max_tokens": 48}
                body |= {"ignore_eos": True, "seed": 0}
                replies.append((await client.post("/v1/completions", json=body)).json())
        while any(i.claims for i in cluster.loop.supervisor.scheduler.ledger.instances.values()):
            await deploy.asyncio.sleep(0.001)
        assert_at_rest(cluster)
        handovers = cluster.control_reading().handovers
    finally:
        await cluster.stop()
    return replies, handovers


def said(replies):
    return [reply["choices"][0]["text"] for reply in replies]


@pytest.mark.parametrize("family", list(Family))
async def test_both_families_are_served_and_the_log_replays(installed, tmp_path, family):
    plain, none = await texts(config_of(family))
    assert none == 0
    assert all(len(text) == 48 for text in said(plain))
    control = ControlConfig(**POLICIES[family])
    events = tmp_path / "events.jsonl"
    replies, handovers = await texts(config_of(family, control=control, events=str(events)))
    assert said(replies) == said(plain)
    assert handovers == (4 if family is Family.AUTOREGRESSIVE else 0)
    if family is Family.DIFFUSION:
        before, now = (sum(r["dlm"]["threshold_mean"] for r in some) for some in (plain, replies))
        assert now < before
    assert "every action came out again" in command(installed, "replay", events)


@pytest.mark.parametrize(
    ("name", "system"), [("early.toml", "low-early"), ("cut.toml", "cut-in-two")]
)
def test_experiments_with_the_policies_run_in_two_processes(installed, tmp_path, name, system):
    options = ("--jobs", 2, "--set", "workload.requests=8", "--out", tmp_path)
    command(installed, "simulate", PACKAGE / name, *options)
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    mine = [row for row in rows if row["system"] == system]
    assert [row["seed"] for row in mine] == [0, 1]
    assert all(row["finished_share"] == 1.0 for row in mine)
    others = [row for row in rows if row["system"] != system]
    assert {row["latency_mean_s"] for row in mine}.isdisjoint(r["latency_mean_s"] for r in others)


def served(site, *options):
    """A server process that is ready, and its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    line = [sys.executable, "-m", "stepserve.cli.main", "serve", "--port", str(port)]
    line += ["--engine", "hash", "--model", "autoregressive", "--placement-policy", "cut_in_two"]
    env = environment(site) | {"RAY_AUTH_MODE": "disabled"}
    process = subprocess.Popen([*line, *options], stderr=subprocess.PIPE, text=True, env=env)
    up = 0
    for text in process.stderr:
        up += "is up" in text
        if up == 2:
            return process, f"http://127.0.0.1:{port}"
    raise AssertionError(f"the server ended with {process.wait()} before it was ready")


def end(process):
    try:
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def handovers(url):
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(n.split()[-1]) for n in lines if n.startswith("stepserve:handovers_total"))


def test_a_load_test_of_a_server(installed, tmp_path):
    process, url = served(installed)
    try:
        out = tmp_path / "report.json"
        words = ("--url", url, "--requests", 5, "--max-tokens", 24, "--ignore-eos", "--json", out)
        command(installed, "bench", *words)
        assert handovers(url) == 5 + json.loads(out.read_text())["config"]["warmup"]
    finally:
        end(process)
    assert json.loads(out.read_text())["variants"]["run"]["completed"] == 5


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore:.*:FutureWarning")
def test_hand_overs_between_processes_of_ray(installed, monkeypatch):
    pytest.importorskip("ray")
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # short: sockets have their names in it
    monkeypatch.setenv("RAY_TMPDIR", folder)
    try:
        process, url = served(installed, "--cluster", "ray", "--threads-per-instance", "1")
        try:
            body = {"model": "hash-autoregressive", "prompt": "Say 0.", "max_tokens": 48}
            body |= {"ignore_eos": True, "seed": 0}
            reply = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()
            assert len(reply["choices"][0]["text"]) == 48
            assert handovers(url) == 1
        finally:
            end(process)
    finally:
        shutil.rmtree(folder, ignore_errors=True)

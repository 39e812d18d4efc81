"""The live cluster on Ray: what it serves, what it survives, what it leaves behind."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import pytest
import ray
from ray.util import list_named_actors, placement_group_table

from stepserve.core.config import Choice, ControlConfig, ServeConfig
from stepserve.core.errors import FieldError, StepserveError
from stepserve.core.instance import InstanceSpec
from stepserve.engine.hub import BUNDLED
from stepserve.engine.loader import load_model
from stepserve.families.profiles import BATCH_PROFILE
from stepserve.live.transport_ray import InstanceActor, RayCluster, fair_share
from support.ar_models import write_checkpoint
from support.live_cluster import assert_at_rest, quick_profile, running_cluster
from support.on_ray import all_up, ray_cluster, ray_of, serve_all
from support.split_requests import CutAt, answer, at_rest

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore:.*:FutureWarning")


@pytest.fixture(scope="module")
def ray_of_two_cpus():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEPSERVE_TEST", str(os.getpid()))  # for ``forked``
        with ray_of(cpus=2):
            yield


async def test_a_killed_actor_is_replaced_and_answers_are_those_of_one_process(ray_of_two_cpus):
    config = ServeConfig(instances=2, threads_per_instance=1)
    async with running_cluster(config, loaded=load_model(BUNDLED)) as cluster:
        expected = await serve_all(cluster, 6)
    async with ray_cluster() as cluster:
        assert await serve_all(cluster, 6) == expected
        killed = []

        def kill(request):
            first = min(cluster.loop.status().instances, key=lambda i: i.spec.id)
            if not killed and request.id in first.running:
                killed.append(first.spec.id)
                actor = next(n for n in list_named_actors() if killed[0] in n)
                ray.kill(ray.get_actor(actor))

        assert await serve_all(cluster, 6, kill) == expected
        assert killed
        assert cluster.loop.losses == 1
        await all_up(cluster)
        assert_at_rest(cluster)


async def test_split_requests_travel_between_actors(ray_of_two_cpus, tmp_path):
    loaded = load_model(write_checkpoint(tmp_path))
    quick_profile(loaded).save(tmp_path / BATCH_PROFILE)
    options = {"model": str(tmp_path), "threads_per_instance": 1, "kv_pages": 200}
    names = ["whole", "r:3", "r:12", "r:13", "r:20"]
    long = {"prompt": 400, "output": 60, "seed": 9}
    async with running_cluster(ServeConfig(instances=2, **options), loaded=loaded) as cluster:
        cluster.loop.supervisor.scheduler._placement = CutAt()
        whole = (await answer(cluster, "whole")).tokens
        long_whole = (await answer(cluster, "l", **long)).tokens
    async with ray_cluster(**options) as cluster:
        cluster.loop.supervisor.scheduler._placement = CutAt()
        for name in names:
            assert (await answer(cluster, name)).tokens == whole, name
        for name in ("l:150", "l:420"):
            assert (await answer(cluster, name, **long)).tokens == long_whole, name
        assert cluster.control_reading().handovers == 6
        assert cluster.loop.losses == 0
        await at_rest(cluster)


def forked():
    """Processes of tensor-parallel groups in actors of ``ray_of_two_cpus``."""
    found, mark = set(), f"STEPSERVE_TEST={os.getpid()}"
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if "forkserver" in (path / "cmdline").read_text():
                found |= {path.name} if mark in (path / "environ").read_text() else set()
    return found


async def test_an_actor_of_a_degree_has_workers_that_end_with_it(ray_of_two_cpus, tmp_path):
    """The one instance takes both CPUs. It is killed; the next gives the same answers."""
    loaded = load_model(write_checkpoint(tmp_path))
    quick_profile(loaded).save(tmp_path / BATCH_PROFILE)
    options = {"model": str(tmp_path), "threads_per_instance": 1, "kv_pages": 200}
    async with running_cluster(ServeConfig(instances=1, **options), loaded=loaded) as cluster:
        whole = (await answer(cluster, "whole")).tokens
    async with ray_cluster(**options, layout="2") as cluster:
        (room,) = [g for g in placement_group_table().values() if g["state"] == "CREATED"]
        assert room["bundles"] == {0: {"CPU": 2.0}}
        assert (await answer(cluster, "a")).tokens == whole
        group = forked()
        assert len(group) == 2, "a worker, and the process that it was forked from"
        cluster.transport.kill(cluster.specs[0].id)
        while not cluster.loop.losses:
            await asyncio.sleep(0.01)
        await all_up(cluster)
        assert (await answer(cluster, "b")).tokens == whole
        while group & forked():
            await asyncio.sleep(0.01)
    while forked():
        await asyncio.sleep(0.01)


def started_from(folder):
    """Processes of a Ray whose files are in a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [path] if folder in path.read_text() else []
    return found


def test_a_server_starts_ray_and_takes_it_down():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # short: sockets have their names in it
    options = ["--port", str(port), "--cluster", "ray", "--instances", "1"]
    command = [sys.executable, "-m", "stepserve.cli.main", "serve", *options]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"RAY_TMPDIR": folder}
    )
    try:
        assert any("is up" in line for line in process.stderr)
        assert started_from(folder)
        body = {"model": "stepserve-bundled", "prompt": "Sort up: 5, 3, 8.", "max_tokens": 8}
        reply = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=120)
        assert reply.status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
        assert not started_from(folder)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
        shutil.rmtree(folder, ignore_errors=True)


def test_what_cannot_be_undone_does_not_keep_the_rest(caplog):
    done = []

    def fails(_):
        raise RuntimeError("no cluster there")

    actor = InstanceActor(None, InstanceSpec("i", 1, 8, 8, 8), 0)
    for undo in (done.append, fails, done.append):
        actor._held(lambda: "made", undo)
    actor.kill()
    assert done == ["made", "made"]
    assert "of i.0 something may stay" in caplog.text
    with pytest.raises(StepserveError):
        actor._held(lambda: "more", done.append)


@pytest.mark.parametrize("port", ["none", None])
def test_an_address_where_nobody_answers_is_refused_at_once(monkeypatch, port):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{port or taken.getsockname()[1]}"
        on_ray = RayCluster(ServeConfig(cluster=f"ray://{address}"))
        with pytest.raises(FieldError, match=f"cluster: nothing answers at {address}"), on_ray:
            pass


@pytest.mark.parametrize("word", ["nonsense", "ray://", "raylocal", "nonsense://auto"])
def test_an_unknown_cluster_is_refused(word):
    with pytest.raises(FieldError) as error:
        RayCluster(ServeConfig(cluster=word))
    assert error.value.field == "cluster"


@pytest.mark.parametrize(
    "change", [{"instances": 3}, {"instances": 2, "threads_per_instance": 2}, {"layout": "2,1"}]
)
def test_instances_that_no_node_has_room_for_are_refused(ray_of_two_cpus, change):
    with pytest.raises(FieldError) as error, RayCluster(ServeConfig(cluster="ray", **change)):
        pass
    assert error.value.field == ("layout" if "layout" in change else "instances")


def test_a_planner_is_not_refused_on_one_node(ray_of_two_cpus):
    config = ServeConfig(cluster="ray", control=ControlConfig(planner=Choice("greedy")))
    with RayCluster(config) as on_ray:
        assert on_ray.config.threads_per_instance == 1


def test_a_planner_is_refused_on_several_nodes(monkeypatch):
    nodes = [{"Resources": {"CPU": 2.0}, "Alive": alive} for alive in (True, False, True)]
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    on_ray = RayCluster(ServeConfig(cluster="ray", control=ControlConfig(planner=Choice("greedy"))))
    with pytest.raises(FieldError) as error, on_ray:
        pass
    assert error.value.field == "control.planner"
    nodes.pop()
    with on_ray:
        assert on_ray.config.threads_per_instance == 1


@pytest.mark.parametrize(
    ("nodes", "degrees", "share"),
    [
        ([2.0], (1, 1), 1),
        ([8.0, 8.0], (1, 1), 8),
        ([8.0, 8.0], (1, 1, 1), 4),
        ([3.0, 3.0], (1, 1, 1), 1),
        ([0.0, 4.0], (1, 1, 1, 1), 1),
        ([4.0], (1,) * 5, 0),
        ([], (1,), 0),
        ([8.0], (2, 1), 2),
        ([3.0, 3.0], (2, 2), 1),
        ([3.0, 3.0], (2, 2, 2), 0),
    ],
)
def test_every_share_gets_the_most_cpus_that_all_can_have_on_one_node(nodes, degrees, share):
    assert fair_share(nodes, degrees) == share

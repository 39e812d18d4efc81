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

from stepserve.core.config import ControlConfig, ServeConfig
from stepserve.core.errors import FieldError
from stepserve.core.events import ChunkLanded
from stepserve.core.ids import RequestId
from stepserve.core.payload import Payload, SamplingParams
from stepserve.core.request import (
    SLO,
    CacheMode,
    DiffusionOptions,
    Family,
    FinishReason,
    Request,
    ThresholdBounds,
)
from stepserve.engine.loader import load_model
from stepserve.live import families
from support.causal_models import write_checkpoint
from support.live_cluster import assert_at_rest, collect, running_cluster
from support.split_requests import CutAt, answer, at_rest

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402
from ray.util import list_named_actors, placement_group_table  # noqa: E402

from stepserve.live.transport_ray import RayCluster, fair_share  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore:.*:FutureWarning")
OUTPUT = 24


@pytest.fixture(scope="module")
def two_nodes():
    """A Ray cluster of two nodes, both on this machine, with one CPU each."""
    node = {"num_cpus": 1, "object_store_memory": 100 << 20}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_worker_niceness", "0")
        cluster = Cluster(True, head_node_args={**node, "include_dashboard": False})
        cluster.add_node(**node)
        ray.init(address=cluster.address)
        yield
        ray.shutdown()
        cluster.shutdown()


@contextlib.asynccontextmanager
async def ray_cluster(listeners=(), **options):
    """Both instances are up; at the end nothing of them is left in Ray, which goes on."""
    config = ServeConfig(cluster="ray", instances=2, **options)
    with RayCluster(config) as on_ray:
        loaded, host = families.describe(on_ray.config), on_ray.transport
        async with running_cluster(on_ray.config, listeners, loaded, host=host) as cluster:
            await both_up(cluster)
            yield cluster
    assert ray.is_initialized()
    assert not [name for name in list_named_actors() if name.startswith("stepserve")]
    groups = placement_group_table().values()
    assert all(group["state"] == "REMOVED" for group in groups)
    while ray.available_resources().get("CPU") != 2.0:
        await asyncio.sleep(0.01)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("stepserve")]


async def both_up(cluster):
    while len(cluster.loop.scheduler.ledger.instances) < 2:
        await asyncio.sleep(0.01)


async def serve_all(cluster, count, on_tokens=None):
    """Requests to the bundled model, whose tokens depend on nothing around them."""
    jobs = []
    for index in range(count):
        ids = tuple(range(5 + index, 17 + index))
        options = DiffusionOptions(ThresholdBounds(0.9, 0.9), 8, CacheMode.NONE)
        arrived_s = cluster.frontend.now_s()
        made = (RequestId(str(index)), Family.DIFFUSION, "m", len(ids), OUTPUT, arrived_s)
        request = Request(*made, SLO(), options)
        payload = Payload(ids, SamplingParams(ignore_eos=True))
        jobs.append(collect(cluster.frontend, request, payload, on_tokens))
    answers = await asyncio.gather(*jobs)
    assert all(answer.end.reason is FinishReason.LENGTH for answer in answers)
    return [answer.tokens for answer in answers]


async def test_a_killed_actor_is_replaced_and_answers_are_those_of_one_process(two_nodes):
    config = ServeConfig(instances=2, threads_per_instance=1)
    async with running_cluster(config, loaded=families.load(config)) as cluster:
        expected = await serve_all(cluster, 6)
    async with ray_cluster() as cluster:
        assert await serve_all(cluster, 6) == expected
        killed = []

        def kill(request):
            loads = cluster.loop.scheduler.ledger.instances
            if not killed and request.id in loads[min(loads)].placed:
                killed.append(min(loads))
                actor = next(n for n in list_named_actors() if killed[0] in n)
                ray.kill(ray.get_actor(actor))

        assert await serve_all(cluster, 6, kill) == expected
        assert killed
        assert cluster.loop.losses == 1
        await both_up(cluster)
        assert_at_rest(cluster)


async def test_split_requests_travel_between_nodes(two_nodes, tmp_path):
    """And so do their keys and values: over TCP, as there is no memory that both nodes see."""
    loaded = load_model(write_checkpoint(tmp_path))
    profile = families.batch_profile(loaded, 1, (0, 16), (0,), (0, 1), repeats=1)
    profile.save(tmp_path / families.BATCH_PROFILE)
    options = {"model": str(tmp_path), "threads_per_instance": 1, "kv_pages": 200}
    names = ["whole", "r:3", "r:12", "r:13", "r:20"]
    long = {"prompt": 400, "output": 60, "seed": 9}
    async with running_cluster(ServeConfig(instances=2, **options), loaded=loaded) as cluster:
        cluster.loop.scheduler._placement = CutAt()
        whole = (await answer(cluster, "whole")).tokens
        long_whole = (await answer(cluster, "l", **long)).tokens
    landed = []

    def note(handled):
        if isinstance(handled.event, ChunkLanded) and handled.event.intact:
            landed.append(handled.event.request_id)

    async with ray_cluster([note], **options) as cluster:
        cluster.loop.scheduler._placement = CutAt()
        for name in names:
            assert (await answer(cluster, name)).tokens == whole, name
        for name in ("l:150", "l:420"):
            assert (await answer(cluster, name, **long)).tokens == long_whole, name
        assert cluster.control_reading().handovers == 6
        assert set(landed) == {"r:3", "r:12", "r:13", "r:20", "l:150", "l:420"}
        assert cluster.loop.losses == 0
        await at_rest(cluster)


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


@pytest.mark.parametrize("word", ["nonsense", "ray://", "raylocal", "nonsense://auto"])
def test_an_unknown_cluster_is_refused(word):
    with pytest.raises(FieldError) as error:
        RayCluster(ServeConfig(cluster=word))
    assert error.value.field == "cluster"


@pytest.mark.parametrize("change", [{"instances": 3}, {"instances": 2, "threads_per_instance": 2}])
def test_instances_that_no_node_has_room_for_are_refused(two_nodes, change):
    with pytest.raises(FieldError) as error, RayCluster(ServeConfig(cluster="ray", **change)):
        pass
    assert error.value.field == "instances"


def test_layouts_are_not_planned_over_nodes(two_nodes):
    config = ServeConfig(cluster="ray", control=ControlConfig(planner="greedy"))
    with pytest.raises(FieldError) as error, RayCluster(config):
        pass
    assert error.value.field == "control.planner"


@pytest.mark.parametrize(
    ("nodes", "instances", "share"),
    [
        ([2.0], 2, 1),
        ([8.0, 8.0], 2, 8),
        ([8.0, 8.0], 3, 4),
        ([3.0, 3.0], 3, 1),
        ([0.0, 4.0], 4, 1),
        ([4.0], 5, 0),
        ([], 1, 0),
    ],
)
def test_every_instance_gets_the_most_cpus_that_all_can_have_on_one_node(nodes, instances, share):
    assert fair_share(nodes, instances) == share

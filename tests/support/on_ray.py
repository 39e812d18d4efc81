"""A live cluster on the Ray cluster that this process is connected to."""

import asyncio
import contextlib
from pathlib import Path

import pytest
import ray
from ray.util import list_named_actors, placement_group_table

from stepserve.core.config import ServeConfig
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
from stepserve.engine.hub import model_folder
from stepserve.engine.loader import load_model
from stepserve.engine.workers import lives
from stepserve.live.transport_ray import RayCluster
from support.live_cluster import collect, running_cluster

OUTPUT = 24


@contextlib.contextmanager
def ray_of(cpus):
    """A Ray on this machine that this process is connected to."""
    with pytest.MonkeyPatch.context() as patch:
        # A process keeps the token of its first cluster, which another one then refuses.
        patch.setenv("RAY_AUTH_MODE", "disabled")
        ray.init(
            address="local",
            num_cpus=cpus,
            include_dashboard=False,
            object_store_memory=100 << 20,
            _system_config={"worker_niceness": 0},
        )
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.asynccontextmanager
async def ray_cluster(listeners=(), **options):
    """Every instance is up; at the end nothing of them is left in Ray, which goes on."""
    config = ServeConfig(cluster="ray", **{"instances": 2} | options)
    with RayCluster(config) as on_ray:
        folder = model_folder(on_ray.config.model)
        loaded, host = load_model(folder, "meta"), on_ray.transport
        async with running_cluster(on_ray.config, listeners, loaded, host=host) as cluster:
            await all_up(cluster)
            yield cluster
    assert ray.is_initialized()
    assert not [name for name in list_named_actors() if name.startswith("stepserve")]
    groups = placement_group_table().values()
    assert all(group["state"] == "REMOVED" for group in groups)
    while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
        await asyncio.sleep(0.01)
    while lost_rings():
        await asyncio.sleep(0.01)


def lost_rings():
    """Shared memory of keys and values whose process is gone."""
    rings = [path.name for path in Path("/dev/shm").glob("stepserve-*")]
    return [name for name in rings if not lives(name.split("-")[1])]


async def all_up(cluster):
    while len(cluster.loop.status().instances) < len(cluster.specs):
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

"""A live cluster on the Ray cluster that this process is connected to."""

import asyncio
import contextlib
import os

import ray
from ray.util import list_named_actors, placement_group_table

from stepserve.core.config import ServeConfig
from stepserve.live import families
from stepserve.live.transport_ray import RayCluster
from support.live_cluster import running_cluster


@contextlib.asynccontextmanager
async def ray_cluster(listeners=(), **options):
    """Every instance is up; at the end nothing of them is left in Ray, which goes on."""
    config = ServeConfig(cluster="ray", **{"instances": 2} | options)
    with RayCluster(config) as on_ray:
        loaded, host = families.describe(on_ray.config), on_ray.transport
        async with running_cluster(on_ray.config, listeners, loaded, host=host) as cluster:
            await all_up(cluster)
            yield cluster
    assert ray.is_initialized()
    assert not [name for name in list_named_actors() if name.startswith("stepserve")]
    groups = placement_group_table().values()
    assert all(group["state"] == "REMOVED" for group in groups)
    while ray.available_resources().get("CPU") != 2.0:
        await asyncio.sleep(0.01)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("stepserve")]


async def all_up(cluster):
    while len(cluster.loop.scheduler.ledger.instances) < len(cluster.specs):
        await asyncio.sleep(0.01)

"""Instances on several Ray nodes, all of them on this machine."""

import asyncio

import pytest
import ray
from ray.cluster_utils import Cluster

from stepserve.core.config import ServeConfig
from stepserve.core.events import ChunkLanded
from stepserve.engine.hub import BUNDLED
from stepserve.engine.loader import load_model
from stepserve.families.profiles import BATCH_PROFILE
from support.ar_models import write_checkpoint
from support.live_cluster import quick_profile, running_cluster
from support.on_ray import ray_cluster, serve_all
from support.split_requests import CutAt, answer, at_rest

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore:.*:FutureWarning")


@pytest.fixture
def two_nodes():
    """With one CPU each. What is given kills the second."""
    node = {"num_cpus": 1, "object_store_memory": 100 << 20}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_worker_niceness", "0")
        cluster = Cluster(True, head_node_args={**node, "include_dashboard": False})
        second = cluster.add_node(**node)
        ray.init(address=cluster.address)
        yield lambda: cluster.remove_node(second, allow_graceful=False)
        ray.shutdown()
        cluster.shutdown()


async def test_split_requests_travel_between_nodes(two_nodes, tmp_path):
    """And so do their keys and values: over TCP, as there is no memory that both nodes see."""
    loaded = load_model(write_checkpoint(tmp_path))
    quick_profile(loaded).save(tmp_path / BATCH_PROFILE)
    options = {"model": str(tmp_path), "threads_per_instance": 1, "kv_pages": 200}
    cuts, long_cuts = ("r:3", "r:12", "r:20"), ("l:150", "l:420")
    long = {"prompt": 400, "output": 60, "seed": 9}
    async with running_cluster(ServeConfig(instances=2, **options), loaded=loaded) as cluster:
        cluster.loop.supervisor.scheduler._placement = CutAt()
        whole = (await answer(cluster, "whole")).tokens
        long_whole = (await answer(cluster, "l", **long)).tokens
    landed = set()

    def note(handled):
        if isinstance(handled.event, ChunkLanded) and handled.event.intact:
            landed.add(handled.event.request_id)

    async with ray_cluster([note], **options) as cluster:
        cluster.loop.supervisor.scheduler._placement = CutAt()
        for name in cuts:
            assert (await answer(cluster, name)).tokens == whole, name
        for name in long_cuts:
            assert (await answer(cluster, name, **long)).tokens == long_whole, name
        assert landed == {*cuts, *long_cuts}
        assert cluster.loop.losses == 0
        await at_rest(cluster)


async def test_requests_go_on_where_a_node_is_left(two_nodes):
    options = {"instances": 2, "threads_per_instance": 1}
    config = ServeConfig(**options)
    async with running_cluster(config, loaded=load_model(BUNDLED)) as cluster:
        expected = await serve_all(cluster, 6)
    begun = asyncio.Event()
    async with ray_cluster(**options) as cluster:
        answers = asyncio.ensure_future(serve_all(cluster, 6, lambda _: begun.set()))
        await begun.wait()
        await asyncio.to_thread(two_nodes)
        assert await answers == expected
        while not cluster.loop.losses:
            await asyncio.sleep(0.01)
        assert await serve_all(cluster, 2) == expected[:2]
        states = [i["state"] for i in cluster.operator.state()["instances"]]
        assert sorted(states) == ["starting", "up"], "there is no room for the other"

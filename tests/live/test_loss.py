"""Loss of an instance: accepted requests go on elsewhere and end as if nothing had happened."""

import asyncio

import pytest

from stepserve.core.ids import InstanceId
from stepserve.core.protocols import RequestEnded
from stepserve.core.request import CacheMode, FinishReason
from support.live_cluster import (
    assert_at_rest,
    collect,
    make_live_request,
    running_cluster,
    tiny_model,
)

VICTIM = InstanceId("instance-0")


async def serve_all(cluster, count, cache, on_tokens=None):
    jobs = [
        collect(
            cluster.frontend, *make_live_request(cluster.frontend, str(i), cache=cache), on_tokens
        )
        for i in range(count)
    ]
    return await asyncio.gather(*jobs)


@pytest.mark.parametrize("cache", list(CacheMode))
async def test_every_request_survives_a_kill_under_load(cache):
    """Without a cache the text equals an undisturbed run's; no step is counted twice."""
    loaded = tiny_model()
    async with running_cluster(loaded=loaded) as cluster:
        undisturbed = await serve_all(cluster, 12, cache)

    async with running_cluster(loaded=loaded) as cluster:
        killed = []

        def kill_once(request):
            """In the middle of everything: when the first request that the victim holds emits."""
            if not killed and request.id in cluster.loop.scheduler.ledger.instances[VICTIM].placed:
                killed.append(request.id)
                cluster.transport.kill(VICTIM)

        disturbed = await serve_all(cluster, 12, cache, kill_once)
        assert killed
        assert all(c.end.reason is FinishReason.LENGTH for c in disturbed)
        assert all(len(c.tokens) == 24 for c in disturbed)
        moved = [c for c in disturbed if c.end.report.migrations]
        assert moved, "the victim held requests"
        if cache is CacheMode.NONE:
            assert [c.tokens for c in disturbed] == [c.tokens for c in undisturbed]
            forwards = [c.end.report.forwards for c in undisturbed]
            assert [c.end.report.forwards for c in disturbed] == forwards
        while len(cluster.loop.scheduler.ledger.instances) < 2:
            await asyncio.sleep(0)  # the victim is rebuilt
        assert_at_rest(cluster)
        again = await serve_all(cluster, 4, cache)
        assert all(isinstance(c.end, RequestEnded) for c in again)


async def test_requests_outlive_the_loss_of_the_whole_cluster():
    async with running_cluster() as cluster:

        def kill_both(request):
            for instance in list(cluster.loop.scheduler.ledger.instances):
                if instance not in killed:
                    killed.add(instance)
                    cluster.transport.kill(instance)

        killed = set()
        results = await serve_all(cluster, 6, CacheMode.NONE, kill_both)
        assert len(killed) == 2
        assert all(len(c.tokens) == 24 for c in results)
        assert_at_rest(cluster)

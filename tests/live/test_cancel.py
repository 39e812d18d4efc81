"""A client that leaves stops the work within one step, and leaks nothing."""

import asyncio
from contextlib import aclosing

from stepserve.core.config import ServeConfig
from stepserve.core.events import BatchDone, SegmentReleased
from stepserve.core.frontend import TokensEmitted
from stepserve.core.request import SLO, CacheMode, FinishReason, OnMiss
from stepserve.live.recording import Recorder
from support.live_cluster import assert_at_rest, collect, make_live_request, running_cluster


async def at_rest(cluster):
    while cluster.loop.records:
        await asyncio.sleep(0)
    assert_at_rest(cluster)


async def leave_after_first_text(cluster, name, cache):
    request, payload = make_live_request(cluster.frontend, name, output=64, cache=cache)
    async with aclosing(cluster.frontend.submit(request, payload)) as updates:
        async for update in updates:
            if isinstance(update, TokensEmitted):
                return


async def test_a_disconnect_ends_the_work_within_one_step():
    recorder = Recorder()
    config = ServeConfig(instances=1, threads_per_instance=1, kv_pages=64)
    async with running_cluster(config, [recorder.note]) as cluster:
        await leave_after_first_text(cluster, "1", CacheMode.NONE)
        await at_rest(cluster)
    entries = recorder.entries["node0-gpu0", 0]
    released = next(i for i, e in enumerate(entries) if isinstance(e.event, SegmentReleased))
    assert sum(isinstance(e.event, BatchDone) for e in entries[released:]) <= 1


async def test_many_disconnects_leak_nothing():
    async with running_cluster() as cluster:
        jobs = [leave_after_first_text(cluster, str(i), list(CacheMode)[i % 3]) for i in range(60)]
        await asyncio.gather(*jobs)
        await at_rest(cluster)


async def test_cancel_gives_the_iterator_a_proper_end():
    async with running_cluster() as cluster:

        def stop(request):
            cluster.frontend.cancel(request.id, FinishReason.STOP)

        request, payload = make_live_request(cluster.frontend, "1", output=64)
        collected = await collect(cluster.frontend, request, payload, stop)
        assert collected.end.reason is FinishReason.STOP
        assert len(collected.tokens) < 64
        cluster.frontend.cancel(request.id, FinishReason.STOP)  # too late: ignored
        await at_rest(cluster)


async def test_a_hopeless_deadline_is_rejected_before_any_work():
    async with running_cluster() as cluster:
        slo = SLO(e2e_s=1e-6, on_miss=OnMiss.REJECT)
        request, payload = make_live_request(cluster.frontend, "1", slo=slo)
        collected = await collect(cluster.frontend, request, payload)
        assert collected.end.retry_after_s is None, "asking again cannot help"
        assert not collected.tokens
        assert_at_rest(cluster)

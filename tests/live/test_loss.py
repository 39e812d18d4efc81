"""Loss of an instance: accepted requests go on elsewhere and end as if nothing had happened."""

import asyncio
import random

import pytest

from stepserve.core.config import ServeConfig
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.payload import Payload
from stepserve.core.request import (
    CacheMode,
    DiffusionOptions,
    Family,
    FinishReason,
    Request,
    ThresholdBounds,
)
from stepserve.engine.bundled.tasks import sample
from stepserve.engine.hub import BUNDLED
from stepserve.engine.loader import load_model
from stepserve.gateway.tokenizer import TextTokenizer
from support.live_cluster import (
    assert_at_rest,
    collect,
    make_live_request,
    running_cluster,
    tiny_model,
)

VICTIM = InstanceId("node0-gpu0")


async def serve_all(cluster, count, cache, on_tokens=None):
    jobs = [
        collect(
            cluster.frontend, *make_live_request(cluster.frontend, str(i), cache=cache), on_tokens
        )
        for i in range(count)
    ]
    return await asyncio.gather(*jobs)


def kill_when_it_emits(cluster):
    """Kills the victim once, in the middle of everything: when a request that it holds emits."""
    killed = []

    def watch(request):
        rows = {i.spec.id: i.running for i in cluster.loop.status().instances}
        running = rows.get(VICTIM, ())
        if not killed and request.id in running:
            killed.extend(running)
            cluster.transport.kill(VICTIM)

    watch.killed = killed
    return watch


@pytest.mark.parametrize("cache", list(CacheMode))
async def test_every_request_survives_a_kill_under_load(cache):
    """Where all is exact the text equals an undisturbed run's; no step is counted twice."""
    loaded = tiny_model(attention_block=8 if cache is CacheMode.BLOCK else None)
    async with running_cluster(loaded=loaded) as cluster:
        undisturbed = await serve_all(cluster, 12, cache)

    async with running_cluster(loaded=loaded) as cluster:
        watch = kill_when_it_emits(cluster)
        disturbed = await serve_all(cluster, 12, cache, watch)
        assert all(c.end.reason is FinishReason.LENGTH for c in disturbed)
        assert all(len(c.tokens) == 24 for c in disturbed)
        assert len(watch.killed) > 1, "the victim held requests"
        if cache.exact:
            assert [c.tokens for c in disturbed] == [c.tokens for c in undisturbed]
            forwards = [c.end.report.forwards for c in undisturbed]
            assert [c.end.report.forwards for c in disturbed] == forwards
        while len(cluster.loop.status().instances) < 2:
            await asyncio.sleep(0)  # the victim is rebuilt
        assert_at_rest(cluster)
        again = await serve_all(cluster, 4, cache)
        assert all(c.end.reason is FinishReason.LENGTH for c in again)


async def test_texts_of_the_bundled_model_survive_a_kill():
    """As above with real answers: 24 problems, a threshold of 0.9, no cache, temperature 0."""
    config = ServeConfig(instances=2, threads_per_instance=1)
    loaded = load_model(BUNDLED)
    tokenizer = TextTokenizer.from_folder(BUNDLED)
    rng = random.Random("loss")
    prompts = [tokenizer.completion_ids(sample(rng, evaluation=True).prompt) for _ in range(24)]

    async def serve(cluster, on_tokens=None):
        jobs = []
        for index, ids in enumerate(prompts):
            options = DiffusionOptions(
                ThresholdBounds(0.9, 0.9), loaded.default_block_length, CacheMode.NONE
            )
            request = Request(
                id=RequestId(str(index)),
                family=Family.DIFFUSION,
                model=loaded.name,
                prompt_tokens=len(ids),
                max_output_tokens=loaded.default_max_tokens,
                arrival_s=cluster.frontend.now_s(),
                diffusion=options,
            )
            jobs.append(collect(cluster.frontend, request, Payload(ids), on_tokens))
        return await asyncio.gather(*jobs)

    async with running_cluster(config, loaded=loaded) as cluster:
        undisturbed = await serve(cluster)
    async with running_cluster(config, loaded=loaded) as cluster:
        watch = kill_when_it_emits(cluster)
        disturbed = await serve(cluster, watch)
    assert watch.killed
    assert [c.tokens for c in disturbed] == [c.tokens for c in undisturbed]
    assert all(c.end.reason is FinishReason.STOP for c in disturbed)


async def test_requests_outlive_the_loss_of_the_whole_cluster():
    async with running_cluster() as cluster:

        def kill_both(request):
            for instance in [i.spec.id for i in cluster.loop.status().instances]:
                if instance not in killed:
                    killed.add(instance)
                    cluster.transport.kill(instance)

        killed = set()
        results = await serve_all(cluster, 6, CacheMode.NONE, kill_both)
        assert len(killed) == 2
        assert all(len(c.tokens) == 24 for c in results)
        assert_at_rest(cluster)

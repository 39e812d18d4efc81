"""Kills, cancels, drains and changes of the layout under load: every request is accounted for."""

import asyncio

import pytest

from stepserve.core.request import Family
from stepserve.engine.loader import load_model
from support.causal_models import write_checkpoint
from support.chaos import Chaos, chaos_config
from support.live_cluster import assert_at_rest, running_cluster, tiny_checkpoint
from support.step_profiles import write_step_profiles


@pytest.mark.parametrize("family", list(Family))
async def test_no_request_is_lost_wrong_or_left_behind(family, tmp_path):
    if family is Family.DIFFUSION:
        folder = tiny_checkpoint(tmp_path)
        write_step_profiles(tmp_path, (1, 2))
    else:
        folder = write_checkpoint(tmp_path)
    loaded = load_model(folder)
    async with running_cluster(chaos_config(family, tmp_path), loaded=loaded) as cluster:
        chaos = Chaos(cluster, family)
        await chaos.learn()

        async def somebody_runs():
            while not any(i.placed for i in cluster.loop.scheduler.ledger.instances.values()):
                await asyncio.sleep(0)

        counts = await chaos.run(120, somebody_runs, lambda: asyncio.sleep(0), each=6)
        assert not chaos.wrong
        assert not counts["hangs"]
        assert counts["asked"] == 120
        ends = ("whole", "cancelled", "failed", "refused")
        assert sum(counts[end] for end in ends) == 120
        assert counts["whole"] > 90
        assert counts["failed"] <= 2, "only what was lost again and again"
        assert counts["kill"] > 3
        while cluster.loop.scheduler.reconfiguration.under_way:
            await asyncio.sleep(0)
        assert_at_rest(cluster)

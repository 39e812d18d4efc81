"""Kills, cancels, drains and changes of the layout under load: every request is accounted for."""

import asyncio

import pytest

from stepserve.core.request import Family
from support.chaos import chaos_cluster


@pytest.mark.parametrize("layout", ["1,1,1", "2,1"])
@pytest.mark.parametrize("family", list(Family))
async def test_no_request_is_lost_wrong_or_left_behind(family, layout):
    async with chaos_cluster(family, layout) as chaos:

        async def somebody_runs():
            while not chaos.cluster.frontend.running():
                await asyncio.sleep(0)

        counts = await chaos.run(
            lambda asked: asked < 120, somebody_runs, lambda: asyncio.sleep(0), each=6
        )
        assert not chaos.wrong
        assert not counts["hangs"]
        assert counts["asked"] == 120
        ends = ("whole", "cancelled", "failed", "refused")
        assert sum(counts[end] for end in ends) == 120
        assert counts["whole"] > 90
        assert counts["failed"] <= 2, "only what was lost again and again"
        assert counts["kill"] > 1
        assert counts["restart"] > 1

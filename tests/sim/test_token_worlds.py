"""Causal requests end to end in simulated clusters, whole and in pieces."""

import pytest

from stepserve.core.step import Mix
from support.toy_tokens import (
    LinearCost,
    TokenWorld,
    make_token_request,
    run_token_world,
    token_config,
    whole,
)
from support.toy_world import make_spec


@pytest.mark.parametrize("seed", range(10))
def test_requests_in_one_piece_are_served_whole(seed):
    world = run_token_world(seed, share=0.0, cancel_share=0.0)
    for record in world.records:
        truth = world.truths[record.request.id]
        if whole(record):
            assert truth.executed == truth.prompt_tokens + truth.output_tokens - 1
        assert not record.handovers
    assert sum(map(whole, world.records)) >= len(world.records) / 3


def test_a_request_alone_takes_the_time_of_its_batches():
    world = TokenWorld(0, config=token_config(), specs=[make_spec()], jitter_s=0.0)
    world.arrive(make_token_request(prompt=100, output=3, arrival_s=1.0), 3)
    world.run()
    (record,) = world.records
    seconds = LinearCost().step_time_s
    prefill_s = seconds(100, 1, None, Mix(100, 5050))
    decodes_s = [seconds(1, 1, None, Mix(0, 0, 1, context)) for context in (101, 102)]
    assert list(record.gaps_s()) == pytest.approx(decodes_s)
    messages_s = 0.0005 + 2 * 0.0001  # a forecast, and the way there
    assert record.ttft_s == pytest.approx(prefill_s + messages_s, abs=0.0002)

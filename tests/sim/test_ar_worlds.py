"""Autoregressive requests end to end in simulated clusters, whole and in pieces."""

from collections import Counter
from dataclasses import replace

import pytest

from stepserve.core.events import ChunkLanded, HandedOff
from stepserve.core.ids import InstanceId
from stepserve.core.protocols import Placement
from stepserve.core.segment import Segment
from stepserve.core.step import Mix
from stepserve.sim.links import Links
from support.toy_ar import (
    LinearCost,
    RandomCuts,
    TokenWorld,
    make_global,
    make_local,
    make_token_request,
    random_token_config,
    random_token_faults,
    run_token_world,
    token_config,
    whole,
)
from support.toy_world import make_spec


@pytest.mark.parametrize("seed", range(10))
def test_requests_in_one_piece_are_served_whole(seed):
    config = replace(random_token_config(seed), planner=None)
    world = run_token_world(seed, config, share=0.0, cancel_share=0.0)
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


class CutAt:
    """Everything is cut at one token and goes on at ``b``; it begins at ``a`` if not told else."""

    def __init__(self, cut, sources):
        self.cut, self.sources = cut, sources

    def place(self, request, progress, forecast, view):
        first = InstanceId(self.sources.get(request.id, "a"))
        alpha = Segment(request.id, 0, 0, self.cut, first, 0)
        return Placement((alpha, Segment(request.id, 1, self.cut, None, InstanceId("b"), 0)))


def split(cut, *requests, tokens=None, sources=None, **options):
    """A world where requests are cut, with nothing else in the way."""
    specs = [make_spec(name, 256, 8) for name in "abc"]
    options = {"specs": specs, "placement": CutAt(cut, sources or {}), "jitter_s": 0.0, **options}
    world = TokenWorld(0, config=token_config(**(tokens or {})), **options)
    for request in requests:
        world.arrive(request, request.max_output_tokens)
    world.run()
    world.check_rest()
    return world


@pytest.mark.parametrize("cut", range(1, 25))
def test_a_request_may_be_cut_at_any_token(cut):
    world = split(cut, make_token_request(prompt=12, output=10))
    (record,) = world.records
    truth = world.truths[record.request.id]
    assert truth.executed == 21, "every input once; the last token is none"
    assert record.tokens == 10
    assert [h.tokens for h in record.handovers] == ([max(0, cut - 11)] if cut < 21 else [])
    assert world.transfers.tokens >= (cut if cut < 21 else 0)
    if cut < 21:
        assert world.transfers.tokens == cut


def exposed_s(cut, *requests, **options):
    return [r.handovers[0].exposed_s for r in split(cut, *requests, **options).records]


def test_serial_transfers_are_waited_for_and_chunks_are_not_but_for_the_last():
    """400 tokens at 1 ms each; a chunk of 128 takes longer to send than to compute."""
    links, one = {"links": Links(1e6, 0.0)}, make_token_request(prompt=400, output=8)
    serial = exposed_s(400, one, tokens={"push_pages": 0, "chunk_tokens": 128}, **links)
    assert serial == [pytest.approx(0.4, abs=1e-6)]
    fast = {"links": Links(5e8, 0.0)}
    serial = exposed_s(400, one, tokens={"push_pages": 0, "chunk_tokens": 128}, **fast)
    chunks = exposed_s(400, one, tokens={"push_pages": 8, "chunk_tokens": 128}, **fast)
    assert serial == [pytest.approx(400 / 5e5)]
    assert chunks == [pytest.approx(16 / 5e5, abs=1e-4)], "the message takes 0.1 ms"


def test_the_gap_of_a_hand_over_is_its_exposed_transfer_and_a_step():
    links = Links(1e6, 0.0)
    one = make_token_request(prompt=50, output=20)
    (record,) = split(60, one, tokens={"push_pages": 0}, links=links).records
    (gap_s,) = record.handover_gaps_s()
    assert gap_s == pytest.approx(0.060 + LinearCost().step_time_s(1, 1, None, Mix(0, 0, 1, 61)))
    assert sum(gap > 0.01 for gap in record.gaps_s()) == 1


@pytest.mark.parametrize("sources", ["aa", "ac"])
def test_two_hand_overs_to_one_instance_share_its_card(sources):
    """From one instance they queue, and the first is through as if alone; from two they share."""
    requests = [make_token_request(f"r{n}", prompt=100, output=8) for n in range(2)]
    names = dict(zip(("r0", "r1"), sources, strict=True))
    options = {"tokens": {"push_pages": 0}, "sources": names}
    alone = exposed_s(100, requests[0], links=Links(1e6, 0.0), **options)
    together = exposed_s(100, *requests, links=Links(1e6, 0.0), **options)
    assert alone == [pytest.approx(0.1)]
    expected = (0.1, 0.2) if sources == "aa" else (0.2, 0.2)
    assert together == pytest.approx(expected, abs=0.005), "computed at most 4 ms apart"


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_lost_and_nothing_is_left(seed):
    """Cuts anywhere, losses, cancellations, early ends, damaged and late chunks and messages."""
    run_token_world(seed, **random_token_faults(seed))


@pytest.mark.parametrize("seed", range(10))
def test_every_input_is_executed_once_where_nothing_goes_wrong(seed):
    config = replace(random_token_config(seed), planner=None)
    world = run_token_world(seed, config, cancel_share=0.0, sigma_tokens=20.0, jitter_s=0.0)
    assert sum(bool(r.handovers) for r in world.records) >= 5
    assert not world.transfers.stalled
    for record in filter(whole, world.records):
        truth = world.truths[record.request.id]
        assert truth.executed == truth.prompt_tokens + truth.output_tokens - 1


def test_these_worlds_do_what_they_are_for():
    """Guards the tests above: worlds where nothing happens would make them vacuous."""
    seen, events, records, losses, stalled = Counter(), Counter(), [], 0, 0
    for seed in range(40):
        local = []
        world = run_token_world(
            seed, on_handled=lambda *call, to=local: to.append(call), **random_token_faults(seed)
        )
        records += world.records
        losses += world.world.losses
        stalled += world.transfers.stalled
        for _, _, _, event, actions in local:
            events[type(event).__name__] += 1
            seen.update(type(action).__name__ for action in actions)
            if isinstance(event, ChunkLanded) and not event.intact:
                seen["damaged"] += 1
            if isinstance(event, HandedOff) and not event.wait:
                seen["handed off for a lost one"] += 1
    assert losses >= 20
    assert sum(len(r.handovers) for r in records) >= 200
    cuts = [(h.tokens, r) for r in records for h in r.handovers]
    assert sum(tokens == 0 for tokens, _ in cuts) >= 50, "in the prompt"
    assert sum(tokens > 1 for tokens, _ in cuts) >= 50, "in the output"
    assert seen["damaged"] >= 10
    assert seen["PushChunk"] >= 300
    assert seen["handed off for a lost one"] >= 3
    assert stalled >= events["HandoverStalled"] >= 3
    assert events["SegmentExtended"] >= 3
    assert events["TimerExpired"] >= 10


@pytest.mark.parametrize("seed", [3, 8])
def test_a_run_repeats_itself_and_fresh_schedulers_repeat_every_action(seed):
    faults, calls = random_token_faults(seed), []
    world = run_token_world(seed, on_handled=lambda *call: calls.append(call), **faults)
    assert run_token_world(seed, **faults).log == world.log
    fresh = {}
    for spec, incarnation, now_s, event, actions in calls:
        name = (spec and spec.id, incarnation)
        if name not in fresh:
            if spec is None:
                fresh[name] = make_global(world.config, RandomCuts(seed))
            else:
                fresh[name] = make_local(world.config, spec)
        assert fresh[name].handle(now_s, event) == actions


def test_a_successor_that_is_ready_early_is_not_forgotten():
    """Its message may overtake the segment that it is about: nothing stalls for that."""
    for seed in range(4):
        config = replace(random_token_config(seed), planner=None)
        world = run_token_world(seed, config, cancel_share=0.0)
        assert world.transfers.chunks
        assert not world.transfers.stalled

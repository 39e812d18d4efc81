"""Instances behind connections that mix messages up: nobody notices, whatever the family."""

import asyncio
import contextlib
import os
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from stepserve.core.config import ServeConfig
from stepserve.core.request import CacheMode, FinishReason
from stepserve.engine import torch_engine
from stepserve.engine.ar_executor import AutoregressiveExecutor
from stepserve.engine.loader import load_model
from stepserve.families import profiles
from stepserve.live import wire
from stepserve.live.predictor import SharedPredictor
from stepserve.live.replay import replay
from support.ar_models import write_checkpoint
from support.live_cluster import (
    assert_at_rest,
    collect,
    make_live_request,
    quick_profile,
    running_cluster,
    tiny_model,
)
from support.remote_cluster import threads
from support.split_requests import CutAt, answer, at_rest

OPTIONS = {"instances": 2, "threads_per_instance": 1, "kv_pages": 64, "max_running_requests": 8}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Beats bring on what a carrier holds back."""
    monkeypatch.setattr(wire, "BEAT_S", 0.005)
    monkeypatch.setattr(wire, "LOOK_S", 0.005)


@contextlib.asynccontextmanager
async def remote_cluster(monkeypatch, loaded, host, **options):
    """With both instances up. What they load is ``loaded``."""
    monkeypatch.setattr(torch_engine, "load_model", lambda *_: loaded)
    before = set(os.listdir("/dev/shm"))
    config = ServeConfig(**OPTIONS | options)
    async with running_cluster(config, loaded=loaded, host=host) as cluster:
        await both_up(cluster)
        yield cluster
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "stepserve" in name}


async def both_up(cluster):
    while len(cluster.loop.status().instances) < 2:
        await asyncio.sleep(0.001)


async def serve_all(cluster, count, on_tokens=None):
    made = [make_live_request(cluster.frontend, str(i), cache=CacheMode.NONE) for i in range(count)]
    jobs = (collect(cluster.frontend, *asked, on_tokens) for asked in made)
    return await asyncio.gather(*jobs)


def tokens(answers):
    return [answer.tokens for answer in answers]


async def test_answers_are_those_of_instances_in_this_process(monkeypatch, tmp_path):
    """And what they did is in the event log, for replay, and has been counted and learnt from."""
    loaded, events, learned = tiny_model(), tmp_path / "events.jsonl", []
    async with running_cluster(loaded=loaded) as cluster:
        expected = await serve_all(cluster, 8)
    monkeypatch.setattr(SharedPredictor, "learn", lambda _, *step: learned.append(step))
    async with remote_cluster(monkeypatch, loaded, threads(), events=str(events)) as cluster:
        answers = await serve_all(cluster, 8)
        assert tokens(answers) == tokens(expected)
        assert cluster.loop.losses == 0
        assert_at_rest(cluster)
        addresses = cluster.transport._addresses.values()
        assert [address.tcp for address in addresses] == ["", ""], "nothing is handed over"
        reading = cluster.control_reading()
    assert reading.scheduler_events["local"] > 8
    assert len(learned) == sum(answer.end.report.forwards for answer in answers)
    found = replay(Path(events))
    assert found.difference is None
    assert found.schedulers == 3


async def test_an_instance_that_vanishes_is_replaced(monkeypatch):
    loaded, killed = tiny_model(), []
    async with running_cluster(loaded=loaded) as cluster:
        expected = await serve_all(cluster, 8)
    async with remote_cluster(monkeypatch, loaded, threads()) as cluster:

        def kill(request):
            first = min(cluster.loop.status().instances, key=lambda i: i.spec.id)
            if not killed and request.id in first.running:
                killed.append(first.spec.id)
                cluster.transport.kill(first.spec.id)

        assert tokens(await serve_all(cluster, 8, kill)) == tokens(expected)
        assert killed
        await both_up(cluster)
        assert cluster.loop.losses == 1
        assert_at_rest(cluster)


async def test_a_lost_message_is_a_lost_instance(monkeypatch):
    """The first incarnation misses one in the middle."""
    loaded = tiny_model()
    async with running_cluster(loaded=loaded) as cluster:
        expected = await serve_all(cluster, 8)
    host = threads(lost=[6])
    async with remote_cluster(monkeypatch, loaded, host, hang_s=0.5) as cluster:
        while not cluster.loop.losses:
            await asyncio.sleep(0.001)
        assert tokens(await serve_all(cluster, 8)) == tokens(expected)


class WatchedExecutor(AutoregressiveExecutor):
    """Compares checksums of what it was sent with those of what it holds then."""

    copies: ClassVar[list] = []

    def import_kv(self, chunk):
        good = super().import_kv(chunk)
        if good:
            held = self.export_kv(chunk.request_id, chunk.epoch, chunk.start, chunk.stop)
            self.copies.append((chunk.checksums, held.checksums))
        return good


@pytest.mark.parametrize("apart", [False, True], ids=["shared memory", "tcp"])
async def test_requests_are_handed_over_between_processes(monkeypatch, tmp_path, apart):
    torch.manual_seed(0)
    loaded = load_model(write_checkpoint(tmp_path))
    profile = quick_profile(loaded)
    monkeypatch.setattr(profiles, "_measured", lambda *_: profile)
    monkeypatch.setattr(torch_engine, "AutoregressiveExecutor", WatchedExecutor)
    monkeypatch.setattr(WatchedExecutor, "copies", copies := [])
    host = threads(apart=apart)
    async with remote_cluster(monkeypatch, loaded, host, kv_pages=200) as cluster:
        cluster.loop.supervisor.scheduler._placement = CutAt()
        cuts = [3, 11, 12, 15, 20]
        names = ["whole", *(f"r:{cut}" for cut in cuts), "long:150", "long:420"]
        long = {"prompt": 400, "output": 60, "seed": 9}
        shapes = [long if name.startswith("long") else {} for name in names]
        asked = (answer(cluster, name, **shape) for name, shape in zip(names, shapes, strict=True))
        whole, *parts = await asyncio.gather(*asked)
        long_whole = await answer(cluster, "all", **long)
        for name, part in zip(names[1:], parts, strict=True):
            expected = long_whole if name.startswith("long") else whole
            assert part.tokens == expected.tokens, name
            assert part.end.reason is FinishReason.LENGTH
        assert cluster.control_reading().handovers == len(parts)
        assert len(copies) > len(parts)
        assert all(sent == held for sent, held in copies)
        await at_rest(cluster)

"""Caps, forecasts, migration and changes of the layout, carried out under load and replayed."""

import asyncio
import json
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stepserve.core.config import ServeConfig
from stepserve.core.errors import FieldError
from stepserve.core.events import SegmentPlaced
from stepserve.core.plan import ClusterPlan, Slot
from stepserve.core.request import SLO, FinishReason
from stepserve.engine.loader import load_model
from stepserve.live.deploy import build_cluster
from stepserve.live.event_log import read_events
from stepserve.live.replay import replay
from support.live_cluster import (
    assert_at_rest,
    collect,
    engine_of,
    make_live_request,
    running_cluster,
    tiny_checkpoint,
)
from support.parts import make_control

APART, TOGETHER = (Slot(0, (0,)), Slot(0, (1,))), (Slot(0, (0, 1)),)
LENGTH = 96


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_model(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


def build(config, loaded):
    return build_cluster(config, engine_of(config, loaded))


class Scripted:
    """Wants whatever layout it is told to want."""

    def __init__(self):
        self.wanted = TOGETHER

    def plan(self, problem):
        return ClusterPlan(self.wanted, 0.9, 0.5, "scripted")


class Broken:
    def plan(self, problem):
        raise ArithmeticError("no solution today")


def make_config(folder, **control):
    """Steps are believed to grow steeply with their tokens: a crowded instance looks slow."""
    for name, factor in (("steps.json", 1.0), ("steps_tp2.json", 0.6)):
        sizes = (16, 128, 256, 512, 1024, 2048)
        seconds = [factor * size**2 * 1e-6 for size in sizes]
        table = {"source": "made up", "sizes": sizes, "seconds": seconds}
        (folder / name).write_text(json.dumps(table))
    quick = {"caps_every_s": 0.0, "report_every_s": 0.0, "plan_every_s": 1e-6}
    grid = {"thresholds": (0.9, 0.7, 0.5), "planner": "greedy"}
    return ServeConfig(
        instances=2,
        threads_per_instance=1,
        kv_pages=64,
        max_running_requests=16,
        profile=str(folder / "steps.json"),
        events=str(folder / "events.jsonl.gz"),
        control=make_control(**quick, **(grid | control)),
    )


def submit(cluster, name, on_tokens=None):
    """Even names pin their threshold and have no deadline; odd ones have a hopeless deadline."""
    slo, floor = (SLO(e2e_s=0.05), 0.5) if int(name) % 2 else (SLO(), 0.9)
    asked = make_live_request(cluster.frontend, name, output=LENGTH, slo=slo, floor=floor)
    return asyncio.ensure_future(collect(cluster.frontend, *asked, on_tokens))


def layout(cluster):
    return tuple(sorted(i.spec.slot for i in cluster.loop.status().instances))


async def both_up(cluster):
    while layout(cluster) != APART:
        await asyncio.sleep(0)


def migrated(config):
    """Requests placed with a successor's segment: moved on purpose, not by a drained instance."""
    _, entries = read_events(Path(config.events))
    placed = [e.event.segment for e in entries if isinstance(e.event, SegmentPlaced)]
    return {segment.request_id for segment in placed if segment.index > 0}


async def test_everything_the_control_plane_asks_for_is_carried_out(tmp_path, loaded):
    """Two instances become one with both shares, then two again. Everybody is on the first of
    those when the second comes up, and some go on there. Nobody notices but by the clock."""
    config = make_config(tmp_path)
    first, second = [str(i) for i in range(6)], [str(i) for i in range(6, 9)]
    jobs, caps, planner = {}, [], Scripted()
    async with running_cluster(config, loaded=loaded, planner=planner) as cluster:
        await both_up(cluster)

        def watch(request):
            caps.append(cluster.control_reading().cap_lowest)
            if layout(cluster) == TOGETHER and "7" not in jobs:
                planner.wanted = APART
                jobs.update((name, submit(cluster, name, watch)) for name in second)

        jobs.update((name, submit(cluster, name, watch)) for name in first)
        while len(jobs) < len(first + second) or not all(job.done() for job in jobs.values()):
            await asyncio.sleep(0)
        answers = {name: job.result() for name, job in jobs.items()}
        await both_up(cluster)
        assert_at_rest(cluster)
        reading = cluster.control_reading()

    assert all(answer.end.reason is FinishReason.LENGTH for answer in answers.values())
    assert all(len(answer.tokens) == LENGTH for answer in answers.values())
    assert min(caps) == 0.5
    assert answers["1"].end.report.threshold_mean < 0.9
    assert reading.layout_changes == 2
    assert reading.plans_solved >= 2
    assert reading.instances == {1: 2}
    assert reading.caps_updates > 0
    assert reading.forecasts_refreshed > 0
    moves = sum(answer.end.report.migrations for answer in answers.values())
    assert reading.migrations_asked >= reading.migrations_done == moves > len(first)

    found = replay(Path(config.events))
    assert found.difference is None
    assert found.actions["Stop"] == 3
    assert found.schedulers == 1 + 2 + 1 + 2
    assert migrated(config), "one went on where a step was faster"

    alone = ServeConfig(threads_per_instance=1, instances=1, profile=config.profile)
    async with running_cluster(alone, loaded=loaded) as cluster:
        pinned = [name for name in answers if int(name) % 2 == 0]
        undisturbed = [(await submit(cluster, name)).tokens for name in pinned]
    assert [answers[name].tokens for name in pinned] == undisturbed


async def test_a_planner_that_fails_changes_nothing(tmp_path, loaded):
    config = make_config(tmp_path)
    async with running_cluster(config, loaded=loaded, planner=Broken()) as cluster:
        await both_up(cluster)
        answers = await asyncio.gather(*(submit(cluster, str(i)) for i in range(4)))
        while not cluster.control_reading().plans_solved:
            await asyncio.sleep(0)
        assert layout(cluster) == APART
        assert cluster.control_reading().layout_changes == 0
        assert cluster.frontend.healthy()
    assert all(len(answer.tokens) == LENGTH for answer in answers)


async def test_a_loss_in_the_middle_of_a_change_does_not_stop_it(tmp_path, loaded):
    """The instance dies once it was asked to end and holds nothing."""
    config = make_config(tmp_path)
    async with running_cluster(config, loaded=loaded, planner=Scripted()) as cluster:
        await both_up(cluster)
        stop, killed = cluster.transport.stop, []

        def stop_dead(spec):
            if not killed:
                killed.append(spec.id)
                cluster.transport.kill(spec.id)
            stop(spec)

        cluster.transport.stop = stop_dead
        answers = await asyncio.gather(*(submit(cluster, str(i)) for i in range(4)))
        while layout(cluster) != TOGETHER:
            await asyncio.sleep(0)
        assert killed
        assert_at_rest(cluster)
    assert all(len(answer.tokens) == LENGTH for answer in answers)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tp_degrees": (2,)}, "control.tp_degrees: needs 1"),
        ({"planner": "oracle"}, "control.planner: unknown 'oracle'"),
    ],
)
def test_what_cannot_be_planned_is_refused_at_start(tmp_path, loaded, options, field):
    with pytest.raises(FieldError, match=field):
        build(make_config(tmp_path, **options), loaded)


def test_a_degree_without_a_profile_is_named_with_the_command_that_makes_one(tmp_path, loaded):
    config = make_config(tmp_path)
    (tmp_path / "steps_tp2.json").unlink()
    with pytest.raises(FieldError, match=r"control\.tp_degrees: .* stepserve profile .* --tp 2"):
        build(config, loaded)


def test_an_instance_of_a_degree_is_so_many_processes(tmp_path, loaded):
    cluster = build(make_config(tmp_path), loaded)
    pair = replace(cluster.specs[0], tp_degree=2, slot=TOGETHER[0])
    with ThreadPoolExecutor(1) as thread:
        for spec, workers in ((cluster.specs[0], 0), (pair, 1)):
            instance = thread.submit(cluster.transport.build, spec, 0).result()
            assert thread.submit(torch.get_num_threads).result() == 1
            assert len(multiprocessing.active_children()) == workers
            instance.close()
    assert not multiprocessing.active_children()
    for log in cluster.logs:
        log.close()

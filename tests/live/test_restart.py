"""A new global scheduler in the midst of everything: requests go on, and nobody notices."""

import asyncio

import pytest

from stepserve.control.global_scheduler import GlobalScheduler
from stepserve.core.config import Choice, ControlConfig, ServeConfig
from stepserve.core.events import InstanceReported, RequestArrived, SegmentEnded
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.request import FinishReason
from stepserve.engine.loader import load_model
from stepserve.families.setup import SchedulerSetup
from stepserve.live.loop import FAILURES
from stepserve.live.replay import replay
from stepserve.live.trace import trace_request
from support.ar_models import write_checkpoint
from support.live_cluster import (
    assert_at_rest,
    collect,
    make_live_request,
    quick_profile,
    running_cluster,
)
from support.split_requests import CutAt, answer, at_rest

pytestmark = pytest.mark.timeout(60)
RESTARTS = 7


def serve(cluster, count, on_tokens=None, **options):
    frontend = cluster.frontend
    return [
        asyncio.ensure_future(
            collect(frontend, *make_live_request(frontend, str(i), **options), on_tokens)
        )
        for i in range(count)
    ]


@pytest.fixture
async def undisturbed():
    async with running_cluster() as cluster:
        return [answer.tokens for answer in await asyncio.gather(*serve(cluster, 24))]


async def test_requests_go_on_where_they_are_and_no_step_is_done_twice(undisturbed, tmp_path):
    """More requests than places, so that some wait in the queue."""
    log = tmp_path / "events.jsonl"
    options = {"instances": 2, "threads_per_instance": 1, "kv_pages": 64, "max_running_requests": 8}
    config = ServeConfig(
        **options, events=str(log), control=ControlConfig(migration=Choice("none"))
    )
    async with running_cluster(config) as cluster:
        told = 0

        def restart(_):
            nonlocal told
            told += 1
            if told % 7 == 0 and cluster.loop.supervisor.restarts < RESTARTS:
                cluster.operator.restart_scheduler()

        answers = await asyncio.gather(*serve(cluster, 24, restart))
        assert cluster.operator.state()["scheduler_restarts"] == RESTARTS
        assert cluster.control_reading().scheduler_restarts == RESTARTS
        assert cluster.loop.losses == 0
        assert_at_rest(cluster)
    assert [answer.tokens for answer in answers] == undisturbed
    for report in [one.end.report for one in answers]:
        assert report.forwards == 24, "a step a token at this threshold"
        assert report.migrations == 0
    told = [line for n in range(24) for line in trace_request(log, str(n))]
    assert sum("a new global scheduler finds it on" in line for line in told) >= RESTARTS
    replayed = replay(log)
    assert replayed.difference is None
    assert replayed.schedulers == 2 + 1 + RESTARTS


async def test_an_instance_lost_while_a_scheduler_takes_over(undisturbed):
    async with running_cluster() as cluster:

        def strike(_):
            if not cluster.loop.supervisor.restarts:
                cluster.transport.kill(InstanceId("node0-gpu0"))
                cluster.operator.restart_scheduler()
                assert cluster.loop.status().recovering
                assert cluster.frontend.ready(), "requests are taken meanwhile"

        answers = await asyncio.gather(*serve(cluster, 24, strike))
        reading = cluster.control_reading()
        assert (reading.instance_losses, reading.scheduler_restarts) == (1, 1)
        while len(cluster.loop.status().instances) < 2:
            await asyncio.sleep(0.001)
        assert_at_rest(cluster)
    assert [answer.tokens for answer in answers] == undisturbed


async def test_who_left_before_a_restart_is_gone_after_it():
    async with running_cluster() as cluster:
        left = []

        def leave(request):
            if not left:
                left.append(request.id)
                cluster.frontend.cancel(request.id, FinishReason.CANCELLED)
                cluster.operator.restart_scheduler()

        answers = await asyncio.gather(*serve(cluster, 12, leave, output=64))
        await at_rest(cluster)
    reasons = [answer.end.reason for answer in answers]
    assert reasons.count(FinishReason.CANCELLED) == 1
    assert reasons.count(FinishReason.LENGTH) == 11


def failing_on(monkeypatch, is_bad):
    """A scheduler with a mistake."""
    handle = GlobalScheduler.handle

    def mistaken(self, now_s, event):
        if is_bad(event):
            raise ZeroDivisionError("a mistake")
        return handle(self, now_s, event)

    monkeypatch.setattr(GlobalScheduler, "handle", mistaken)


@pytest.mark.parametrize("kind", [RequestArrived, SegmentEnded])
async def test_a_request_that_the_scheduler_fails_on_harms_no_other(kind, monkeypatch):
    def is_bad(event):
        about = getattr(event, "request", None) or getattr(event, "segment", None)
        name = getattr(about, "id", None) or getattr(about, "request_id", None)
        return isinstance(event, kind) and name == "5"

    failing_on(monkeypatch, is_bad)
    async with running_cluster() as cluster:
        answers = await asyncio.gather(*serve(cluster, 12))
        assert cluster.loop.supervisor.restarts == 1
        assert cluster.frontend.healthy()
        await at_rest(cluster)
    failed = answers.pop(5).end
    assert failed.reason is FinishReason.ERROR
    assert failed.error == "the scheduler failed on this request"
    assert all(answer.end.reason is FinishReason.LENGTH for answer in answers)


async def test_a_scheduler_that_always_fails_is_reported_as_broken(monkeypatch):
    async with running_cluster() as cluster:
        failing_on(monkeypatch, lambda event: isinstance(event, InstanceReported))
        jobs = serve(cluster, 2)
        while cluster.frontend.healthy():
            await asyncio.sleep(0.001)
        assert cluster.loop.supervisor.restarts == FAILURES
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    return load_model(write_checkpoint(tmp_path_factory.mktemp("causal")))


@pytest.fixture(scope="module")
def profile(causal, tmp_path_factory):
    path = tmp_path_factory.mktemp("profile") / "batches.json"
    quick_profile(causal).save(path)
    return str(path)


@pytest.mark.parametrize("moment", range(4))
async def test_hand_overs_go_on(moment, causal, profile, monkeypatch):
    """Before, in the middle of, and after the hand-over."""
    new_global = SchedulerSetup.new_global

    def cutting(setup):
        scheduler = new_global(setup)
        scheduler._placement = CutAt()
        return scheduler

    monkeypatch.setattr(SchedulerSetup, "new_global", cutting)
    config = ServeConfig(
        instances=2,
        threads_per_instance=1,
        kv_pages=200,
        profile=profile,
        control=ControlConfig(report_every_s=0.0),
    )
    async with running_cluster(config, loaded=causal) as cluster:
        whole = (await answer(cluster, "whole", output=40)).tokens

        def restart(request):
            told[request.id] = told.get(request.id, 0) + 1
            if told[request.id] == 4 + 6 * moment and cluster.loop.supervisor.restarts < RESTARTS:
                cluster.loop.restart()

        told: dict[RequestId, int] = {}
        jobs = [answer(cluster, f"r{n}:{n}", output=40, on_tokens=restart) for n in range(4, 50, 9)]
        answers = await asyncio.gather(*jobs)
        assert cluster.loop.supervisor.restarts
        assert cluster.counters.handovers >= len(jobs) / 2
        await at_rest(cluster)
    assert [answer.tokens for answer in answers] == [whole] * len(jobs)

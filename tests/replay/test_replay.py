"""A recorded live run, replayed into fresh schedulers, reproduces every action."""

import asyncio
import typing

from stepserve.control.assemble import assemble_global, assemble_local
from stepserve.core.actions import RunBatch
from stepserve.core.config import ServeConfig
from stepserve.core.events import Event
from stepserve.core.request import SLO, CacheMode, FinishReason
from stepserve.cost.step_table import StepTable
from stepserve.live.deploy import step_profile
from stepserve.live.recording import Recorder
from support.live_cluster import collect, make_live_request, running_cluster

CONFIG = ServeConfig(instances=2, threads_per_instance=1, kv_pages=64, max_residents=4)


async def record_a_run(recorder):
    """Deadlines, a cancellation and the loss of an instance: every kind of event occurs."""
    async with running_cluster(CONFIG, recorder) as cluster:
        ledger = cluster.loop.scheduler.ledger
        cancelled_on, lost = [], []

        def disturb(request):
            """Cancel the fourth request when it emits; later lose the instance it was not on."""
            segment = ledger.requests[request.id].segment if request.id in ledger.requests else None
            if request.id == "3" and not cancelled_on:
                cancelled_on.append(segment.instance)
                cluster.frontend.cancel(request.id, FinishReason.CANCELLED)
            elif cancelled_on and not lost and segment and segment.instance != cancelled_on[0]:
                lost.append(segment.instance)
                cluster.transport.kill(segment.instance)

        jobs = []
        for index in range(14):
            slo = SLO(e2e_s=0.02 * index) if index % 2 else SLO()
            cache = list(CacheMode)[index % 3]
            request, payload = make_live_request(
                cluster.frontend, str(index), slo=slo, cache=cache, output=41, floor=0.5
            )
            jobs.append(collect(cluster.frontend, request, payload, disturb))
        await asyncio.gather(*jobs)
        return cluster.specs


async def test_replay_reproduces_every_action():
    recorder = Recorder()
    specs = {spec.id: spec for spec in await record_a_run(recorder)}
    profile = step_profile(CONFIG)
    replayed = 0
    for (instance, _), entries in recorder.entries.items():
        if instance is None:
            scheduler = assemble_global(CONFIG.control, StepTable(profile))
        else:
            scheduler = assemble_local(CONFIG.control, specs[instance], StepTable(profile))
        for entry in entries:
            assert tuple(scheduler.handle(entry.now_s, entry.event)) == entry.actions
            replayed += 1
    assert replayed > 200
    events = {type(e.event) for entries in recorder.entries.values() for e in entries}
    assert events == set(typing.get_args(Event)), "every kind of event occurred"
    picked = {
        step.threshold
        for entries in recorder.entries.values()
        for entry in entries
        for action in entry.actions
        if isinstance(action, RunBatch)
        for step in action.batch.steps
    }
    assert len(picked) > 1, "thresholds were chosen, not fixed"
    assert (None, 0) in recorder.entries
    assert len(recorder.entries) >= 3, "the global scheduler, both instances"

"""A live cluster under load, in which something is killed, drained, replaced or cancelled.

Every request is accounted for: it ends with the tokens of an undisturbed run, or was cancelled
here, or ends with an error that says why. ``Chaos.run`` returns the counts. At the end of
``chaos_cluster`` nothing is left: pages, processes, shared memory, files.
"""

import asyncio
import contextlib
import dataclasses
import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch

from stepserve.core.config import Choice, ControlConfig, ServeConfig
from stepserve.core.errors import StepserveError
from stepserve.core.frontend import RequestRejected
from stepserve.core.ids import RequestId
from stepserve.core.payload import Payload, SamplingParams
from stepserve.core.request import Family, FinishReason, Request
from stepserve.engine.loader import load_model
from stepserve.engine.workers import remove_folders_left
from stepserve.families.profiles import BATCH_PROFILE
from support.ar_models import write_checkpoint
from support.live_cluster import (
    assert_at_rest,
    collect,
    make_live_request,
    quick_profile,
    running_cluster,
    tiny_checkpoint,
)
from support.on_ray import all_up, lost_rings, ray_cluster, ray_of
from support.step_profiles import write_step_profiles

KINDS = 12
"""Different requests: the same are asked again and again."""

DISTURBANCES = ("kill", "kill", "signal", "cancel", "layout", "drain", "restart")

MOST_AT_ONCE = 120
"""Requests under way: fewer than the limit of the queue."""

REST_S = 60.0
"""How long whatever was killed may take to be gone."""


def chaos_options(family, folder, layout):
    """Of a ``ServeConfig``. Of autoregressive models most requests are cut."""
    config = ControlConfig(tp_degrees=(1, 2))
    if family is Family.AUTOREGRESSIVE:
        placement = Choice("tandem_split", {"gain": 0.0, "least_segment_tokens": 16})
        config = dataclasses.replace(config, placement=placement, chunk_tokens=64)
    return {
        "model": str(folder),
        "layout": layout,
        "threads_per_instance": 1,
        "kv_pages": 200,
        "max_running_requests": 12,
        "operator_api": True,
        "profile": str(folder / "steps.json") if family is Family.DIFFUSION else "",
        "control": config,
    }


@contextlib.asynccontextmanager
async def chaos_cluster(family, layout="1,1,1", cluster="local", seed=0):
    """``Chaos`` on a cluster of a tiny random model: three shares, in this process or on Ray."""
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        patch.setenv(MARK, str(os.getpid()))
        patch.setenv("TMPDIR", str(folder))  # of processes that are started from here
        if family is Family.DIFFUSION:
            loaded = load_model(tiny_checkpoint(folder))
            write_step_profiles(folder, (1, 2))
        else:
            loaded = load_model(write_checkpoint(folder))
            quick_profile(loaded).save(folder / BATCH_PROFILE)
        options = chaos_options(family, folder, layout)
        if cluster == "local":
            run = running_cluster(ServeConfig(**options), loaded=loaded)
        else:
            stack.enter_context(ray_of(cpus=3))
            run = ray_cluster(**options)
        files = {path.name for path in folder.iterdir()}
        async with run as running:
            await all_up(running)
            chaos = Chaos(running, family, seed)
            await chaos.learn()
            yield chaos
            while running.loop.status().changing:
                await asyncio.sleep(0.01)
            assert_at_rest(running)
        async with asyncio.timeout(REST_S):
            while instance_processes() or lost_rings():
                await asyncio.sleep(0.01)
        patch.setattr(tempfile, "tempdir", str(folder))
        remove_folders_left()  # as whoever forms a group next does
        left = {path.name for path in folder.iterdir()} - files - {"ray"}
        assert not left, left


MARK = "STEPSERVE_CHAOS"


def instance_processes():
    """Processes beside this one that instances live in: actors of Ray, groups and their parents.

    Not the one that groups of this process are forked from.
    """
    parents, actors, groups = {}, set(), set()
    mark = f"{MARK}={os.getpid()}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            pid, command = int(path.name), (path / "cmdline").read_bytes()
            parents[pid] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if command.startswith(b"ray::_Actor"):
                actors.add(pid)
            elif b"forkserver" in command and mark in (path / "environ").read_bytes():
                groups.add(pid)
    return {pid for pid in actors if _descends(pid, parents)} | {
        pid for pid in groups if parents[pid] != os.getpid()
    }


def _descends(pid, parents):
    while pid in parents:
        if pid == os.getpid():
            return True
        pid = parents[pid]
    return False


def chaos_request(frontend, family, kind, number):
    """Greedy; kind and family say which."""
    name = RequestId(f"{number}-{kind}")
    if family is Family.DIFFUSION:
        request, payload = make_live_request(frontend, str(kind), output=24 + 8 * (kind % 4))
        return dataclasses.replace(request, id=name), payload
    generator = torch.Generator().manual_seed(kind)
    prompt, output = 20 + 17 * kind, 12 + 3 * kind
    ids = tuple(torch.randint(3, 48, (prompt,), generator=generator).tolist())
    arrived_s = frontend.now_s()
    request = Request(name, Family.AUTOREGRESSIVE, "tiny", prompt, output, arrived_s)
    return request, Payload(ids, SamplingParams(ignore_eos=True))


class Chaos:
    """Load on a running cluster, and what is done to it."""

    def __init__(self, cluster, family, seed=0, limit_s=120.0):
        """``limit_s``: a request that takes longer hangs."""
        self.cluster, self.family, self.limit_s = cluster, family, limit_s
        self.random = random.Random(f"{family}/{seed}")
        self.answers: dict[int, list[int]] = {}  # undisturbed, by kind
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.paused_s = 0.0
        self._jobs: set[asyncio.Task[None]] = set()
        self._cancelled: set[RequestId] = set()
        self._deck: list[str] = []  # disturbances still to come, so that each has its turn
        self._number = 0

    async def learn(self):
        """What an undisturbed cluster answers."""
        for kind in range(KINDS):
            asked = chaos_request(self.cluster.frontend, self.family, kind, -1)
            self.answers[kind] = (await collect(self.cluster.frontend, *asked)).tokens

    def ask(self):
        """Send one more request."""
        self._number += 1
        job = asyncio.ensure_future(self._one(self.random.randrange(KINDS), self._number))
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)

    async def _one(self, kind, number):
        frontend = self.cluster.frontend
        request, payload = chaos_request(frontend, self.family, kind, number)
        self.counts["asked"] += 1
        try:
            async with asyncio.timeout(self.limit_s):
                answer = await collect(frontend, request, payload)
        except TimeoutError:
            self.counts["hangs"] += 1
            self.wrong.append(f"{request.id} hangs")
            return
        end = answer.end
        if isinstance(end, RequestRejected):
            self.counts["refused"] += 1
            return
        self.paused_s = max(self.paused_s, end.report.paused_s)
        expected = self.answers[kind]
        if end.reason is FinishReason.LENGTH and answer.tokens == expected:
            self.counts["whole"] += 1
        elif end.reason is FinishReason.CANCELLED and request.id in self._cancelled:
            self.counts["cancelled"] += 1
            if answer.tokens != expected[: len(answer.tokens)]:
                self.wrong.append(f"{request.id}: cancelled with other tokens")
        elif end.reason is FinishReason.ERROR and end.error:
            self.counts["failed"] += 1
            self.counts[f"failed: {end.error}"] += 1
        else:
            self.wrong.append(f"{request.id}: {end.reason}, {len(answer.tokens)} tokens")

    def disturb(self):
        """Do something to somebody; what cannot be done now is left."""
        if not self._deck:
            self._deck = self.random.sample(DISTURBANCES, len(DISTURBANCES))
        what, cluster = self._deck.pop(), self.cluster
        instances = sorted(cluster.loop.supervisor.scheduler.ledger.instances)
        running = sorted(cluster.loop.records)
        if what == "kill" and instances:
            cluster.transport.kill(self.random.choice(instances))
        elif what == "signal" and (processes := sorted(instance_processes())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.random.choice(processes), signal.SIGKILL)
        elif what == "cancel" and running:
            victim = self.random.choice(running)
            self._cancelled.add(victim)
            cluster.frontend.cancel(victim, FinishReason.CANCELLED)
        elif what == "restart":  # of the global scheduler
            cluster.operator.restart_scheduler()
        elif what in ("layout", "drain"):
            try:
                self._change(what, instances)
            except (StepserveError, KeyError):
                what = "change refused"
        else:
            what = "nothing to disturb"
        self.counts[what] += 1

    def _change(self, what, instances):
        operator = self.cluster.operator
        if what == "drain" and len(instances) > 1:
            operator.drain(self.random.choice(instances))
        else:
            operator.change(self.random.choice(([1, 1, 1], [2, 1], [1, 1])))

    async def run(
        self,
        more: Callable[[int], bool],
        moment: Callable[[], Awaitable[object]],
        gap: Callable[[], Awaitable[object]],
        each: int,
    ):
        """Ask while there shall be ``more(asked)``, ``gap()`` apart.

        After every ``each`` of them ``moment()`` passes and something is done. A machine that
        is too slow for that is asked less often.
        """
        while more(self._number):
            self.ask()
            await gap()
            while len(self._jobs) >= MOST_AT_ONCE:
                await asyncio.wait(self._jobs, return_when=asyncio.FIRST_COMPLETED)
            if self._number % each == 0:
                await moment()
                self.disturb()
        while self._jobs:
            await asyncio.wait(self._jobs)
        return self.counts

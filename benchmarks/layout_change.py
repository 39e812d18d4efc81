"""Deadlines met before, during and after a change of the layout, with capacity to spare.

The bundled model on three shares of one thread. Requests arrive (Poisson) at ``--share`` of what
the cluster can do, which is measured first, each with a deadline of ``--slo-multiple`` times the
mean latency of single requests. In each repetition an operator changes the layout from 1,1,1 to
2,1, and in the next one back. *During* are the requests under way between the asking and the last
new instance's coming up; *before* and *after* those of ``--seconds`` on either side. Thresholds
are pinned, so that a late request is late and not made faster.

Tokens are lost or repeated if an answer has not all of its offsets, each once. The longest pause
is that between two steps of a request on different instances.

    python benchmarks/layout_change.py [--cluster ray] [--repetitions 6]
"""

import argparse
import asyncio
import contextlib
import math
import os
import random
import statistics
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from stepserve.core.config import ServeConfig
from stepserve.core.frontend import RequestEnded, TokensEmitted
from stepserve.core.ids import RequestId
from stepserve.core.payload import Payload, SamplingParams
from stepserve.core.request import (
    SLO,
    CacheMode,
    DiffusionOptions,
    Family,
    Request,
    ThresholdBounds,
)
from stepserve.engine.bundled.tasks import sample
from stepserve.engine.hub import BUNDLED
from stepserve.gateway.tokenizer import TextTokenizer
from stepserve.live.deploy import Cluster, build_cluster
from stepserve.live.instance_factory import make_engine
from stepserve.live.transport_ray import RayCluster

TOKENS = 48
LAYOUTS = ((2, 1), (1, 1, 1))
MOST_POINTS = 5.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One request; times on the cluster's clock. ``late_s``: negative if in time."""

    began_s: float
    ended_s: float
    late_s: float
    paused_s: float
    lost: int
    repeated: int


@contextlib.asynccontextmanager
async def running(config: ServeConfig) -> AsyncIterator[Cluster]:
    with contextlib.ExitStack() as stack:
        host = None
        if config.cluster != "local":
            on_ray = stack.enter_context(RayCluster(config))
            config, host = on_ray.config, on_ray.transport
        cluster = build_cluster(config, make_engine(config), host=host)
        cluster.start()
        await up(cluster, len(config.degrees))
        try:
            yield cluster
        finally:
            await cluster.stop()


async def up(cluster: Cluster, instances: int) -> None:
    """So many instances are up, and nothing is being changed."""
    scheduler = cluster.loop.supervisor.scheduler
    while scheduler.reconfiguration.under_way or len(scheduler.ledger.instances) != instances:
        await asyncio.sleep(0.01)


class Load:
    """Requests that come until they are told not to."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.frontend, self.chance = cluster.frontend, random.Random(seed)
        tokenizer = TextTokenizer.from_folder(BUNDLED)
        self.prompts = [
            tuple(tokenizer.completion_ids(sample(self.chance, evaluation=True).prompt))
            for _ in range(64)
        ]
        self.answers: list[Answer] = []
        self.slo_s = 600.0
        self.asked = 0
        self.stopped = False

    async def ask(self) -> None:
        """One request to its end."""
        self.asked += 1
        ids, began_s = self.chance.choice(self.prompts), self.frontend.now_s()
        options = DiffusionOptions(ThresholdBounds(0.9, 0.9), 32, CacheMode.DUAL)
        made = (RequestId(str(self.asked)), Family.DIFFUSION, "m", len(ids), TOKENS, began_s)
        request, offsets = Request(*made, SLO(e2e_s=self.slo_s), options), []
        payload = Payload(ids, SamplingParams(ignore_eos=True))
        paused_s = 0.0
        async for update in self.frontend.submit(request, payload):
            if isinstance(update, TokensEmitted):
                offsets += [token.offset for token in update.tokens]
            else:
                assert isinstance(update, RequestEnded), update
                paused_s = update.report.paused_s
        ended_s, found = self.frontend.now_s(), set(offsets)
        lost, repeated = len(set(range(TOKENS)) - found), len(offsets) - len(found)
        late_s = ended_s - began_s - self.slo_s
        self.answers.append(Answer(began_s, ended_s, late_s, paused_s, lost, repeated))

    async def arrive(self, rate_per_s: float) -> None:
        """Poisson arrivals; ends when all are answered."""
        async with asyncio.TaskGroup() as group:
            while not self.stopped:
                group.create_task(self.ask())
                await asyncio.sleep(self.chance.expovariate(rate_per_s))


def in_time(answers: Sequence[Answer]) -> str:
    """How many of them."""
    return f"{sum(answer.late_s <= 0.0 for answer in answers)} of {len(answers)}"


def attainment(answers: Sequence[Answer]) -> float:
    """Percent in time; no number if there were none."""
    if not answers:
        return math.nan
    return 100.0 * statistics.fmean(answer.late_s <= 0.0 for answer in answers)


async def change(
    cluster: Cluster, load: Load, seconds: float, layout: Sequence[int]
) -> tuple[list[Answer], list[Answer], list[Answer]]:
    """One change with time around it; the requests before, during and after it."""
    first_s = load.frontend.now_s()
    await asyncio.sleep(seconds)
    asked_s = load.frontend.now_s()
    cluster.operator.change(layout)
    await up(cluster, len(layout))
    up_s = load.frontend.now_s()
    await asyncio.sleep(seconds)
    while any(record.request.arrival_s <= up_s for record in cluster.loop.records.values()):
        await asyncio.sleep(0.01)
    answers = [answer for answer in load.answers if answer.began_s >= first_s]
    during = [a for a in answers if a.ended_s >= asked_s and a.began_s <= up_s]
    before = [a for a in answers if a.ended_s < asked_s]
    after = [a for a in answers if a.began_s > up_s]
    print(
        f"to {','.join(map(str, layout))} in {up_s - asked_s:.2f} s: in time {in_time(before)} "
        f"before, {in_time(during)} during, {in_time(after)} after; longest pause "
        f"{max((a.paused_s for a in during), default=0.0):.2f} s; tokens lost "
        f"{sum(a.lost for a in answers)}, repeated {sum(a.repeated for a in answers)}",
        flush=True,
    )
    return before, during, after


async def measure(args: argparse.Namespace) -> None:
    """All repetitions, then attainment over all of them."""
    config = ServeConfig(
        cluster=args.cluster, layout="1,1,1", threads_per_instance=1, operator_api=True
    )
    async with running(config) as cluster:
        load = Load(cluster, args.seed)
        for _ in range(8):
            await load.ask()
        alone_s = statistics.fmean(a.ended_s - a.began_s for a in load.answers)
        load.slo_s = args.slo_multiple * alone_s
        rate_per_s = args.share * await capacity_per_s(load, args.concurrent)
        arrivals = asyncio.ensure_future(load.arrive(rate_per_s))
        print(f"alone {alone_s:.2f} s, deadline {load.slo_s:.2f} s, {rate_per_s:.2f} requests/s")
        parts: tuple[list[Answer], ...] = ([], [], [])
        for number in range(args.repetitions):
            found = await change(cluster, load, args.seconds, LAYOUTS[number % 2])
            for part, some in zip(parts, found, strict=True):
                part += some
        load.stopped = True
        await arrivals
    before, during, after = map(attainment, parts)
    print(
        f"attainment {before:.1f} % before, {during:.1f} % during, {after:.1f} % after: "
        f"{during - before:+.1f} points during a change (at least -{MOST_POINTS:g} wanted)"
    )


async def capacity_per_s(load: Load, concurrent: int) -> float:
    """Requests per second with so many under way."""
    began_s = load.frontend.now_s()
    for _ in range(2):
        await asyncio.gather(*(load.ask() for _ in range(concurrent)))
    per_s = 2 * concurrent / (load.frontend.now_s() - began_s)
    print(f"capacity: {per_s:.2f} requests/s with {concurrent} under way")
    return per_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cluster", default="local", help="as of `stepserve serve`")
    parser.add_argument("--share", type=float, default=0.12, help="of capacity: the load")
    parser.add_argument("--seconds", type=float, default=20.0, help="before, and after, a change")
    parser.add_argument("--repetitions", type=int, default=6)
    parser.add_argument("--slo-multiple", type=float, default=5.0)
    parser.add_argument("--concurrent", type=int, default=24, help="to measure the capacity with")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    load_before = os.getloadavg()[0]
    asyncio.run(measure(args))
    print(f"load average at the start {load_before:.1f}, at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()

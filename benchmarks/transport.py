"""Instances on Ray against instances in this process: the bundled model, equal load, in turns.

Two instances on one thread each serve problems of the bundled model twice over: *closed*, with
so many requests always under way (throughput, in tokens per second), and *open*, at a rate well
below that (time to the first token). Every round does both with both; ratios and differences
are of the same round, and their median over rounds is what to look at. On a machine that others
use, too, the CPU time for each token says more: of this process, and with Ray of all that it
started. Besides, what a message costs: seconds of CPU of both ends, by a call of a Ray actor and
by ``live/wire.py``.

    python benchmarks/transport.py [--rounds 5] [--requests 96]
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import random
import resource
import statistics
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ray

from stepserve.core.config import ServeConfig
from stepserve.core.frontend import Frontend, RequestEnded, TokensEmitted
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
from stepserve.live.deploy import HostInstances, build_cluster
from stepserve.live.frontend import LiveFrontend
from stepserve.live.instance_factory import make_engine
from stepserve.live.transport_ray import RayCluster
from stepserve.live.wire import Link

CONFIG = ServeConfig(cluster="ray", instances=2, threads_per_instance=1)
Ids = tuple[int, ...]
CONCURRENT = 12
TOKENS = 48
LEAST_THROUGHPUT, MOST_LATER_S = 0.95, 0.005


@contextlib.asynccontextmanager
async def running(config: ServeConfig, host: HostInstances | None) -> AsyncIterator[LiveFrontend]:
    cluster = build_cluster(config, make_engine(config), host=host)
    cluster.start()
    while len(cluster.loop.status().instances) < config.instances:
        await asyncio.sleep(0.01)
    try:
        yield cluster.frontend
    finally:
        await cluster.stop()


async def serve(frontend: Frontend, ids: Ids, name: str) -> tuple[float, int]:
    """One request; seconds to its first token, and its tokens."""
    options = DiffusionOptions(ThresholdBounds(0.9, 0.9), 32, CacheMode.DUAL)
    began_s, tokens = frontend.now_s(), 0
    first_s: float | None = None
    made = (RequestId(name), Family.DIFFUSION, "m", len(ids), TOKENS, began_s)
    payload = Payload(ids, SamplingParams(ignore_eos=True))
    async for update in frontend.submit(Request(*made, SLO(), options), payload):
        if isinstance(update, TokensEmitted):
            first_s = first_s or frontend.now_s() - began_s
            tokens += len(update.tokens)
        else:
            assert isinstance(update, RequestEnded), update
    assert first_s is not None
    return first_s, tokens


async def closed(frontend: Frontend, prompts: Sequence[Ids], tree: bool) -> tuple[float, float]:
    """Tokens per second with ``CONCURRENT`` requests under way, and CPU seconds for each token."""
    left, served, began_s = iter(enumerate(prompts)), 0, time.perf_counter()
    used_s = cpu_s(tree)

    async def worker() -> None:
        nonlocal served
        for index, ids in left:
            _, tokens = await serve(frontend, ids, f"closed-{index}")
            served += tokens

    await asyncio.gather(*(worker() for _ in range(CONCURRENT)))
    return served / (time.perf_counter() - began_s), (cpu_s(tree) - used_s) / served


async def opened(frontend: Frontend, prompts: Sequence[Ids], rate_per_s: float, seed: int) -> float:
    """Median seconds to the first token, at Poisson arrivals."""
    chance, jobs = random.Random(seed), []
    for index, ids in enumerate(prompts):
        jobs.append(asyncio.ensure_future(serve(frontend, ids, f"open-{index}")))
        await asyncio.sleep(chance.expovariate(rate_per_s))
    return statistics.median(first_s for first_s, _ in await asyncio.gather(*jobs))


def cpu_s(tree: bool) -> float:
    """CPU seconds that this process has used; ``tree``: and all that descend from it."""
    used: dict[int, int] = {}
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            parents[pid], used[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
    ours = {os.getpid()}
    while tree and (more := {pid for pid, parent in parents.items() if parent in ours} - ours):
        ours |= more
    return sum(used[pid] for pid in ours) / os.sysconf("SC_CLK_TCK")


async def compare(rounds: int, requests: int, messages: int) -> None:
    tokenizer = TextTokenizer.from_folder(BUNDLED)
    chance = random.Random(0)
    prompts = [
        tokenizer.completion_ids(sample(chance, evaluation=True).prompt) for _ in range(requests)
    ]
    with RayCluster(CONFIG) as on_ray:
        config = on_ray.config
        local = running(replace(config, cluster="local"), None)
        remote = running(config, on_ray.transport)
        async with local as here, remote as there:
            both = (here, there)
            for frontend in both:  # caches, and the first corrections of the step times
                await closed(frontend, prompts[: 2 * CONCURRENT], False)
            ratios: list[float] = []
            costs: list[float] = []
            later_s: list[float] = []
            for number in range(rounds):
                order = both if number % 2 else both[::-1]
                found = {f: await closed(f, prompts, f is there) for f in order}
                speeds = {frontend: speed for frontend, (speed, _) in found.items()}
                rate = 0.4 * min(speeds.values()) / TOKENS
                firsts = {f: await opened(f, prompts, rate, number) for f in order}
                ratios.append(speeds[there] / speeds[here])
                costs.append(found[there][1] / found[here][1])
                later_s.append(firsts[there] - firsts[here])
                print(f"round {number}, here / on Ray:")
                for frontend in both:
                    print(
                        f"  {speeds[frontend]:.0f} tokens/s, {1e3 * found[frontend][1]:.2f} ms of"
                        f" CPU a token, first token after {1e3 * firsts[frontend]:.1f} ms",
                        flush=True,
                    )
        print_message_costs(messages)
    ratio, later = statistics.median(ratios), statistics.median(later_s)
    print(f"throughput on Ray / here: {ratio:.3f} (at least {LEAST_THROUGHPUT} wanted)")
    print(f"CPU of a token on Ray / here: {statistics.median(costs):.3f}")
    print(f"first token later by: {1e3 * later:.1f} ms (at most {1e3 * MOST_LATER_S:.0f} wanted)")


@ray.remote(num_cpus=0)
class Echo:
    def take(self, data: bytes) -> tuple[float, float]:
        return resource.getrusage(resource.RUSAGE_SELF)[:2]


def listen(carrier: Connection) -> None:
    """The other end of ``wire``: says what it used, once it heard of the end."""
    began = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    link = Link(carrier, lambda item: link.send(used()) if item == "end" else None, "there")

    def used() -> float:
        return sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) - began

    link.run()


def print_message_costs(messages: int, size_bytes: int = 2000) -> None:
    """CPU of both ends for each message, one at a time with 2 ms between them."""
    data, pause = bytes(size_bytes), threading.Event()

    def spend(send: Callable[[], object]) -> float:
        began = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        for _ in range(messages):
            send()
            pause.wait(0.002)
        return sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) - began

    echo: Any = Echo
    echo = echo.remote()
    theirs = sum(ray.get(echo.take.remote(data)))
    calls = spend(lambda: ray.get(echo.take.remote(data)))
    calls += sum(ray.get(echo.take.remote(data))) - theirs
    near, far = multiprocessing.Pipe()
    other = multiprocessing.get_context("spawn").Process(target=listen, args=(far,))
    other.start()
    heard: list[float] = []
    link = Link(near, heard.append, "here")
    runs = threading.Thread(target=link.run)
    runs.start()
    frames = spend(lambda: link.send(data))
    link.send("end")
    while not heard:
        runs.join(0.01)
    link.close()
    runs.join()
    other.join()
    frames += heard[0]
    each = 1e3 / messages
    print(f"CPU of a message: {calls * each:.2f} ms as a Ray call, {frames * each:.2f} ms by wire")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--messages", type=int, default=400, help="to learn what one costs")
    args = parser.parse_args()
    asyncio.run(compare(args.rounds, args.requests, args.messages))


if __name__ == "__main__":
    main()

"""What HTTP adds to a request: the gateway against calling the world behind it directly.

Two worlds. *instant*: a frontend that answers 48 tokens in four updates without any engine, so
what is measured is the gateway alone (parsing, tokenising, streaming, TCP). *engine*:
the bundled model on two instances, called through ``LiveFrontend`` directly and through HTTP.
The server is a process of its own, the client runs here; on a machine with two cores they compete.

    python benchmarks/gateway.py
"""

import argparse
import asyncio
import dataclasses
import multiprocessing
import socket
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import httpx
import uvicorn

from stepserve.core.config import ServeConfig
from stepserve.core.frontend import Frontend, RequestEnded, RequestReport, TokensEmitted, Update
from stepserve.core.ids import RequestId
from stepserve.core.payload import Payload, SamplingParams, SettledToken
from stepserve.core.request import (
    CacheMode,
    DiffusionOptions,
    Family,
    FinishReason,
    Request,
    ThresholdBounds,
)
from stepserve.engine.hub import BUNDLED
from stepserve.gateway.tokenizer import TextTokenizer
from stepserve.live.deploy import Cluster, build_app, build_cluster
from stepserve.live.frontend import LiveFrontend
from stepserve.live.instance_factory import make_engine
from stepserve.metrics.latency import percentile

PROMPT = "Sort up: 5, 3, 8."
TOKENS = 48
WORLDS = ("instant", "engine")
BODY = {
    "model": "stepserve-bundled",
    "prompt": PROMPT,
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "dlm": {"confidence_threshold": 0.9, "min_confidence_threshold": 0.9},
}
CONFIG = ServeConfig(instances=2, threads_per_instance=1, max_running_requests=64)


class InstantFrontend(LiveFrontend):
    """Answers at once, whatever the cluster behind it does."""

    def __init__(self, cluster: Cluster, token_ids: Sequence[int]) -> None:
        super().__init__(cluster.loop, cluster.transport)
        self.token_ids = token_ids

    async def submit(self, request: Request, payload: Payload) -> AsyncIterator[Update]:
        tokens = [SettledToken(i, self.token_ids[i % len(self.token_ids)]) for i in range(TOKENS)]
        for start in range(0, TOKENS, 12):
            yield TokensEmitted(tuple(tokens[start : start + 12]), start // 12 + 1, self.now_s())
        yield RequestEnded(FinishReason.LENGTH, RequestReport(forwards=4))


def build(world: str) -> Cluster:
    """The cluster behind the gateway, not started."""
    cluster = build_cluster(CONFIG, make_engine(CONFIG))
    if world == "engine":
        return cluster
    answer = tokenizer().completion_ids(" red, blue, green")
    return dataclasses.replace(cluster, frontend=InstantFrontend(cluster, answer))


def tokenizer() -> TextTokenizer:
    return TextTokenizer.from_folder(BUNDLED)


def serve(world: str, port: int) -> None:
    """The server process."""
    cluster = build(world)
    app = build_app(CONFIG, make_engine(CONFIG).facts, cluster.frontend, cluster.control_reading)

    async def run() -> None:
        cluster.start()
        await uvicorn.Server(
            uvicorn.Config(app, port=port, log_level="error", access_log=False)
        ).serve()

    asyncio.run(run())


Call = Callable[[int], Awaitable[None]]


async def closed_loop(call: Call, concurrency: int, requests: int) -> list[float]:
    """Seconds of each request, ``concurrency`` of them always under way."""
    left = iter(range(requests))
    seconds: list[float] = []

    async def worker() -> None:
        for index in left:
            start = time.perf_counter()
            await call(index)
            seconds.append(time.perf_counter() - start)

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return seconds


async def ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/ready")).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


async def over_http(port: int, stream: bool, concurrency: int, requests: int) -> list[float]:
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", limits=limits, timeout=120
    ) as client:
        while not await ready(client):
            await asyncio.sleep(0.05)

        async def call(index: int) -> None:
            async with client.stream(
                "POST", "/v1/completions", json=BODY | {"stream": stream}
            ) as r:
                assert r.status_code == 200
                async for _ in r.aiter_raw():
                    pass

        await closed_loop(call, concurrency, concurrency)  # connections, caches
        return await closed_loop(call, concurrency, requests)


async def direct(
    frontend: Frontend, ids: tuple[int, ...], concurrency: int, requests: int
) -> list[float]:
    async def call(index: int) -> None:
        request = Request(
            RequestId(f"{time.perf_counter_ns()}-{index}"), Family.DIFFUSION, "m", len(ids), TOKENS,
            frontend.now_s(),
            diffusion=DiffusionOptions(ThresholdBounds(0.9, 0.9), 16, CacheMode.DUAL),
        )  # fmt: skip
        async for _ in frontend.submit(request, Payload(ids, SamplingParams(ignore_eos=True))):
            pass

    await closed_loop(call, concurrency, concurrency)
    return await closed_loop(call, concurrency, requests)


async def direct_times(world: str, concurrency: int, requests: int) -> list[float]:
    ids = tokenizer().completion_ids(PROMPT)
    cluster = build(world)
    cluster.start()
    while not cluster.frontend.ready():
        await asyncio.sleep(0.01)
    try:
        return await direct(cluster.frontend, ids, concurrency, requests)
    finally:
        await cluster.stop()


def show(label: str, base: list[float], http: list[float]) -> None:
    cells = []
    for percent in (50, 99):
        one, other = percentile(base, percent) * 1e3, percentile(http, percent) * 1e3
        cells.append(f"{one:9.2f} {other:9.2f} {other - one:9.2f} {other / one:7.2f}x")
    print(
        f"{label:34s} {' |'.join(cells)}   mean added "
        f"{(statistics.mean(http) - statistics.mean(base)) * 1e3:.2f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=512, help="per setting of 64 at a time")
    parser.add_argument("--world", choices=WORLDS, action="append", help="default: both")
    args = parser.parse_args()
    print(
        f"{'ms':34s} {'direct':>9s} {'http':>9s} {'added':>9s} {'p50':>8s} |{'direct':>9s} "
        f"{'http':>9s} {'added':>9s} {'p99':>8s}"
    )
    for world in args.world or WORLDS:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        rows = sorted({(1, max(1, args.requests // 8)), (min(64, args.requests), args.requests)})
        base = {c: asyncio.run(direct_times(world, c, n)) for c, n in rows}
        server = multiprocessing.get_context("spawn").Process(target=serve, args=(world, port))
        server.start()
        try:
            for concurrency, requests in rows:
                for stream in (False, True):
                    http = asyncio.run(over_http(port, stream, concurrency, requests))
                    kind = "stream" if stream else "whole"
                    show(f"{world}, concurrency {concurrency}, {kind}", base[concurrency], http)
        finally:
            server.terminate()
            server.join()


if __name__ == "__main__":
    main()

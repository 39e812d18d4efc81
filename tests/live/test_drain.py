"""How a server ends when it is told to."""

import asyncio
import contextlib
import json
import signal
import socket

import httpx
import pytest

from support.served import Served, ask

LONG = {"prompt": "Sort up: 5, 3, 8.", "max_tokens": 200}
SLOW = {"confidence_threshold": 1.0, "min_confidence_threshold": 1.0}


@pytest.fixture
def configured(tmp_path):
    def serve(**options):
        path = tmp_path / "serve.toml"
        path.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in options.items()))
        return Served("--config", str(path))

    return serve


def status(served, path="/ready"):
    return httpx.get(f"{served.url}{path}").status_code


async def ended(served):
    return await asyncio.to_thread(served.parent.wait, 60)


def test_requests_are_taken_until_balancers_know_and_then_refused(configured):
    with configured(drain_delay_s=3.0) as served:
        asyncio.run(leave(served))


async def leave(served):
    async with httpx.AsyncClient(timeout=60) as client:
        begun = asyncio.Event()

        async def reached(_):
            begun.set()

        body = {**LONG, "dlm": SLOW}
        first = asyncio.create_task(ask(client, served.url, body, reached))
        await begun.wait()
        served.parent.send_signal(signal.SIGTERM)
        while (await client.get(f"{served.url}/ready")).status_code == 200:
            pass
        taken = await client.post(f"{served.url}/v1/completions", json={"prompt": LONG["prompt"]})
        assert taken.status_code == 200, "a balancer has not heard of it yet"
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", served.port)) as held:  # keeps it from ending
            held.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
            await asyncio.to_thread(served.wait_for, "draining")
            refused = await client.post(f"{served.url}/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            for path in ("/health", "/metrics"):
                assert (await client.get(f"{served.url}{path}")).status_code == 200
        assert (await first).ended == "done"
        assert await ended(served) == 0


def test_who_sends_no_body_or_reads_no_answer_does_not_keep_the_server(configured):
    serves = configured(drain_delay_s=0.0, drain_s=1.0)
    with serves as served, contextlib.ExitStack() as links:
        body = json.dumps({**LONG, "stream": True, "ignore_eos": True}).encode()
        for sent in (b"{", body):
            link = links.enter_context(socket.create_connection(("127.0.0.1", served.port)))
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            length = len(body) if sent == body else 100
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            link.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode() + sent)
        assert status(served) == 200
        served.parent.send_signal(signal.SIGTERM)
        assert served.parent.wait(60) == 0


def test_a_body_that_does_not_come_is_given_up(configured):
    with (
        configured(body_s=0.2) as served,
        socket.create_connection(("127.0.0.1", served.port)) as link,
    ):
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        link.sendall(f"{head}Content-Length: 100\r\n\r\n".encode() + b"{")
        assert link.recv(100).startswith(b"HTTP/1.1 408 ")


def test_a_second_signal_ends_at_once(configured):
    with configured(drain_delay_s=600.0) as served:
        served.parent.send_signal(signal.SIGTERM)
        served.wait_for("not ready any more")
        served.parent.send_signal(signal.SIGINT)
        assert served.parent.wait(60) == 1

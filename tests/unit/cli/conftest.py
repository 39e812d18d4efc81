"""Virtual time and a fake server: command lines run whole, without waiting or a network."""

import asyncio
import functools
import json

import httpx
import pytest

from stepserve.cli import bench, chat
from stepserve.cli.client import Client
from stepserve.cli.main import main


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self):
        super().__init__()
        self._virtual_s = 0.0
        poll = self._selector.select

        def jump(timeout):
            if timeout is None:
                raise AssertionError("deadlock: nothing is scheduled")
            self._virtual_s += timeout
            return poll(0)

        self._selector.select = jump

    def time(self):
        return self._virtual_s


@pytest.fixture
def run_virtual():
    """Run a coroutine in virtual time."""

    def run(coroutine):
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(coroutine)

    return run


@pytest.fixture(autouse=True)
def no_api_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


class FakeServer:
    """An ASGI app that answers known questions; seconds and mistakes depend on the floor."""

    def __init__(self):
        self.bodies = []
        self.answers = {}  # prompt -> right answer
        self.status = 200
        self.report = None  # objects of the last event; ours by default
        self.metrics = ""  # a foreign server has none of ours

    async def __call__(self, scope, receive, send):
        if scope["path"] == "/v1/models":
            await self._send(send, 200, b'{"data": [{"id": "fake"}]}')
            return
        if scope["path"] == "/metrics":
            await self._send(send, 200 if self.metrics else 404, self.metrics.encode())
            return
        body = json.loads((await receive())["body"])
        self.bodies.append(body)
        if self.status != 200:
            await self._send(send, self.status, b'{"error": {"message": "no room"}}')
            return
        floor = body.get("dlm", {}).get("min_confidence_threshold", 0.9)
        await asyncio.sleep(floor)
        await self._send(send, 200, self._stream(body, floor))

    def _stream(self, body, floor):
        prompt = body["messages"][-1]["content"]
        careless = floor < 0.9 and len(prompt) % 2
        text = "Oops." if careless else self.answers.get(prompt, "Hello.")
        report = self.report or {
            "metrics": {"forwards": 8},
            "slo": {"slack_ms": 12.0},
            "dlm": {"threshold_mean": floor},
        }
        chunks = [
            {"choices": [{"delta": {"role": "assistant"}, "finish_reason": None}]},
            {"choices": [{"delta": {"content": text[:2]}}], "usage": {"completion_tokens": 1}},
            {"choices": [{"delta": {"content": text[2:]}}], "usage": {"completion_tokens": 4}},
            {"choices": [{"delta": {}, "finish_reason": "stop"}]},
            {"choices": [], "usage": {"completion_tokens": 5}, **report},
        ]
        events = [json.dumps(chunk) for chunk in chunks] + ["[DONE]"]
        return "".join(f"data: {event}\n\n" for event in events).encode()

    @staticmethod
    async def _send(send, status, content):
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": content})


@pytest.fixture
def fake_server():
    return FakeServer()


@pytest.fixture
def stepserve(fake_server, run_virtual, monkeypatch):
    """Run a ``stepserve`` command line against the fake server, in virtual time."""
    transport = httpx.ASGITransport(fake_server)
    for module in (bench, chat):
        monkeypatch.setattr(module, "Client", functools.partial(Client, transport=transport))
    monkeypatch.setattr(asyncio, "run", run_virtual)
    return lambda *words: main(words)

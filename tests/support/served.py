"""A server as its users start it: its processes, to be killed, and a client that counts tokens."""

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import httpx

from stepserve.engine.workers import lives


@dataclass
class Answer:
    """What a stream came to. ``ended``: ``done``, ``broken`` (off), or the message of an error."""

    tokens: list
    ended: str


class Served:
    """A running ``stepserve serve``; ends it with the context."""

    def __init__(self, *options):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "stepserve.cli.main", "serve", "--port", str(self.port)]
        self.parent = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
        self.log = []
        self.wait_for("serving ")
        self._all = self._below(self.parent.pid)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Drain, and wait for the end."""
        self.parent.send_signal(signal.SIGINT)  # which waits for no balancer
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.parent.wait(60)
        self.parent.kill()
        self.log += self.parent.stderr  # ends with the last process that writes to it
        self.parent.stderr.close()

    def wait_for(self, words, times=1):
        """Read the log until a line has these words, so many times."""
        for line in self.parent.stderr:
            self.log.append(line)
            times -= words in line
            if not times:
                return
        raise AssertionError(f"no {words!r}, but\n{''.join(self.log)}")

    def _below(self, pid):
        children = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                name, _, rest = stat.read_text().rpartition(")")
                children.setdefault(int(rest.split()[1]), []).append(
                    (int(stat.parent.name), name.partition("(")[2])
                )
        found, todo = {}, [pid]
        while todo:
            for child, name in children.get(todo.pop(), ()):
                found[child] = name
                todo.append(child)
        return found

    def pids(self, kind):
        """Processes of a kind: gateway, scheduler or instance, oldest first."""
        name = f"stepserve {kind}"[:15]
        return sorted(pid for pid, it in self._below(self.parent.pid).items() if it == name)

    def kill(self, kind, which=0):
        """Kill one with signal 9."""
        os.kill(self.pids(kind)[which], signal.SIGKILL)

    def left(self):
        """Processes that were there after the start and are there now."""
        return [pid for pid in self._all if lives(str(pid))]


async def ask(client, url, body, reached=None):
    """Stream a completion. ``reached``: called with the number of tokens so far."""
    body = {"stream": True, "ignore_eos": True, "logprobs": 0, "temperature": 0, **body}
    answer = Answer([], "broken")
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                answer.ended = f"status {response.status_code}"
                return answer
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    answer.ended = "done"
                elif line.startswith("data: "):
                    event = json.loads(data)
                    if "error" in event:
                        answer.ended = event["error"]["message"]
                        break
                    for choice in event["choices"]:
                        answer.tokens += (choice["logprobs"] or {"tokens": []})["tokens"]
                if reached is not None:
                    await reached(len(answer.tokens))
    except httpx.HTTPError as error:
        answer.ended = f"broken: {error!r}"
    return answer


KINDS = ("instance", "scheduler", "gateway", "parent")
PROMPTS = [f"Sort up: {n}, 3, {9 - n}." for n in range(8)]
KEPT_S = 2.0
"""How long a client may take to see that a connection which it has kept is of a dead gateway."""

SETTINGS = [{"prompt": p, "max_tokens": n, "seed": 7} for p in PROMPTS for n in (20, 60, 120)]


class Chaos:
    """Keeps a server under load and kills its processes, one kind after another.

    ``counts``: how requests ended. ``wrong``: answers that are not what they should have been.
    ``exact``: answers are those of an undisturbed run; else they are as long.
    """

    def __init__(self, options, exact, seed=0):
        self._options, self._exact = options, exact
        self._random = random.Random(seed)
        self._expected = {}
        self._gone_s = 0.0  # when a gateway or a parent was last killed
        self.counts = Counter()
        self.wrong = []

    async def run(self, kills, every_s, rate):
        """So many kills, so far apart, at so many requests a second."""
        served = await asyncio.to_thread(Served, *self._options)
        async with httpx.AsyncClient(timeout=120) as client, asyncio.TaskGroup() as tasks:
            for number, body in enumerate(SETTINGS):
                self._expected[number] = await ask(client, served.url, body)
            for n in range(kills):
                until_s = time.monotonic() + every_s
                while time.monotonic() < until_s:
                    tasks.create_task(self._one(client, served.url))
                    await asyncio.sleep(self._random.expovariate(rate))
                served = await self._kill(served, KINDS[n % len(KINDS)])
        left = served.pids("instance")
        await asyncio.to_thread(served.__exit__)
        if served.parent.returncode or served.left():
            self.wrong.append(f"{served.parent.returncode}, {served.left()} of {left} left")

    async def _kill(self, served, kind):
        self.counts[f"{kind} killed"] += 1
        if kind in ("gateway", "parent"):
            self._gone_s = time.monotonic()
        if kind != "parent":
            which = self._random.randrange(len(served.pids(kind)))
            served.kill(kind, which)
            return served
        served.parent.kill()
        await asyncio.to_thread(list, served.parent.stderr)  # ends with the last process
        if served.left():
            self.wrong.append(f"{served.left()} are left without a parent")
        return await asyncio.to_thread(Served, *self._options)

    async def _one(self, client, url):
        number, began_s = self._random.randrange(len(SETTINGS)), time.monotonic()
        got, expected = await ask(client, url, SETTINGS[number]), self._expected[number]
        whole = got == expected if self._exact else len(got.tokens) == len(expected.tokens)
        if got.ended == "done" and whole:
            self.counts["whole"] += 1
        elif got.ended.startswith("broken") and self._gone_s > began_s - KEPT_S:
            self.counts["of a killed gateway"] += 1
        else:
            self.counts["wrong"] += 1
            what = f"{len(got.tokens)} of {len(expected.tokens)} tokens, {got.ended}"
            self.wrong.append(f"{SETTINGS[number]}: {what}")

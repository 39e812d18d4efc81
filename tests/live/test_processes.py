"""Any process of a server may be killed: what was accepted goes on, or is ended and accounted."""

import asyncio
import os

import httpx
import pytest

from support.live_cluster import write_random
from support.served import PROMPTS, Served, ask

TOKENS = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("random")
    write_random(made)
    return made


@pytest.fixture(scope="module", params=["autoregressive", "diffusion"])
def served(request, folder):
    model = str(folder) if request.param == "autoregressive" else "bundled"
    with Served("--model", model, "--gateways", "2") as server:
        server.exact = request.param == "autoregressive"
        yield server


def body(prompt):
    return {"prompt": prompt, "max_tokens": TOKENS, "seed": 7}


async def answers(url, at, do):
    """Answers to all prompts at once; ``do`` is called once when the first has ``at`` tokens."""
    done = asyncio.Event()

    async def reached(count):
        if count >= at and not done.is_set():
            done.set()
            do()

    async with httpx.AsyncClient(timeout=120) as client:
        return await asyncio.gather(*(ask(client, url, body(p), reached) for p in PROMPTS))


def undisturbed(served):
    got = asyncio.run(answers(served.url, TOKENS + 1, lambda: None))
    assert [(a.ended, len(a.tokens)) for a in got] == [("done", TOKENS)] * len(PROMPTS)
    return got


def same(served, got, expected):
    """The same tokens; of diffusion models, whose steps an instance's loss changes, as many."""
    if served.exact:
        return got == expected
    return (got.ended, len(got.tokens)) == (expected.ended, len(expected.tokens))


def test_requests_go_on_when_the_scheduler_is_killed_and_killed_again(served):
    expected, instances = undisturbed(served), served.pids("instance")
    for _ in range(2):
        got = asyncio.run(answers(served.url, 20, lambda: served.kill("scheduler")))
        assert all(map(same, [served] * len(got), got, expected))
    assert undisturbed(served) == expected
    assert served.pids("instance") == instances, "they outlive a scheduler"


def test_requests_go_on_when_an_instance_is_killed(served):
    expected = undisturbed(served)
    got = asyncio.run(answers(served.url, 20, lambda: served.kill("instance")))
    assert all(map(same, [served] * len(got), got, expected))


def test_a_gateway_takes_only_its_own_clients_along(served):
    expected = undisturbed(served)
    got = asyncio.run(answers(served.url, 20, lambda: served.kill("gateway")))
    for answer, whole in zip(got, expected, strict=True):
        assert answer.ended.startswith("broken") or same(served, answer, whole)
    assert undisturbed(served) == expected, "another is there, and nothing of the first is left"


def test_without_the_parent_what_was_accepted_is_finished_and_all_processes_end(folder):
    with Served("--model", str(folder)) as served:
        expected = undisturbed(served)
        got = asyncio.run(answers(served.url, 20, lambda: os.kill(served.parent.pid, 9)))
        assert got == expected
        list(served.parent.stderr)  # ends with the last process that writes to it
        assert not served.left()

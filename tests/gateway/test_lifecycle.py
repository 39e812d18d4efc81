"""Refusals, failures, hang-ups, health."""

import asyncio
import json

import openai
import pytest

from gateway.scripted import EOS, Gateway, RawCall, byte_ids, until
from stepserve.core.frontend import RequestEnded, RequestRejected, RequestReport
from stepserve.core.request import FinishReason, Refusal

REFUSED = [RequestRejected(2.3, "queue is full", Refusal.QUEUE_FULL)]
FAILED = RequestEnded(FinishReason.ERROR, RequestReport(), "instance lost")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("call", ["complete", "chat"])
async def test_refusal_is_429_streamed_or_not(call, stream):
    gateway = Gateway(REFUSED)
    response = await getattr(gateway, call)(stream=stream)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    assert response.headers["retry-after-ms"] == "2300"
    assert response.headers["x-should-retry"] == "true"
    assert response.headers["x-llm-d-request-dropped-reason"] == "rejected-queue-full"
    assert "queue is full" in response.json()["error"]["message"]
    assert response.json()["error"]["code"] == "queue_full"
    assert gateway.observer.ends == [("rejected", 0)]
    assert gateway.frontend.cancels == {}


async def test_official_client_sees_a_rate_limit():
    async with Gateway(REFUSED).openai() as client:
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model="tiny", prompt="ab", stream=True)


@pytest.mark.parametrize("reason", list(Refusal))
@pytest.mark.parametrize("stream", [False, True])
async def test_where_asking_again_cannot_help_the_official_client_asks_once(stream, reason):
    gateway = Gateway([RequestRejected(None, "no", reason)])
    async with gateway.openai(max_retries=2) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(model="tiny", prompt="ab", stream=stream)
    assert len(gateway.frontend.submitted) == 1
    assert caught.value.code == reason.value
    headers = caught.value.response.headers
    assert headers["x-should-retry"] == "false"
    assert "retry-after" not in headers
    assert "retry-after-ms" not in headers
    words = {"deadline": "rejected-deadline", "saturated": "rejected-saturated"}
    dropped = headers["x-llm-d-request-dropped-reason"]
    assert dropped == words.get(reason.value, "rejected-queue-full")


async def test_where_it_can_the_official_client_asks_again_when_told_to():
    soon = RequestRejected(0.001, "busy", Refusal.SATURATED)
    answers = iter([[soon], [soon], [byte_ids("ok")]])
    gateway = Gateway(lambda request, payload: next(answers))
    async with gateway.openai(max_retries=2) as client:
        reply = await client.completions.create(model="tiny", prompt="ab")
    assert reply.choices[0].text == "ok"
    assert len(gateway.frontend.submitted) == 3


async def test_refusal_of_one_sample_cancels_the_others():
    def script(request, payload):
        return REFUSED if request.id.endswith("-1") else [asyncio.Event()]

    gateway = Gateway(script)
    assert (await gateway.complete(n=2, temperature=1)).status_code == 429
    await until(lambda: gateway.observer.in_flight == 0)
    assert list(gateway.frontend.cancels.values()) == ["cancelled"]


@pytest.mark.parametrize("failure", [FAILED, RuntimeError("boom")])
async def test_failure_before_any_text_is_500(failure):
    """Fault 2F: an engine error is not "busy"; the next request is served (fault 14)."""
    gateway = Gateway([failure])
    response = await gateway.complete()
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "boom" not in response.text
    assert gateway.observer.ends == [("error", 0)]
    gateway.frontend.script = lambda request, payload: [byte_ids("ok")]
    assert (await gateway.complete()).json()["choices"][0]["text"] == "ok"


@pytest.mark.parametrize("failure", [FAILED, RuntimeError("boom")])
async def test_failure_in_a_stream_is_one_event_and_the_end(failure):
    """Faults 47, 61."""
    response = await Gateway([byte_ids("hel"), failure]).chat(stream=True)
    events = [block for block in response.text.split("\n\n") if block]
    assert [json.loads(event[6:]).get("error") is not None for event in events] == [0, 0, 1]


async def test_official_client_raises_on_failure_in_a_stream():
    """Fault 47."""
    async with Gateway([byte_ids("hel"), FAILED]).openai() as client:
        stream = await client.completions.create(model="tiny", prompt="ab", stream=True)
        assert (await anext(stream)).choices[0].text == "hel"
        with pytest.raises(openai.APIError, match="instance lost"):
            await anext(stream)


async def test_failure_after_a_stop_string_does_not_matter():
    response = await Gateway([byte_ids("heSTOP"), FAILED]).complete(stop="STOP")
    assert response.json()["choices"][0]["text"] == "he"


async def test_server_side_cancellation_is_503():
    ended = RequestEnded(FinishReason.CANCELLED, RequestReport())
    assert (await Gateway([ended]).complete()).status_code == 503


@pytest.mark.parametrize("stream", [False, True])
async def test_hang_up_cancels_within_one_step(stream):
    """Fault 56: two steps were made, a third never comes."""
    gate = asyncio.Event()
    gateway = Gateway([byte_ids("he"), byte_ids("l"), gate, byte_ids("l"), byte_ids("o")])
    call = RawCall(gateway.app, "/v1/completions", {"prompt": "ab", "stream": stream})
    await until(lambda: gateway.frontend.forwards and [*gateway.frontend.forwards.values()] == [2])
    assert gateway.observer.in_flight == 1
    call.hang_up()
    await call.task
    await until(lambda: gateway.observer.in_flight == 0)
    assert [*gateway.frontend.cancels.values()] == ["cancelled"]
    assert [*gateway.frontend.forwards.values()] == [2]
    assert not gateway.frontend.running
    assert gateway.observer.ends == [("cancelled", 3)]


@pytest.mark.parametrize("stream", [False, True])
async def test_hang_up_while_queued(stream):
    """Fault 56, before any text and before any header."""
    gateway = Gateway([asyncio.Event(), byte_ids("l")])
    call = RawCall(gateway.app, "/v1/completions", {"prompt": "ab", "stream": stream})
    await until(lambda: gateway.frontend.running)
    call.hang_up()
    await call.task
    await until(lambda: not gateway.frontend.running)
    assert gateway.observer.ends == [("cancelled", 0)]


async def test_hang_up_before_work_began():
    """Fault 56: a request whose client is gone already is never submitted."""
    gateway = Gateway([byte_ids("hello")])
    call = RawCall(gateway.app, "/v1/completions", {"prompt": "ab"})
    call.hang_up()
    await call.task
    assert gateway.frontend.submitted == []
    assert gateway.observer.ends == []


async def test_a_stream_shows_text_as_it_comes_and_pings_in_silence():
    gate = asyncio.Event()
    gateway = Gateway([byte_ids("hel"), gate, byte_ids("lo"), [EOS]], ping_s=0.001)
    call = RawCall(gateway.app, "/v1/completions", {"prompt": "ab", "stream": True})
    await call.until('"hel"')
    await call.until(": ping")
    gate.set()
    await call.until('"lo"')
    await call.until("[DONE]")
    await call.task


async def test_silence_before_the_first_update_starts_the_stream():
    """A late refusal is then an event, since the status is already sent."""
    gate = asyncio.Event()
    gateway = Gateway([gate, *REFUSED], ping_s=0.001)
    call = RawCall(gateway.app, "/v1/completions", {"prompt": "ab", "stream": True})
    await call.until(": ping")
    gate.set()
    await call.until("rate_limit_error")
    await call.task


async def test_readiness_is_not_health():
    """Faults 58, 59."""
    gateway = Gateway()
    gateway.frontend.is_ready = False
    async with gateway.http() as client:
        status = {
            path: (await client.get(path)).status_code
            for path in ("/health", "/live", "/ping", "/ready", "/v1/models", "/v1/models/tiny")
        }
        assert status == {
            "/health": 200,
            "/live": 200,
            "/ping": 200,
            "/ready": 503,
            "/v1/models": 503,
            "/v1/models/tiny": 503,
        }
        assert (await gateway.complete()).status_code == 503
        gateway.frontend.is_ready, gateway.frontend.is_healthy = True, False
        assert (await client.get("/ready")).status_code == 200
        assert (await client.get("/health")).status_code == 503
        assert [m["id"] for m in (await client.get("/v1/models")).json()["data"]] == ["tiny"]

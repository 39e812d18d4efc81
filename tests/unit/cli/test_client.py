import asyncio
import itertools
import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepserve.cli.client import Client, Outcome, Reply, SSEDecoder, TextEvent
from stepserve.core.errors import FieldError, StepserveError

STREAM = (
    ": ping\r\n\r\n"
    'data: {"a": "é\U0001f600"}\n\n'
    "event: dlm.snapshot\ndata:x\n\n"
    "id: 7\nretry: 10\n\n"
    "data: one\r\ndata:  two\r\n\r\n"
    "data\rdata: [DONE]\r\r"
    "\n"
)
EVENTS = [
    ("", '{"a": "é\U0001f600"}'),
    ("dlm.snapshot", "x"),
    ("", "one\n two"),
    ("", "\n[DONE]"),
]


@given(st.lists(st.integers(0, len(STREAM.encode())), max_size=20))
def test_sse_events_do_not_depend_on_the_chunks(cuts):
    data, decoder = STREAM.encode(), SSEDecoder()
    edges = [0, *sorted(cuts), len(data)]
    chunks = [data[a:b] for a, b in itertools.pairwise(edges)]
    assert [event for chunk in chunks for event in decoder.feed(chunk)] == EVENTS


def test_an_event_that_is_cut_off_is_dropped():
    assert SSEDecoder().feed(b"data: 1\n\ndata: 2\n") == [("", "1")]


@given(st.lists(st.binary(max_size=30)))
def test_no_bytes_break_the_decoder(chunks):
    decoder = SSEDecoder()
    for chunk in chunks:
        decoder.feed(chunk)


def chunk(text=None, finish=None, tokens=None, **more):
    choice = {"index": 0, "delta": {} if text is None else {"content": text}}
    usage = {"usage": {"completion_tokens": tokens}} if tokens else {}
    return json.dumps({"choices": [{**choice, "finish_reason": finish}], **usage, **more})


def test_a_reply_gathers_text_usage_and_cost():
    reply = Reply(sent_s=0.0)
    reply.take("", chunk(), 1.0)  # the role
    reply.take("", chunk("Hi", tokens=2), 2.0)
    reply.take("dlm.snapshot", "provisional, of any shape", 2.5)
    reply.take("", chunk(" you", tokens=5), 3.0)
    reply.take("", chunk(None, "stop"), 3.0)
    cost = {"metrics": {"forwards": 4}, "dlm": {"threshold_mean": 0.8}}
    reply.take("", json.dumps({"choices": [], "usage": None, **cost}), 3.5)
    reply.take("", "[DONE]", 4.0)
    assert reply.text == "Hi you"
    assert reply.events == [TextEvent(2.0, 2), TextEvent(3.0, 5)]
    assert (reply.outcome, reply.tokens, reply.objects) == (Outcome.COMPLETED, 5, cost)
    assert reply.told == {"metrics.forwards": 4, "dlm.threshold_mean": 0.8}
    assert not reply.odd


@pytest.mark.parametrize(
    ("sent", "name"),
    [
        ({"dlm": [1]}, "dlm"),
        ({"metrics": "none"}, "metrics"),
        ({"metrics": {"forwards": "many"}}, "metrics.forwards"),
        ({"dlm": {"threshold_mean": True}}, "dlm.threshold_mean"),
        ({"usage": {"completion_tokens": "5"}}, "usage.completion_tokens"),
        ({"usage": [5]}, "usage"),
    ],
)
def test_names_that_another_server_uses_otherwise_are_left_out(sent, name):
    reply = Reply(sent_s=0.0)
    assert reply.take("", chunk("Hi", "stop", **sent), 1.0) == "Hi"
    assert (reply.outcome, reply.odd) == (Outcome.COMPLETED, {name})
    assert (reply.told, reply.tokens) == ({}, None)


def test_completions_chunks_carry_text():
    reply = Reply(sent_s=0.0)
    piece = {"choices": [{"text": "a", "finish_reason": "length"}]}
    assert reply.take("", json.dumps(piece), 1.0) == "a"
    assert reply.outcome is Outcome.COMPLETED


def client(handler, **options):
    return Client("http://test/v1/", transport=httpx.MockTransport(handler), **options)


def streaming(*pieces):
    """A handler that sends each (delay, data) as an event."""

    async def body():
        for delay_s, data in pieces:
            await asyncio.sleep(delay_s)
            yield f"data: {data}\n\n".encode()

    async def handler(request):
        return httpx.Response(200, content=body())

    return handler


def ask(run_virtual, handler, **options):
    async def go():
        async with client(handler, **options) as server:
            return await server.ask(server.body("m", [{"role": "user", "content": "?"}], {}))

    return run_virtual(go())


def test_times_are_those_of_the_events(run_virtual):
    handler = streaming((0.5, chunk("a")), (0.25, chunk("b", "stop")), (1.0, "[DONE]"))
    reply = ask(run_virtual, handler)
    assert [event.at_s for event in reply.events] == pytest.approx([0.5, 0.75])
    assert (reply.sent_s, reply.ended_s) == (0.0, pytest.approx(1.75))
    assert reply.outcome is Outcome.COMPLETED


@pytest.mark.parametrize(
    ("handler", "outcome", "error"),
    [
        (lambda r: httpx.Response(429, json={"error": {"message": "full"}}), "rejected", "full"),
        (lambda r: httpx.Response(500, text="oops"), "failed", "HTTP 500: oops"),
        (lambda r: httpx.Response(400, json={"error": "no"}), "failed", "HTTP 400: no"),
        (streaming((0, chunk("a"))), "failed", "without a finish reason"),
        (streaming((0, chunk("a", "stop")), (0, '{"error": {"message": "x"}}')), "failed", "x"),
        (streaming((0, "{not json")), "failed", "JSONDecodeError"),
        (streaming((0, "[1]")), "failed", "list"),
        (streaming((99, chunk("late", "stop"))), "failed", "no end within 5 s"),
    ],
)
def test_every_failure_is_told_in_the_reply(run_virtual, handler, outcome, error):
    reply = ask(run_virtual, handler, timeout_s=5.0)
    assert reply.outcome == outcome
    assert error in reply.error


def test_a_lost_connection_is_a_failure(run_virtual):
    def handler(request):
        raise httpx.ReadError("gone")

    reply = ask(run_virtual, handler)
    assert (reply.outcome, reply.error) == (Outcome.FAILED, "ReadError: gone")


def model(run_virtual, handler, given=None):
    async def go():
        async with client(handler) as server:
            return await server.model(given)

    return run_virtual(go())


def test_the_first_listed_model_is_used_unless_one_is_given(run_virtual):
    assert model(run_virtual, lambda r: httpx.Response(200, json={"data": [{"id": "m"}]})) == "m"
    assert model(run_virtual, lambda r: httpx.Response(404), given="mine") == "mine"


@pytest.mark.parametrize(
    "answer", [httpx.Response(404), httpx.Response(200, json={"data": []}), httpx.Response(200)]
)
def test_a_server_without_models_asks_for_one(run_virtual, answer):
    with pytest.raises(StepserveError, match="--model"):
        model(run_virtual, lambda r: answer)


def test_an_unreachable_server_is_named(run_virtual):
    def handler(request):
        raise httpx.ConnectError("refused")

    with pytest.raises(StepserveError, match="cannot reach http://test: refused"):
        model(run_virtual, handler, given="mine")


def test_a_malformed_url_names_its_option():
    with pytest.raises(FieldError, match="--url: Invalid port"):
        Client("http://host:port")


def test_given_fields_replace_the_standard_ones():
    fields = {"model": "other", "stream_options": {"include_usage": True}}
    body = Client("http://test").body("m", [], fields)
    assert body == {"messages": [], "stream": True, **fields}


def test_endpoint_decides_path_and_shape(run_virtual, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    seen = []

    async def handler(request):
        seen.append((request.url.path, json.loads(request.content), request.headers))
        return httpx.Response(500)

    ask(run_virtual, handler)
    ask(run_virtual, handler, endpoint="completions")
    (chat, body, headers), (completions, other, _) = seen
    assert (chat, body["messages"]) == ("/v1/chat/completions", [{"role": "user", "content": "?"}])
    assert (completions, other["prompt"]) == ("/v1/completions", "?")
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert headers["authorization"] == "Bearer secret"

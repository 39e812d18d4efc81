"""``/v1/chat/completions``."""

import pytest

from gateway.scripted import BOS, EOS, SEP, TOKENIZER, Gateway, byte_ids, stream_events
from stepserve.core.payload import SettledToken

HELLO = [byte_ids(" hel"), byte_ids("lo"), [EOS]]
USER = {"role": "user", "content": "ab"}


async def test_official_client_streams_and_collects_the_same():
    """Faults 37, 48, 49; a leading space is text (2F)."""
    async with Gateway(HELLO).openai() as client:
        whole = await client.chat.completions.create(model="tiny", messages=[USER])
        async with client.chat.completions.stream(model="tiny", messages=[USER]) as stream:
            collected = await stream.get_final_completion()
    assert whole.choices[0].message.content == " hello"
    assert collected.choices[0].message.content == " hello"
    assert collected.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"


async def test_shape_of_a_stream():
    """docs/api.md: role first, one id and time, one finish reason, the summary last."""
    events = stream_events(await Gateway(HELLO).chat(stream=True))
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": " hel"},
        {"content": "lo"},
        {},
    ]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None, None, None, "stop"]
    assert "metrics" in events[-1]
    assert "dlm" in events[-1]


async def test_samples_of_a_stream_keep_their_index():
    body = {"n": 2, "temperature": 1, "stream": True}
    texts = {0: "", 1: ""}
    for event in stream_events(await Gateway(HELLO).chat(**body)):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == {0: " hello", 1: " hello"}


@pytest.mark.parametrize(
    "message",
    [
        USER,
        USER | {"name": None},
        {"role": "user", "content": [{"type": "text", "text": "ab"}]},
        USER | {"tool_calls": None},
        USER | {"tool_calls": []},
    ],
)
async def test_message_forms(message):
    """``name: null`` comes from AIPerf."""
    gateway = Gateway(HELLO)
    response = await gateway.chat(messages=[message])
    assert response.status_code == 200
    assert gateway.frontend.submitted[0][1].prompt_ids == (BOS, *TOKENIZER.encode("ab"), SEP)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([USER, {"role": "system", "content": "x"}], "system message must come first"),
        ([{"role": "alien", "content": "x"}], "unknown role alien"),
        ([USER | {"content": None}], "must be a string"),
        ([USER | {"content": [{"type": "image_url", "image_url": {}}]}], "parts of type text"),
        ([USER | {"tool_calls": [{"id": "1"}]}], "tool calling"),
        ([{"content": "x"}], "role"),
        ([], "at least 1"),
        ("hello", "list"),
        (None, "list"),
    ],
)
async def test_odd_messages_are_400(messages, words):
    """Fault 45."""
    response = await Gateway(HELLO).chat(messages=messages)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"].startswith("messages")
    assert words in error["message"]


async def test_logprobs():
    (a,) = byte_ids("a")
    gateway = Gateway([[SettledToken(0, a, -0.5, ((a, -0.5),))]])
    reply = (await gateway.chat(logprobs=True, top_logprobs=1)).json()
    token = {"token": "a", "logprob": -0.5, "bytes": [97]}
    assert reply["choices"][0]["logprobs"] == {"content": [token | {"top_logprobs": [token]}]}
    assert gateway.frontend.submitted[0][1].sampling.logprobs == 1


async def test_logprobs_of_batched_neighbours_stay_apart():
    """Fault 13: only the request that asked has them."""
    (a,) = byte_ids("a")
    gateway = Gateway([[SettledToken(0, a, -0.5)]])
    with_scores = await gateway.chat(logprobs=True)
    without = await gateway.chat()
    assert with_scores.json()["choices"][0]["logprobs"] is not None
    assert without.json()["choices"][0]["logprobs"] is None


async def test_service_tier_is_echoed():
    reply = (await Gateway(HELLO).chat(service_tier="priority")).json()
    assert reply["service_tier"] == "priority"
    assert reply["slo"]["class"] == "interactive"

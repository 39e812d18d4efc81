"""``/v1/chat/completions``."""

import typing

import pytest
from openai.types.shared import ReasoningEffort

from gateway.scripted import (
    AUTOREGRESSIVE,
    BOS,
    EOS,
    SEP,
    TOKENIZER,
    Gateway,
    build_tokenizer,
    byte_ids,
    card,
    stream_events,
)
from stepserve.core.payload import SettledToken

HELLO = [byte_ids(" hel"), byte_ids("lo"), [EOS]]
USER = {"role": "user", "content": "ab"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 5}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
ASSISTANT = {"role": "assistant"}


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
    ("message", "role", "text"),
    [
        (ASSISTANT, "assistant", ""),
        (ASSISTANT | {"content": None}, "assistant", ""),
        (ASSISTANT | {"content": None, "tool_calls": []}, "assistant", ""),
        (
            ASSISTANT | {"content": "ab", "tool_calls": None, "function_call": None},
            "assistant",
            "ab",
        ),
        (ASSISTANT | {"content": None, "refusal": "no"}, "assistant", "no"),
        (ASSISTANT | {"content": [{"type": "refusal", "refusal": "no"}]}, "assistant", "no"),
        (ASSISTANT | {"content": "ab", "refusal": None, "annotations": []}, "assistant", "ab"),
        ({"role": "developer", "content": "ab"}, "system", "ab"),
        (
            {
                "role": "developer",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            "system",
            "a\nb",
        ),
    ],
)
async def test_histories_of_agents(message, role, text):
    """Turns as the official schema has them, and as the official client gives replies back."""
    gateway = Gateway(HELLO, tokenizer=build_tokenizer(chat_template=ROLES))
    first = [message] if role == "system" else []
    last = [] if role == "system" else [message]
    response = await gateway.chat(messages=[*first, USER, *last])
    assert response.status_code == 200, response.text
    assert "x-stepserve-ignored-fields" not in response.headers
    shown = TOKENIZER.decode(gateway.frontend.submitted[0][1].prompt_ids)
    turns = [("user", "ab"), (role, text)]
    turns = turns[::-1] if role == "system" else turns
    assert shown == "".join(f"[{r}|{t}]" for r, t in turns)


ROLES = "{% for m in messages %}[{{ m['role'] }}|{{ m['content'] }}]{% endfor %}"
CALLING = (
    "{% for m in messages %}[{{ m.role }}|{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<{{ call.function.name }} "
    "{{ call.function.arguments.x }}>{% endfor %}"
    "{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}]{% endfor %}"
)
DEAF = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"


async def test_a_model_that_knows_tool_calls_sees_them():
    gateway = Gateway(HELLO, tokenizer=build_tokenizer(chat_template=CALLING))
    result = {"role": "tool", "content": "25", "tool_call_id": "1"}
    response = await gateway.chat(messages=[USER, CALLS, result], tool_choice="none", tools=[{}])
    assert response.status_code == 200, response.text
    assert response.headers["x-stepserve-ignored-fields"] == "tools"
    shown = TOKENIZER.decode(gateway.frontend.submitted[0][1].prompt_ids)
    assert shown == "[user|ab][assistant|<f 5>][tool|25#1]"


async def test_results_that_a_template_would_leave_out_are_refused():
    gateway = Gateway(HELLO, tokenizer=build_tokenizer(chat_template=DEAF))
    response = await gateway.chat(messages=[USER, {"role": "tool", "content": "25"}])
    assert response.status_code == 400
    assert "leaves out messages of role 'tool'" in response.json()["error"]["message"]


@pytest.mark.parametrize("effort", typing.get_args(typing.get_args(ReasoningEffort)[0]))
async def test_every_reasoning_effort_of_the_official_schema(effort):
    gateway = Gateway(HELLO)
    assert (await gateway.chat(reasoning_effort=effort)).status_code == 200
    bounds = gateway.frontend.submitted[0][0].diffusion.thresholds
    assert bounds.floor <= bounds.preferred <= 0.9
    plain = await Gateway(HELLO, model=card(**AUTOREGRESSIVE)).chat(reasoning_effort=effort)
    assert plain.status_code == (200 if effort == "none" else 400)


@pytest.mark.parametrize(
    ("tier", "slo_class"), [("fast", "interactive"), ("scale", "standard"), ("flex", "batch")]
)
async def test_service_tiers_of_the_official_schema(tier, slo_class):
    reply = (await Gateway(HELLO).chat(service_tier=tier)).json()
    assert reply["slo"]["class"] == slo_class


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([USER, {"role": "system", "content": "x"}], "system message must come first"),
        ([{"role": "alien", "content": "x"}], "unknown role alien"),
        ([USER | {"content": None}], "must be a string"),
        ([USER | {"content": [{"type": "image_url", "image_url": {}}]}], "parts of type text"),
        ([USER | {"content": [{"type": "text", "text": 5}]}], "parts of type text"),
        ([{"role": "user"}], "must be a string"),
        ([{"role": "tool", "tool_call_id": "1"}], "must be a string"),
        ([USER, CALLS], "knows no tool calls"),
        ([USER, CALLS | {"tool_calls": [{"id": "1"}]}], "function"),
        ([{"role": "tool", "content": "5", "tool_call_id": "1"}], "unknown role tool"),
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

"""``/v1/completions`` through the official client and as raw HTTP."""

import asyncio
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.scripted import (
    AUTOREGRESSIVE,
    BOS,
    EOS,
    SEP,
    TOKENIZER,
    Gateway,
    byte_ids,
    card,
    stream_events,
    stripping,
)
from stepserve.core.payload import SettledToken

HELLO = [byte_ids("hel"), byte_ids("lo 🙂")[:-1], [*byte_ids("lo 🙂")[-1:], EOS]]


async def streamed(client, **body):
    """Texts and finish reasons of a stream by choice, and the last usage."""
    texts, reasons, usage = {}, {}, None
    stream = await client.completions.create(model="tiny", prompt="ab", stream=True, **body)
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                assert choice.index not in reasons, "fault 48: exactly one reason"
                reasons[choice.index] = choice.finish_reason
        usage = chunk.usage or usage
    return texts, reasons, usage


async def test_stream_equals_whole_answer():
    """Faults 37, 40, 48."""
    async with Gateway(HELLO).openai() as client:
        whole = await client.completions.create(model="tiny", prompt="ab")
        texts, reasons, _ = await streamed(client)
    assert whole.choices[0].text == texts[0] == "hello 🙂"
    assert whole.choices[0].finish_reason == reasons[0] == "stop"
    assert whole.object == "text_completion"


@pytest.mark.parametrize(
    ("stop", "first"), [("o 🙂", "o 🙂"), (["xyz", "lo"], "lo"), ("l", "l"), (["x" * 99, "l"], "l")]
)
async def test_stop_string_over_steps(stop, first):
    """Faults 34, 38: hidden in both forms, the rest is cancelled and not billed."""
    gateway = Gateway([*HELLO, [7] * 5, [7] * 5])
    async with gateway.openai() as client:
        whole = await client.completions.create(model="tiny", prompt="ab", stop=stop)
        texts, reasons, usage = await streamed(
            client, stop=stop, stream_options={"include_usage": True}
        )
    assert whole.choices[0].text == texts[0] == "hello 🙂".partition(first)[0]
    assert whole.choices[0].stop_reason == first
    assert reasons == {0: "stop"}
    assert whole.usage.completion_tokens == usage.completion_tokens
    assert set(gateway.frontend.cancels.values()) == {"stop"}
    assert len(gateway.frontend.cancels) == 2


@settings(max_examples=25, deadline=None)
@given(
    st.text(alphabet="ab☃🙂", min_size=1, max_size=12),
    st.lists(st.integers(1, 6), min_size=1, max_size=12),
    st.lists(st.text(alphabet="ab☃", min_size=1, max_size=3), max_size=3),
)
async def test_any_chunking_streams_the_whole_answer(text, sizes, stops):
    """Faults 34, 37, 38 through HTTP: text, end and usage are the same in both forms."""
    ids, script = [*byte_ids(text), EOS], []
    for size in [*sizes, *[1] * len(ids)]:
        if ids:
            script.append(ids[:size])
            ids = ids[size:]
    gateway = Gateway(script)
    whole = (await gateway.complete(stop=stops)).json()
    events = stream_events(
        await gateway.complete(stop=stops, stream=True, stream_options={"include_usage": True})
    )
    *chunks, last = events
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole["choices"][0]["text"]
    for name in ("finish_reason", "stop_reason"):
        assert chunks[-1]["choices"][0][name] == whole["choices"][0][name]
    assert last["usage"] == whole["usage"]


async def test_stop_in_the_middle_of_a_step_bills_up_to_it():
    """Fault 32."""
    gateway = Gateway([byte_ids("abSTOPcdef")])
    reply = (await gateway.complete(stop="STOP")).json()
    assert reply["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    assert gateway.observer.ends == [("stop", 6)]


async def test_limit_is_exact_though_blocks_are_not():
    """Faults 1, 78: 5 is no multiple of the block of 16."""
    gateway = Gateway([[EOS] * 5, byte_ids("a" * 11)])
    reply = (await gateway.complete(max_tokens=5, ignore_eos=True)).json()
    assert reply["usage"]["completion_tokens"] == 5
    assert reply["choices"][0]["finish_reason"] == "length"
    assert gateway.frontend.submitted[0][0].max_output_tokens == 5


@pytest.mark.parametrize(
    ("body", "least"),
    [
        ({"ignore_eos": True}, 20),
        ({"ignore_eos": True, "stop": []}, 20),
        ({"ignore_eos": True, "stop": "x", "min_tokens": 7}, 7),
        ({"ignore_eos": True, "stop_token_ids": [9]}, 0),
        ({"min_tokens": 7}, 7),
        ({}, 0),
    ],
)
async def test_forecasts_are_told_what_the_request_makes_certain(body, least):
    gateway = Gateway([[7] * 20])
    await gateway.complete(max_tokens=20, **body)
    assert gateway.frontend.submitted[0][0].min_output_tokens == least


async def test_default_limit_is_reported():
    """Fault 18."""
    gateway = Gateway(HELLO)
    reply = (await gateway.complete()).json()
    assert reply["metrics"]["max_tokens"] == 48
    async with gateway.http() as client:
        listed = (await client.get("/v1/models")).json()["data"][0]
    assert listed["default_max_tokens"] == 48


async def test_default_limit_shrinks_to_whole_blocks_of_the_context():
    gateway = Gateway(HELLO)
    await gateway.complete(prompt=[7] * 100)
    assert gateway.frontend.submitted[0][0].max_output_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [(BOS, *TOKENIZER.encode("ab"), SEP)]),
        (["ab", "c"], [(BOS, *TOKENIZER.encode(text), SEP) for text in ("ab", "c")]),
        ([7, 8], [(7, 8)]),
        ([[7], [8, 9]], [(7,), (8, 9)]),
    ],
)
async def test_prompt_forms(prompt, ids):
    gateway = Gateway(HELLO)
    reply = (await gateway.complete(prompt=prompt)).json()
    assert [payload.prompt_ids for _, payload in gateway.frontend.submitted] == ids
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(ids)))
    assert reply["usage"]["prompt_tokens"] == sum(map(len, ids))


async def test_prompts_run_together_and_keep_their_order():
    """Fault 54: every prompt is at work before any is done; the first one ends last."""
    gates = [asyncio.Event() for _ in range(64)]

    def script(request, payload):
        number = int(request.id.rsplit("-", 1)[1])
        if number < 63:
            return [gates[number], byte_ids(f"{number}"), Opens(gates, number - 1)]
        everyone = len(gateway.frontend.running) == 64
        return [byte_ids(f"{number}" if everyone else "alone"), Opens(gates, number - 1)]

    gateway = Gateway(script)
    reply = (await gateway.complete(prompt=["ab"] * 64)).json()
    assert [choice["text"] for choice in reply["choices"]] == [str(k) for k in range(64)]


class Opens(asyncio.Event):
    """An item of a script that opens a gate when it is reached."""

    def __init__(self, gates, number):
        super().__init__()
        self._gates, self._number = gates, number

    async def wait(self):
        if self._number >= 0:
            self._gates[self._number].set()
        return True


async def test_samples_use_consecutive_seeds():
    """Faults 7, 2F: n is not ignored."""
    gateway = Gateway(HELLO)
    reply = (await gateway.complete(prompt=["ab", "c"], n=3, seed=41, temperature=1)).json()
    seeds = [payload.sampling.seed for _, payload in gateway.frontend.submitted]
    assert seeds == [41, 42, 43] * 2
    assert len(reply["choices"]) == 6
    assert reply["usage"]["prompt_tokens"] == 3 + 3, "a prompt counts once"


async def test_default_seed_is_random_unless_greedy():
    """Fault 52: the default temperature is 0."""
    gateway = Gateway(HELLO)
    for temperature in (None, 0, 1, 1):
        await gateway.complete(temperature=temperature)
    sampling = [payload.sampling for _, payload in gateway.frontend.submitted]
    assert [s.temperature for s in sampling] == [0, 0, 1, 1]
    assert sampling[0].seed == sampling[1].seed == 0
    assert sampling[2].seed != sampling[3].seed


async def test_sampling_fields_reach_the_engine():
    """Fault 7, 2F: each accepted field changes something."""
    gateway = Gateway(HELLO)
    body = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": -1}
    await gateway.complete(**body, min_tokens=2, stop_token_ids=[9], ignore_eos=True, logprobs=3)
    sampling = gateway.frontend.submitted[0][1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 5)
    assert (sampling.min_p, sampling.seed, sampling.logprobs) == (0.1, 2**63 - 1, 3)
    assert (sampling.min_tokens, sampling.stop_token_ids) == (2, (9,))
    assert sampling.ignore_eos


@pytest.mark.parametrize("top_k", [-1, 0])
async def test_both_spellings_of_no_top_k(top_k):
    gateway = Gateway(HELLO)
    await gateway.complete(top_k=top_k)
    assert gateway.frontend.submitted[0][1].sampling.top_k == 0


async def test_logprobs():
    """Fault 25: those of the step that settled the token, as the engine gives them."""
    a, b = byte_ids("ab")
    tokens = [SettledToken(0, a, -0.5, ((a, -0.5), (b, -1.0))), SettledToken(1, b, -0.25, ())]
    gateway = Gateway([tokens])
    whole = (await gateway.complete(logprobs=2)).json()["choices"][0]["logprobs"]
    assert whole == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -0.25],
        "top_logprobs": [{"a": -0.5, "b": -1.0}, {}],
        "text_offset": [0, 1],
    }
    events = stream_events(await gateway.complete(logprobs=2, stream=True))
    assert events[0]["choices"][0]["logprobs"] == whole
    assert (await gateway.complete()).json()["choices"][0]["logprobs"] is None


async def test_a_leading_space_that_the_decoder_drops(monkeypatch):
    """Whole and streamed alike; after the echo of the prompt it stays, between two words."""
    monkeypatch.setattr(TOKENIZER, "_pieces", stripping()._pieces)
    space, a, b = byte_ids(" ab")
    gateway = Gateway([[space, a], [b]])
    whole = (await gateway.complete(logprobs=0)).json()["choices"][0]
    assert (whole["text"], whole["logprobs"]["text_offset"]) == ("ab", [0, 0, 1])
    events = stream_events(await gateway.complete(stream=True, logprobs=0))
    assert "".join(event["choices"][0]["text"] for event in events) == "ab"
    offsets = [event["choices"][0]["logprobs"] for event in events[:2]]
    assert [o["text_offset"] for o in offsets] == [[0, 0], [1]]
    echoed = (await gateway.complete(echo=True)).json()["choices"][0]
    assert echoed["text"] == "ab ab"


async def test_names_of_tokens_are_unique():
    """sglang#32290, vllm#44319: bytes are no text by themselves, and some ids have no name."""
    parts = byte_ids("🙂é")  # six bytes, none of which is a character
    tops = [*parts, 700, 701]
    scores = tuple((index, -1.0 - k) for k, index in enumerate(tops))
    gateway = Gateway([[SettledToken(k, i, -1.0, scores) for k, i in enumerate(parts)]])
    choice = (await gateway.complete(logprobs=8)).json()["choices"][0]
    assert choice["text"] == "🙂é"
    logprobs = choice["logprobs"]
    names = [rf"bytes:\x{byte:02x}" for byte in "🙂é".encode()]
    assert logprobs["tokens"] == names
    expected = dict(zip([*names, "token_id:700", "token_id:701"], range(8), strict=True))
    assert logprobs["top_logprobs"][0] == {name: -1.0 - k for name, k in expected.items()}
    assert logprobs["text_offset"] == [0, 0, 0, 0, 1, 1], "where their characters begin"
    chat = (await gateway.chat(logprobs=True, top_logprobs=8)).json()["choices"][0]["logprobs"]
    top = chat["content"][0]["top_logprobs"]
    assert [entry["token"] for entry in top] == list(expected)
    assert top[0]["bytes"] == ["🙂".encode()[0]]


async def test_the_best_of_a_name_has_it(monkeypatch):
    """Whatever their order; the others go by their ids."""
    a, b, c = byte_ids("abc")
    monkeypatch.setitem(TOKENIZER._pieces.table, b, b"a")
    gateway = Gateway([[SettledToken(0, a, -3.0, ((a, -3.0), (c, -2.0), (b, -1.0)))]])
    choice = (await gateway.complete(logprobs=3)).json()["choices"][0]
    assert choice["logprobs"]["top_logprobs"] == [{"a": -1.0, "c": -2.0, f"token_id:{a}": -3.0}]


async def test_offsets_of_special_tokens_and_over_chunks():
    e1, e2 = byte_ids("é")
    (a,) = byte_ids("a")
    gateway = Gateway([[a, e1], [e2, SEP], [a]])
    whole = (await gateway.complete(logprobs=0)).json()["choices"][0]
    assert whole["text"] == "aéa"
    assert whole["logprobs"]["text_offset"] == [0, 1, 1, 2, 2]
    events = stream_events(await gateway.complete(logprobs=0, stream=True))
    chunks = [event["choices"][0]["logprobs"] for event in events]
    offsets = [offset for chunk in chunks if chunk for offset in chunk["text_offset"]]
    assert offsets == [0, 1, 1, 2, 2]


async def test_a_token_ruled_out_has_a_finite_logprob():
    """JSON has no infinity."""
    a, b = byte_ids("ab")
    gateway = Gateway([[SettledToken(0, a, 0.0, ((a, 0.0), (b, -math.inf)))]])
    choice = (await gateway.complete(logprobs=2)).json()["choices"][0]
    assert choice["logprobs"]["top_logprobs"] == [{"a": 0.0, "b": -9999.0}]


@pytest.mark.parametrize("prompt", ["hello", list(TOKENIZER.encode("hello"))])
async def test_echo(prompt):
    gateway = Gateway([byte_ids("!")])
    assert (await gateway.complete(prompt=prompt, echo=True)).json()["choices"][0][
        "text"
    ] == "hello!"
    events = stream_events(await gateway.complete(prompt=prompt, echo=True, stream=True))
    assert "".join(event["choices"][0]["text"] for event in events) == "hello!"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hello", [7] * 128])
async def test_echo_without_generation_is_the_prompt(prompt, stream):
    """Also of a prompt that leaves no room for any answer."""
    gateway = Gateway([RuntimeError("no step is run")])
    body = {"prompt": prompt, "echo": True, "max_tokens": 0, "stream": stream}
    response = await gateway.complete(**body, slo={"e2e_ms": 500})
    assert response.status_code == 200
    choices = [c for e in stream_events(response) for c in e["choices"]] if stream else None
    choices = choices or response.json()["choices"]
    shown = prompt if isinstance(prompt, str) else TOKENIZER.decode(prompt)
    assert "".join(choice["text"] for choice in choices) == shown
    assert choices[-1]["finish_reason"] == "length"
    assert gateway.frontend.submitted == []
    assert gateway.observer.ends == [("length", 0)]
    last = stream_events(response)[-1] if stream else response.json()
    assert last["slo"]["status"] == "met"
    assert "x-stepserve-max-tokens" not in response.headers


async def test_nothing_is_no_answer():
    for call, body in (("complete", {}), ("chat", {}), ("chat", {"echo": False})):
        response = await getattr(Gateway(), call)(max_tokens=0, **body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize("asked", [None, {}, {"include_usage": False}])
async def test_no_usage_unless_asked(asked):
    """Fault 50."""
    events = stream_events(await Gateway(HELLO).complete(stream=True, stream_options=asked))
    assert all("usage" not in event for event in events)
    assert all(event["choices"] for event in events)


async def test_usage_chunk_is_last_and_without_choices():
    """Fault 50, with both options as guidellm sends them."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = stream_events(await Gateway(HELLO).complete(stream=True, stream_options=options))
    assert events[-1]["choices"] == []
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 3 + 6 + 2, "the end-of-text token is billed"
    assert {"metrics", "slo", "dlm"} <= events[-1].keys()
    assert not {"metrics", "slo", "dlm"} & events[-2].keys()


@pytest.mark.parametrize("options", [{}, {"stream": True}])
async def test_replies_of_autoregressive_models_do_not_speak_of_denoising(options):
    gateway = Gateway(HELLO, model=card(**AUTOREGRESSIVE))
    response = await gateway.complete(prompt=[7] * 100, max_tokens=28, **options)
    reply = stream_events(response)[-1] if options else response.json()
    assert "dlm" not in reply
    assert reply["metrics"]["forwards"] == 3
    assert reply["slo"]["class"] == "standard"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dlm", {"block_length": 8}),
        ("threshold", 0.9),
        ("denoising_steps", 4),
        ("reasoning_effort", "low"),
    ],
)
async def test_autoregressive_models_refuse_what_only_diffusion_models_know(name, value):
    refused = await Gateway(HELLO, model=card(**AUTOREGRESSIVE)).complete(**{name: value})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, name)
    assert "an autoregressive model" in error["message"]

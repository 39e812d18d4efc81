"""Size is checked before work, and large inputs do not hold up small ones (vllm#1026, #10635)."""

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from gateway.scripted import TOKENIZER, Gateway, build_tokenizer, byte_ids
from stepserve.gateway.tokenizer import TextTokenizer
from stepserve.gateway.translation import LARGE, TranslationThreads

HELLO = [byte_ids("hello")]


class Counting:
    """The tokenizer, counting what it is given to cut up."""

    def __init__(self):
        self.encoded = []
        self.lead = ""

    def encode(self, text):
        self.encoded.append(text)
        return TOKENIZER.encode(text)

    def __getattr__(self, name):
        return getattr(TOKENIZER, name)


@pytest.mark.parametrize(
    ("call", "body", "param"),
    [
        ("complete", {"prompt": "hello " * 600_000}, "prompt"),
        ("complete", {"prompt": ["a", "hello " * 1000]}, "prompt"),
        ("chat", {"messages": [{"role": "user", "content": "hello " * 1000}]}, "messages"),
    ],
)
async def test_what_cannot_fit_is_refused_uncut(call, body, param):
    tokenizer = Counting()
    response = await getattr(Gateway(HELLO, tokenizer=tokenizer), call)(**body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert "at least" in error["message"]
    assert "context of 128" in error["message"]
    assert not [text for text in tokenizer.encoded if len(text) > 100]


@pytest.mark.parametrize(
    ("prompts", "n", "param"), [(100_001, 1, "prompt"), (129, 1, "prompt"), (65, 2, "n")]
)
async def test_prompts_are_counted_before_any_is_cut_up(prompts, n, param):
    tokenizer = Counting()
    body = {"prompt": ["ab"] * prompts, "n": n, "temperature": 1}
    response = await Gateway(HELLO, tokenizer=tokenizer).complete(**body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert tokenizer.encoded == []


async def test_ids_are_counted_before_they_are_echoed():
    decoded = []

    class Decoding(Counting):
        def decode(self, ids):
            decoded.append(ids)

    response = await Gateway(HELLO, tokenizer=Decoding()).complete(prompt=[7] * 5000, echo=True)
    assert response.status_code == 400
    assert decoded == []


@given(st.text() | st.text(alphabet="helo wrdSTOPab\n "))
def test_characters_bound_tokens_from_below(text):
    assert TOKENIZER.least_tokens(text) <= len(TOKENIZER.encode(text))


@given(st.text(alphabet="a\u0301\u0323\u212b\u1fef\u1112\u1161\u11ab\u1f82 e", max_size=40))
def test_they_do_so_where_characters_are_composed(text):
    assert COMPOSING.least_tokens(text) <= len(COMPOSING.encode(text))


def changed(**parts):
    raw = Tokenizer.from_str(TOKENIZER._tokenizer.to_str())
    for name, part in parts.items():
        setattr(raw, name, part)
    return TextTokenizer(raw, {})


COMPOSING = changed(normalizer=normalizers.NFC())


def test_nothing_is_promised_where_text_may_be_dropped():
    assert TOKENIZER.least_tokens("hello " * 1000) >= 300
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    removing = pre_tokenizers.Split(Regex(" +"), "removed")
    for one in (
        changed(pre_tokenizer=pre_tokenizers.Sequence([removing, level])),
        changed(normalizer=normalizers.Sequence([normalizers.Strip()])),
    ):
        assert one.least_tokens(" " * 100_000) == 0
    raw = Tokenizer.from_str(TOKENIZER._tokenizer.to_str())
    raw.add_special_tokens([AddedToken("<end>", lstrip=True)])
    assert TextTokenizer(raw, {}).least_tokens(" " * 100_000) == 0


def test_tokens_are_those_of_the_tokenizer():
    for text in ("", "hello world", "<eos> ab STOP", "žluťoučký 🙂"):
        ids = TOKENIZER._tokenizer.encode(text, add_special_tokens=False).ids
        assert TOKENIZER.encode(text) == tuple(ids)


async def test_large_inputs_wait_for_each_other_and_small_ones_for_none_of_them():
    threads, gate, order = TranslationThreads(), threading.Event(), []

    def held(name):
        gate.wait()
        order.append(name)

    large = [asyncio.ensure_future(threads.run(LARGE, held, f"large {k}")) for k in range(2)]
    small = [threads.run(10, order.append, k) for k in range(50)]
    await asyncio.gather(*small)
    assert order == list(range(50)), "in their order, while the large ones are under way"
    gate.set()
    await asyncio.gather(*large)
    assert order[50:] == ["large 0", "large 1"]


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_a_request_beside_a_large_one_is_served(path):
    """The large one is being cut up all the while."""
    gate, begun = threading.Event(), threading.Event()

    class Slow(Counting):
        def encode(self, text):
            if len(text) > LARGE:
                begun.set()
                gate.wait()
            return super().encode(text)

        def completion_ids(self, prompt):
            return self.encode(prompt)

        def least_tokens(self, text):
            return 0

    gateway = Gateway(HELLO, tokenizer=Slow())
    async with gateway.http() as client:
        body = {"prompt": "hello " * 10_000}
        large = asyncio.ensure_future(client.post(path, json=body))
        await asyncio.to_thread(begun.wait)
        assert (await gateway.complete()).status_code == 200
        assert not large.done()
        gate.set()
        assert (await large).status_code == (400 if path == "/v1/completions" else 200)


def test_the_chat_template_may_drop_text_before_it_is_counted():
    tokenizer = build_tokenizer(chat_template="{{ messages[-1].content }}")
    messages = [{"role": "user", "content": text} for text in ("x" * 10_000, "ab")]
    assert tokenizer.chat_ids(messages) == TOKENIZER.encode("ab")

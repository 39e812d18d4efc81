"""A frontend that plays scripts, a tiny tokenizer, and clients without sockets."""

import asyncio
import json

import httpx
from fastapi import FastAPI
from openai import AsyncOpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from stepserve.core.config import ServeConfig
from stepserve.core.frontend import RequestEnded, RequestRejected, RequestReport, TokensEmitted
from stepserve.core.payload import SettledToken
from stepserve.core.request import CacheMode, Family, FinishReason, RefreshScope
from stepserve.gateway.app import create_app
from stepserve.gateway.contract import ModelCard
from stepserve.gateway.tokenizer import TextTokenizer
from stepserve.metrics.latency import AnswerTrace, TextEvent, tpot_s

SPECIALS = ("<pad>", "<mask>", "<eos>", "<bos>", "<sep>")
PAD, MASK, EOS, BOS, SEP = range(len(SPECIALS))
CHAT_TEMPLATE = """{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('unknown role ' + message['role']) -}}
{%- elif message['role'] == 'system' and not loop.first -%}
{{- raise_exception('system message must come first') -}}
{%- endif -%}
{%- if message['name'] %}{{- message['name'] }}: {% endif -%}
{{- message['content'] }}{{ sep_token -}}
{%- endfor -%}"""
COMPLETION_TEMPLATE = "{{ bos_token }}{{ prompt }}{{ sep_token }}"


def build_tokenizer(**config):
    """Byte-level BPE over all bytes, with a few merged words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world STOP ab ba"] * 4, trainer)
    names = {f"{name[1:-1]}_token": name for name in SPECIALS}
    defaults = {"chat_template": CHAT_TEMPLATE, "completion_template": COMPLETION_TEMPLATE}
    return TextTokenizer(tokenizer, names | defaults | config)


TOKENIZER = build_tokenizer()


def stripping():
    """The same, but a space at the beginning of a text is left out."""
    raw = Tokenizer.from_str(TOKENIZER._tokenizer.to_str())
    raw.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    return TextTokenizer(raw, {})


def card(**changes):
    facts = {
        "id": "tiny",
        "family": Family.DIFFUSION,
        "context_tokens": 128,
        "vocab_size": 300,
        "eos_token_ids": frozenset({EOS}),
        "default_max_tokens": 48,
        "block_lengths": (8, 16),
        "default_block_length": 16,
        "mask_token_id": MASK,
        "default_cache": CacheMode.PREFIX,
        "default_refresh_scope": RefreshScope.OUTPUT,
    }
    return ModelCard(**(facts | changes))


AUTOREGRESSIVE = {"family": Family.AUTOREGRESSIVE, "request_fields": frozenset()}


def byte_ids(text):
    """One token for each byte, so that tokens cut characters anywhere."""
    alphabet = {byte: index for index in range(300) if (byte := TOKENIZER.token_bytes(index))}
    return [alphabet[bytes([byte])] for byte in text.encode()]


def settled(ids, start=0):
    return tuple(SettledToken(start + k, index) for k, index in enumerate(ids))


class ScriptedFrontend:
    """Plays ``script(request, payload)``, a list, for each request.

    Items: a list of token ids or of SettledToken (one step), an asyncio.Event to wait for, an
    exception to raise, or an update. Each step takes 0.1 s of the frontend's clock. A script
    without an end is ended by STOP or, at the output limit, by LENGTH.
    """

    def __init__(self, script):
        self.script = script if callable(script) else lambda request, payload: script
        self.clock_s = 100.0
        self.submitted = []
        self.cancels = {}
        self.forwards = {}
        self.events = {}
        self.running = set()
        self.is_ready = self.is_healthy = True
        self._wake = asyncio.Event()

    def now_s(self):
        return self.clock_s

    def accepts(self):
        return self.ready()

    def ready(self):
        return self.is_ready

    def healthy(self):
        return self.is_healthy

    def cancel(self, request_id, reason):
        assert request_id not in self.cancels, "cancelled twice"
        self.cancels[request_id] = reason
        self._wake.set()

    async def submit(self, request, payload):
        self.submitted.append((request, payload))
        self.running.add(request.id)
        self.forwards[request.id] = 0
        self.events[request.id] = []
        try:
            async for update in self._play(request, payload):
                yield update
        finally:
            self.running.discard(request.id)

    async def _play(self, request, payload):
        emitted = 0
        for item in self.script(request, payload):
            await self._step(item)
            if request.id in self.cancels:
                break
            match item:
                case asyncio.Event():
                    pass
                case Exception():
                    raise item
                case RequestEnded() | RequestRejected():
                    yield item
                    return
                case _:
                    self.clock_s += 0.1
                    self.forwards[request.id] += 1
                    tokens = settled(item, emitted) if isinstance(item[0], int) else tuple(item)
                    emitted += len(tokens)
                    self.events[request.id].append(TextEvent(self.clock_s, len(tokens)))
                    yield TokensEmitted(tokens, self.forwards[request.id], self.clock_s)
        full = emitted >= request.max_output_tokens
        end = FinishReason.LENGTH if full else FinishReason.STOP
        reason = self.cancels.get(request.id, end)
        yield RequestEnded(reason, self.report(request))

    async def _step(self, item):
        """Let others run; wait for a gate, or for a cancellation."""
        await asyncio.sleep(0)
        if isinstance(item, asyncio.Event):
            self._wake.clear()
            waits = {asyncio.create_task(item.wait()), asyncio.create_task(self._wake.wait())}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()

    def report(self, request):
        slack_s = None if request.deadline_s is None else request.deadline_s - self.clock_s
        trace = AnswerTrace(
            request.arrival_s,
            tuple(self.events[request.id]),
            self.clock_s,
            started_s=request.arrival_s + 0.05,
        )
        return RequestReport(
            forwards=self.forwards[request.id],
            blocks=2,
            forced=1,
            refreshes=2,
            threshold_min=0.7,
            threshold_mean=0.8,
            queue_s=0.05,
            ttft_s=0.1,
            tpot_s=tpot_s(trace),
            e2e_s=self.clock_s - request.arrival_s,
            slack_s=slack_s,
            slo_met=None if slack_s is None else slack_s >= 0,
            missed=() if slack_s is None or slack_s >= 0 else ("e2e",),
            degraded=True,
        )


class RecordingObserver:
    """Keeps what it is told."""

    def __init__(self):
        self.in_flight = 0
        self.ends = []
        self.gaps = []
        self.ignored = []
        self.limits = []

    def started(self, request):
        self.in_flight += 1

    def emitted(self, request, tokens, gap_s):
        self.gaps.append((tokens, gap_s))

    def finished(self, request, reason, output_tokens, report):
        self.in_flight -= 1
        self.ends.append((reason.value, output_tokens))

    def rejected(self, request):
        self.in_flight -= 1
        self.ends.append(("rejected", 0))

    def limited(self, tenant, why):
        self.limits.append((tenant, why))

    def header_ignored(self, name):
        self.ignored.append(name)

    def render(self):
        return b"in_flight %d\n" % self.in_flight


class Gateway:
    """An app around a script, and ways to talk to it."""

    def __init__(self, script=(), config=None, model=None, tokenizer=TOKENIZER, **options):
        self.frontend = ScriptedFrontend(script)
        self.observer = RecordingObserver()
        self.app: FastAPI = create_app(
            self.frontend,
            tokenizer,
            model or card(),
            config or ServeConfig(),
            self.observer,
            unix_time=lambda: 1_000.0,
            **options,
        )

    def http(self):
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://gateway")

    def openai(self, max_retries=0):
        return AsyncOpenAI(
            api_key="-",
            base_url="http://gateway/v1",
            http_client=self.http(),
            max_retries=max_retries,
        )

    async def complete(self, **body):
        async with self.http() as client:
            return await client.post("/v1/completions", json={"prompt": "ab", **body})

    async def chat(self, **body):
        messages = [{"role": "user", "content": "ab"}]
        async with self.http() as client:
            return await client.post("/v1/chat/completions", json={"messages": messages, **body})


def stream_events(response):
    """The events of a stream, without its end marker; checks the marker."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = [block for block in response.text.split("\n\n") if block.startswith("data: ")]
    assert blocks[-1] == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


class RawCall:
    """One HTTP request at the ASGI level: the only way to hang up at a chosen moment."""

    def __init__(self, app, path, body):
        self.sent = asyncio.Queue()
        self._inbox = asyncio.Queue()
        self._inbox.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})
        self._gone = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"content-type", b"application/json"), (b"host", b"gateway")],
            "client": ("127.0.0.1", 1),
            "server": ("gateway", 80),
        }
        self.task = asyncio.create_task(app(scope, self._receive, self.sent.put))

    async def _receive(self):
        if not self._inbox.empty():
            return self._inbox.get_nowait()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def until(self, text):
        """Wait until a part of the response holds this text."""
        while text not in (await self.sent.get()).get("body", b"").decode():
            pass

    def hang_up(self):
        self._gone.set()


async def until(condition):
    """Let other tasks run until the condition holds; pytest's timeout bounds it."""
    while not condition():
        await asyncio.sleep(0)

"""A streaming client for OpenAI-compatible servers that times every piece of text.

Written on raw server-sent events: an SDK's parsing and validation would cost more time per
event than a small model takes for a step, and would be measured as if it were the server's.
"""

import asyncio
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import httpx

from stepserve.cli import watch
from stepserve.core.errors import FieldError, StepserveError


class SSEDecoder:
    """Splits a byte stream into server-sent events, wherever the network cut it.

    An event that the stream's end leaves incomplete is dropped, as the standard asks.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._type = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[tuple[str, str]]:
        """Take bytes; return the (event type, data) pairs that they complete."""
        # A final carriage return stays: it may be the first half of a CR LF.
        *lines, self._rest = re.split(rb"\r\n|\n|\r(?=[^\n])", self._rest + chunk)
        return [event for line in lines if (event := self._line(line.decode("utf-8", "replace")))]

    def _line(self, line: str) -> tuple[str, str] | None:
        if not line:
            event = (self._type, "\n".join(self._data)) if self._data else None
            self._type, self._data = "", []
            return event
        name, _, value = line.partition(":")  # a comment has an empty name
        if name == "data":
            self._data.append(value.removeprefix(" "))
        elif name == "event":
            self._type = value.removeprefix(" ")
        return None


class Outcome(StrEnum):
    """How a request ended, as the client saw it."""

    COMPLETED = "completed"
    REJECTED = "rejected"  # refused for load (429) before any work was done
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class TextEvent:
    """A piece of text arrived; ``tokens`` so far, where the server keeps a running count."""

    at_s: float
    tokens: int | None


OBJECTS = ("metrics", "slo", "dlm")
TOLD = ("metrics.forwards", "slo.slack_ms", "dlm.threshold_mean")


@dataclass(slots=True)
class Reply:
    """One answer, filled in while it streams. Times are on the event loop's clock.

    ``tokens`` is the server's own final count. ``objects`` are stepserve's, by name, as they came;
    ``told`` are the numbers in them that are read here, by dotted name. A foreign server may give
    these names another meaning: what is no number is left out, and its name is in ``odd``.
    """

    sent_s: float
    ended_s: float = 0.0
    outcome: Outcome = Outcome.FAILED
    error: str | None = None
    text: str = ""
    events: list[TextEvent] = field(default_factory=list)
    tokens: int | None = None
    objects: dict[str, Any] = field(default_factory=dict)
    told: dict[str, float] = field(default_factory=dict)
    odd: set[str] = field(default_factory=set)

    def take(self, event_type: str, data: str, at_s: float) -> str:
        """Take one event; return its text. Raises ValueError when it is not what was agreed."""
        if event_type or data == "[DONE]":  # named events (dlm.snapshot) are provisional text
            return ""
        body = json.loads(data)
        if "error" in body:
            raise ValueError(_message(body))
        tokens = self._number(body, "usage.completion_tokens")
        if tokens is not None:
            self.tokens = max(self.tokens or 0, int(tokens))
        self._take_objects(body)
        text = ""
        for choice in body.get("choices") or ():
            text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            if choice.get("finish_reason"):
                self.outcome = Outcome.COMPLETED
        if text:
            self.text += text
            self.events.append(TextEvent(at_s, None if tokens is None else self.tokens))
        return text

    def _take_objects(self, body: Mapping[str, Any]) -> None:
        for name in OBJECTS:
            if body.get(name) is not None:
                self.objects[name] = body[name]
        for path in TOLD:
            number = self._number(body, path)
            if number is not None:
                self.told[path] = number

    def _number(self, body: Mapping[str, Any], path: str) -> float | None:
        name, key = path.split(".")
        whole = body.get(name)
        value = whole.get(key) if isinstance(whole, Mapping) else whole
        if value is None:
            return None
        if type(value) in (int, float) and math.isfinite(value):
            return float(value)
        self.odd.add(path if isinstance(whole, Mapping) else name)
        return None


class Client:
    """A server and one of its endpoints. Raises FieldError for a malformed URL."""

    def __init__(
        self,
        url: str,
        endpoint: str = "chat",
        timeout_s: float = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        try:
            base_url = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise FieldError("--url", str(error)) from error
        self._chat = endpoint == "chat"
        self._path = "/v1/chat/completions" if self._chat else "/v1/completions"
        self._timeout_s = timeout_s
        key = os.environ.get("OPENAI_API_KEY")
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # Unbounded, or requests would queue in the client and be late by its own doing. Idle
            # connections go before a server closes them (5 s is common) and a request is lost.
            limits=httpx.Limits(max_connections=None, keepalive_expiry=2.0),
            timeout=httpx.Timeout(None, connect=10.0),
            transport=transport,
        )

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def model(self, given: str | None = None) -> str:
        """The model to ask for: the one given, else the first that the server lists.

        Raises StepserveError when the server cannot be reached, or lists none.
        """
        try:
            response = await self._http.get("/v1/models", timeout=10.0)
            return given or str(response.raise_for_status().json()["data"][0]["id"])
        except httpx.TransportError as error:
            raise StepserveError(f"cannot reach {self.url}: {error or repr(error)}") from error
        except (httpx.HTTPStatusError, ValueError, LookupError, TypeError) as error:
            raise StepserveError(
                f"{self.url}/v1/models names no model ({error}); is this an OpenAI-compatible "
                "server? Give --model if it lists none."
            ) from error

    async def metrics(self) -> Mapping[str, float] | None:
        """What the server counts; ``None`` if it does not tell."""
        try:
            response = await self._http.get("/metrics", timeout=10.0)
            return watch.parse(response.raise_for_status().text)
        except (httpx.HTTPError, ValueError):
            return None

    def body(
        self, model: str, messages: Sequence[Mapping[str, str]], fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        """A streaming request body under ``fields``; for completions, the messages' text."""
        asked: dict[str, Any] = (
            {"messages": messages}
            if self._chat
            else {"prompt": "\n".join(message["content"] for message in messages)}
        )
        usage = {"include_usage": True, "continuous_usage_stats": True}
        return {"model": model, **asked, "stream": True, "stream_options": usage, **fields}

    async def ask(
        self, body: Mapping[str, Any], on_text: Callable[[str], None] = lambda text: None
    ) -> Reply:
        """Send a request and read the whole answer. Every failure is told in the reply."""
        now_s = asyncio.get_running_loop().time
        reply = Reply(sent_s=now_s())
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._read(body, reply, on_text)
            if reply.outcome is Outcome.FAILED and reply.error is None:
                reply.error = "the stream ended without a finish reason"
        except TimeoutError:
            reply.outcome, reply.error = Outcome.FAILED, f"no end within {self._timeout_s:g} s"
        except Exception as error:  # a server may send anything
            reply.outcome, reply.error = Outcome.FAILED, f"{type(error).__name__}: {error}"
        reply.ended_s = now_s()
        return reply

    async def _read(
        self, body: Mapping[str, Any], reply: Reply, on_text: Callable[[str], None]
    ) -> None:
        now_s, decoder = asyncio.get_running_loop().time, SSEDecoder()
        async with self._http.stream("POST", self._path, json=body) as response:
            if response.status_code != httpx.codes.OK:
                refused = response.status_code == httpx.codes.TOO_MANY_REQUESTS
                reply.outcome = Outcome.REJECTED if refused else Outcome.FAILED
                reply.error = f"HTTP {response.status_code}: {_refusal(await response.aread())}"
                return
            async for chunk in response.aiter_bytes():
                at_s = now_s()
                for event_type, data in decoder.feed(chunk):
                    if text := reply.take(event_type, data, at_s):
                        on_text(text)


def _refusal(content: bytes) -> str:
    try:
        return _message(json.loads(content))
    except ValueError:
        return content.decode("utf-8", "replace")[:200]


def _message(body: Any) -> str:
    """The message of an OpenAI-style error body, or the body itself."""
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message", error) if isinstance(error, dict) else error or body)

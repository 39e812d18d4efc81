"""The JSON objects of replies: one class per endpoint, whole answers and stream chunks alike."""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from stepserve.core.payload import SettledToken
from stepserve.core.request import FinishReason
from stepserve.gateway import accounting
from stepserve.gateway.generation import Choice, ChoiceUpdate
from stepserve.gateway.tokenizer import TextTokenizer

Json = dict[str, Any]


class Shape(ABC):
    """What differs between the two generation endpoints.

    A choice of a reply has an index, text in some form, log probabilities, and how it ended.
    """

    whole: ClassVar[str]
    chunk: ClassVar[str]

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    @abstractmethod
    def opening(self, choice: Choice) -> Json | None:
        """The chunk choice that comes before any text, if one does."""

    @abstractmethod
    def complete(self, choice: Choice) -> Json:
        """The choice of a whole answer."""

    @abstractmethod
    def _text(self, text: str | None) -> Json:
        """A piece of text; ``None`` where the finish reason comes alone."""

    @abstractmethod
    def _scores(self, choice: Choice, tokens: Sequence[SettledToken]) -> Json:
        """The log probabilities of some tokens, at least one."""

    def piece(self, choice: Choice, text: str, tokens: Sequence[SettledToken]) -> Json:
        """A chunk choice with text and the log probabilities of the tokens it was made of."""
        return self._choice(choice, self._text(text), tokens)

    def closing(self, choice: Choice) -> Json:
        """The chunk choice that carries the finish reason, without text."""
        return self._choice(choice, self._text(None), (), ended=True)

    def _choice(
        self, choice: Choice, text: Json, tokens: Sequence[SettledToken], ended: bool = False
    ) -> Json:
        scored = choice.sample.payload.sampling.logprobs is not None and tokens
        return {
            "index": choice.sample.index,
            **text,
            "logprobs": self._scores(choice, tokens) if scored else None,
            **_finish(choice, ended),
        }


class CompletionShape(Shape):
    """``/v1/completions``. With ``echo``, the prompt's text comes before the answer."""

    whole = chunk = "text_completion"

    def __init__(self, tokenizer: TextTokenizer) -> None:
        super().__init__(tokenizer)
        self._offsets: dict[int, _Offsets] = {}

    def opening(self, choice: Choice) -> Json | None:
        """The echoed prompt."""
        echo = choice.sample.echo
        return self._choice(choice, self._text(echo), ()) if echo else None

    def complete(self, choice: Choice) -> Json:
        """All text with the finish reason."""
        text = self._text(choice.sample.echo + choice.text.text)
        return self._choice(choice, text, choice.text.tokens, ended=True)

    def _text(self, text: str | None) -> Json:
        return {"text": text or ""}

    def _scores(self, choice: Choice, tokens: Sequence[SettledToken]) -> Json:
        ids = [token.token_id for token in tokens]
        offsets = self._offsets.setdefault(choice.sample.index, _Offsets())
        chars = [offsets.after(self._tokenizer.token_bytes(index)) for index in ids]
        return {
            "tokens": list(map(self._tokenizer.token_name, ids)),
            "token_logprobs": [_score(token.logprob) for token in tokens],
            "top_logprobs": [self._named(token.top) for token in tokens],
            "text_offset": [max(0, count - choice.text.left_out) for count in chars],
        }

    def _named(self, top: Sequence[tuple[int, float]]) -> Json:
        """Scores by name, best first. Of tokens of one name the others go by their ids."""
        named: Json = {}
        for index, value in sorted(top, key=lambda entry: -entry[1]):
            name = self._tokenizer.token_name(index)
            named[f"token_id:{index}" if name in named else name] = _score(value)
        return named


class _Offsets:
    """Where tokens begin in the text that they make, in whole characters."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._count = 0

    def after(self, data: bytes) -> int:
        """The begin of the next token, of these bytes."""
        begin = self._count
        self._count += len(self._utf8.decode(data))
        return begin


class ChatShape(Shape):
    """``/v1/chat/completions``."""

    whole, chunk = "chat.completion", "chat.completion.chunk"

    def opening(self, choice: Choice) -> Json | None:
        """The role."""
        return self._choice(choice, {"delta": {"role": "assistant", "content": ""}}, ())

    def complete(self, choice: Choice) -> Json:
        """The assistant's message with the finish reason."""
        message = {"role": "assistant", "content": choice.text.text}
        return self._choice(choice, {"message": message}, choice.text.tokens, ended=True)

    def _text(self, text: str | None) -> Json:
        return {"delta": {} if text is None else {"content": text}}

    def _scores(self, choice: Choice, tokens: Sequence[SettledToken]) -> Json:
        content = [
            self._token(token.token_id, token.logprob)
            | {"top_logprobs": [self._token(i, value) for i, value in token.top]}
            for token in tokens
        ]
        return {"content": content}

    def _token(self, token_id: int, logprob: float | None) -> Json:
        name = self._tokenizer.token_name(token_id)
        data = list(self._tokenizer.token_bytes(token_id))
        return {"token": name, "logprob": _score(logprob), "bytes": data}


def _score(logprob: float | None) -> float | None:
    """JSON has no infinity: a token that was ruled out shows as -9999, as in vLLM."""
    return None if logprob is None else max(logprob, -9999.0)


def _finish(choice: Choice, ended: bool) -> Json:
    if not ended:
        return {"finish_reason": None}
    assert choice.text.finish in (FinishReason.STOP, FinishReason.LENGTH), choice.text.finish
    return {"finish_reason": choice.text.finish.value, "stop_reason": choice.text.stop_reason}


@dataclass(frozen=True, slots=True)
class Reply:
    """One HTTP reply: the same id, time and model on each of its objects."""

    id: str
    created: int
    model: str
    shape: Shape
    objects: Mapping[str, accounting.Fields]
    service_tier: str | None = None
    usage_chunk: bool = False
    usage_in_chunks: bool = False

    def whole(self, choices: Sequence[Choice]) -> Json:
        """The body of an answer that is not streamed."""
        return {
            **self._head(self.shape.whole),
            "choices": [self.shape.complete(choice) for choice in choices],
            "usage": accounting.usage(choices),
            **self._summary(choices),
        }

    def opening(self, choices: Sequence[Choice]) -> Iterator[Json]:
        """Chunks that come before any text."""
        for choice in choices:
            part = self.shape.opening(choice)
            if part is not None:
                yield self._chunk([part], choices)

    def chunks(self, update: ChoiceUpdate, choices: Sequence[Choice], last: bool) -> Iterator[Json]:
        """Chunks for one update: text if there is any, then the end if it is one."""
        choice = update.choice
        scored = choice.sample.payload.sampling.logprobs is not None and update.delta.tokens
        if update.delta.text or scored:
            piece = self.shape.piece(choice, update.delta.text, update.delta.tokens)
            yield self._chunk([piece], choices)
        if update.ended:
            closing = self._chunk([self.shape.closing(choice)], choices)
            yield closing if self.usage_chunk or not last else closing | self._summary(choices)
        if last and self.usage_chunk:
            usage = {"usage": accounting.usage(choices)}
            yield self._chunk([], choices) | usage | self._summary(choices)

    def _summary(self, choices: Sequence[Choice]) -> Json:
        return accounting.summary(choices, self.objects)

    def _chunk(self, parts: list[Json], choices: Sequence[Choice]) -> Json:
        chunk = {**self._head(self.shape.chunk), "choices": parts}
        if self.usage_in_chunks:
            chunk["usage"] = accounting.usage(choices)
        return chunk

    def _head(self, kind: str) -> Json:
        head: Json = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
        }
        if self.service_tier is not None:
            head["service_tier"] = self.service_tier
        return head

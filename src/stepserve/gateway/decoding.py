"""From token ids to text, token by token, for every kind of decoder that a model may have.

A token stands for the same bytes wherever it is, except at the beginning of a text, where some
decoders leave a space out. So text is put together without ever decoding a prefix twice, and is
the same however tokens come. Byte-level decoders (Llama 3, Qwen, LLaDA) read each character of a
token as a byte; SentencePiece's (Llama 2, Gemma) have ``Replace`` for spaces, ``ByteFallback``
for characters that are no token, ``Fuse`` and ``Strip``, or ``Metaspace`` in their place;
``WordPiece`` puts spaces between words. Source: decoders of the tokenizers package.

Deviation: of bytes that are no character that package shows a U+FFFD for each, also for whole
characters beside them, and not before it knows that no byte follows. Here each is decoded by
itself, as soon as it is known.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer

from stepserve.core.errors import FieldError

Step = Mapping[str, Any]

FILE = "tokenizer.json"

_CLEANED = (
    *((f" {mark}".encode(), mark.encode()) for mark in ".?!,"),
    (b" ' ", b"'"),
    (b" n't", b"n't"),
    (b" 'm", b"'m"),
    (b" do not", b" don't"),
    *((f" {end}".encode(), end.encode()) for end in ("'s", "'ve", "'re")),
)
BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))
"""What SentencePiece's vocabularies call a byte."""

_BYTE = re.compile(rb"<0x([0-9A-Fa-f]{2})>")


class Pieces:
    """What each token of a vocabulary stands for.

    ``usual``: by id, what it adds to a text; nothing, if it is a special one. ``table``: with the
    names of those.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises FieldError (``tokenizer.json``) for a decoder that is not known."""
        decoder = json.loads(tokenizer.to_str())["decoder"] or {"type": "Join"}
        self._steps = list(_per_token(_flat(decoder)))
        self.strip = _of_the_whole(_flat(decoder))
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(index for index, token in added.items() if token.special)
        self._texts = {
            index: token
            for token, index in tokenizer.get_vocab(with_added_tokens=False).items()
            if index not in added
        }
        self._added = {index: token.content for index, token in added.items()}
        self.table = {index: self._piece(index, first=False) for index in self._texts}
        self.table |= {index: self._piece(index, first=False) for index in self._added}
        self.usual = {i: data for i, data in self.table.items() if i not in self._special}

    def first(self, token_id: int) -> bytes:
        """What it stands for at the beginning of a text."""
        return self._piece(token_id, first=True) if token_id in self.usual else b""

    def _piece(self, token_id: int, *, first: bool) -> bytes:
        added = self._added.get(token_id)
        data = (self._texts[token_id] if added is None else added).encode()
        if token_id in self._special:
            return data
        for step in self._steps:
            if added is None or step["type"] != "ByteLevel":  # added ones stand for their own text
                data = _STEPS[step["type"]](data, step, first)
        return data


class Decoding:
    """The text of tokens as they come. ``begins``: whether nothing stands before it.

    ``left_out`` is how many characters the first token would have had elsewhere.
    """

    def __init__(self, pieces: Pieces, *, begins: bool = True) -> None:
        self._pieces = pieces
        self._first = begins
        self._char, self._strip = pieces.strip if begins else ("", 0)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.left_out = 0

    def push(self, *token_ids: int) -> str:
        """The whole characters that tokens complete, or show to be none."""
        usual = self._pieces.usual
        parts = [usual.get(token_id, b"") for token_id in token_ids]
        if self._first:
            shown = next((i for i, token_id in enumerate(token_ids) if token_id in usual), None)
            if shown is not None:
                self._first, before = False, parts[shown]
                parts[shown] = self._pieces.first(token_ids[shown])
                self.left_out += _characters(before) - _characters(parts[shown])
        return self._stripped(self._utf8.decode(b"".join(parts)))

    def end(self) -> str:
        """No token follows: what is left of a character is none."""
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while text and self._strip:
            if text[0] != self._char:
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
            self.left_out += 1
        return text


def _characters(data: bytes) -> int:
    return len(data.decode(errors="replace"))


def _flat(decoder: Step) -> list[Step]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _flat(inner)]


def _per_token(steps: list[Step]) -> Iterator[Step]:
    """The steps that work on each token alone. Raises FieldError for one that is not known."""
    fused = False
    for step in steps:
        kind = step["type"]
        if kind == "Fuse" or (kind == "Strip" and fused):
            fused = True
            continue
        alone = not fused or kind == "ByteLevel" or (kind == "Replace" and len(_pattern(step)) == 1)
        if kind not in _STEPS or not alone:
            known = ", ".join(sorted({"Fuse", *_STEPS} - {"Join"}))
            where = " after Fuse" if kind in _STEPS else ""
            raise FieldError(FILE, f"decoder {kind}{where} is not supported; these are: {known}")
        if kind == "Replace":
            _pattern(step)
        fused = fused or kind == "ByteLevel"
        yield step


def _of_the_whole(steps: list[Step]) -> tuple[str, int]:
    """A character, and how many of it are left out at the beginning of a text."""
    kinds = [step["type"] for step in steps]
    fusing = [i for i, kind in enumerate(kinds) if kind in ("Fuse", "ByteLevel")]
    found = [i for i, kind in enumerate(kinds) if kind == "Strip" and fusing and i > fusing[0]]
    if not found:
        return "", 0
    last = steps[found[0]]
    if len(found) > 1 or {*kinds[found[0] + 1 :]} - {"Fuse"} or last["stop"]:
        raise FieldError(FILE, "decoder Strip is supported at the beginning of a text alone")
    return last["content"], last["start"]


def _pattern(step: Step) -> str:
    pattern = step["pattern"].get("String")
    if not pattern:
        raise FieldError(FILE, "decoder Replace is supported with a plain string alone")
    return str(pattern)


def _replace(data: bytes, step: Step, first: bool) -> bytes:
    return data.replace(_pattern(step).encode(), step["content"].encode())


def _byte_of_name(data: bytes, step: Step, first: bool) -> bytes:
    found = _BYTE.fullmatch(data)
    return bytes.fromhex(found[1].decode()) if found else data


def _byte_level(data: bytes, step: Step, first: bool) -> bytes:
    read = [ALPHABET.get(char) for char in data.decode()]
    return data if None in read else bytes(byte for byte in read if byte is not None)


def _strip(data: bytes, step: Step, first: bool) -> bytes:
    content = step["content"].encode()
    for _ in range(step["start"]):
        data = data.removeprefix(content)
    for _ in range(step["stop"]):
        data = data.removesuffix(content)
    return data


def _metaspace(data: bytes, step: Step, first: bool) -> bytes:
    dropped = first and step.get("prepend_scheme", "always") != "never"
    return data.replace(step["replacement"].encode(), b"" if dropped else b" ")


def _word_piece(data: bytes, step: Step, first: bool) -> bytes:
    prefix = step["prefix"].encode()
    if not first:
        data = data.removeprefix(prefix) if data.startswith(prefix) else b" " + data
    for dirty, clean in _CLEANED if step["cleanup"] else ():
        data = data.replace(dirty, clean)
    return data


def _join(data: bytes, step: Step, first: bool) -> bytes:
    return data if first else b" " + data


_STEPS: Mapping[str, Callable[[bytes, Step, bool], bytes]] = {
    "ByteFallback": _byte_of_name,
    "ByteLevel": _byte_level,
    "Join": _join,
    "Metaspace": _metaspace,
    "Replace": _replace,
    "Strip": _strip,
    "WordPiece": _word_piece,
}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: visible Latin-1 characters are themselves, the rest follow."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    stand_ins = {chr(byte): byte for byte in visible}
    return stand_ins | {chr(256 + offset): byte for offset, byte in enumerate(hidden)}


ALPHABET = _byte_alphabet()

"""Text to token ids and back, from the files of a Hugging Face model folder."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from stepserve.core.errors import FieldError

_TOKEN_KEYS = ("bos_token", "eos_token", "pad_token", "sep_token", "unk_token", "mask_token")


class TextTokenizer:
    """A byte-level tokenizer with the model's prompt templates.

    Only byte-level vocabularies are taken: there each token is a byte string, so text can be
    put together incrementally without ever decoding a prefix twice. The open diffusion models
    (LLaDA, Dream, SDAR, ...) all have one, as have Llama 3, Qwen2 and SmolLM2.
    """

    def __init__(self, tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
        """Raises FieldError when the vocabulary is not byte-level.

        ``lead`` is what the decoder leaves out at the beginning of a text.
        """
        self._tokenizer = tokenizer
        decoders = _decoders(tokenizer)
        self.lead = "".join(d["content"] * d["start"] for d in decoders if d["type"] == "Strip")
        self._bytes = _byte_table(tokenizer)
        self._most_bytes = _most_bytes_of_a_token(tokenizer, self._bytes.values())
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(index for index, token in added.items() if token.special)
        self._variables = {key: _content(config.get(key)) for key in _TOKEN_KEYS}
        environment = _template_environment()
        chat = _named_template(config.get("chat_template"))
        completion = config.get("completion_template", "{{ bos_token }}{{ prompt }}")
        self._chat_source = chat or ""
        self._chat_template = None if chat is None else environment.from_string(chat)
        self._completion_template = environment.from_string(completion)

    @classmethod
    def from_folder(cls, folder: Path) -> "TextTokenizer":
        """Read ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``."""
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        template = folder / "chat_template.jinja"
        if template.exists():
            config["chat_template"] = template.read_text(encoding="utf-8")
        return cls(tokenizer, config)

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of the text alone; names of special tokens in it are taken as such."""
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return tuple(encoding.ids)

    def least_tokens(self, text: str) -> int:
        """So many tokens the text has at least: what is known of it without cutting it up."""
        return math.ceil(len(text.encode()) / self._most_bytes)

    def completion_text(self, prompt: str) -> str:
        """A ``/v1/completions`` prompt as the model is to see it.

        The layout is ``completion_template`` of ``tokenizer_config.json`` (Jinja, variable
        ``prompt``) if there is one, else the text after the beginning-of-text token.
        """
        return self._fill(self._completion_template, "prompt", prompt=prompt)

    def completion_ids(self, prompt: str) -> tuple[int, ...]:
        """Token ids of ``completion_text``."""
        return self.encode(self.completion_text(prompt))

    def chat_ids(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Token ids of ``chat_text``."""
        return self.encode(self.chat_text(messages))

    def chat_knows(self, name: str) -> bool:
        """Whether the chat template speaks of something."""
        return name in self._chat_source

    def chat_text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """A chat as the model is to see it, ready for the answer.

        Raises FieldError with the template's own message when it refuses the messages.
        """
        if self._chat_template is None:
            raise FieldError("messages", "this model has no chat template; use /v1/completions")
        return self._fill(
            self._chat_template, "messages", messages=messages, add_generation_prompt=True
        )

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text: nothing for special tokens and unused ids."""
        return b"" if token_id in self._special else self._bytes.get(token_id, b"")

    def token_name(self, token_id: int) -> str:
        r"""A token as log probabilities show it, also one that is no text by itself.

        Special tokens by their names, parts of characters by their bytes (``bytes:\xe2``), ids
        that stand for nothing by themselves (``token_id:7``).
        """
        data = self._bytes.get(token_id)
        if not data:
            return f"token_id:{token_id}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out, invalid bytes as U+FFFD."""
        text = b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")
        return text.removeprefix(self.lead)

    def _fill(self, template: Template, field: str, **values: Any) -> str:
        try:
            return template.render(**self._variables, **values)
        except Exception as error:
            # Templates also fail by type errors on odd messages; all are the client's to mend.
            raise FieldError(field, f"chat template: {error}") from error


def _template_environment() -> ImmutableSandboxedEnvironment:
    """Jinja as Hugging Face templates expect it; a sandbox, since templates come with models."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["raise_exception"] = _refuse
    return environment


def _refuse(message: str) -> None:
    raise ValueError(message)


def _content(token: Any) -> str:
    """A special token of ``tokenizer_config.json``: a string, an object, or absent."""
    return str(token["content"]) if isinstance(token, Mapping) else str(token or "")


def _named_template(template: Any) -> str | None:
    """The chat template, out of one template or a list of named ones."""
    if isinstance(template, list):
        return next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return None if template is None else str(template)


def _decoders(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The decoder's steps, in order. Raises FieldError unless they turn bytes into text."""
    decoder = json.loads(tokenizer.to_str())["decoder"] or {"type": None}
    steps: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    if not any(step["type"] == "ByteLevel" for step in steps):
        raise FieldError("tokenizer.json", "only byte-level tokenizers are supported")
    return steps


def _byte_table(tokenizer: Tokenizer) -> dict[int, bytes]:
    """The bytes of every token; added tokens stand for their own text."""
    to_byte = _byte_alphabet()
    added = tokenizer.get_added_tokens_decoder()
    table = {
        index: bytes(to_byte[char] for char in token)
        for token, index in tokenizer.get_vocab(with_added_tokens=False).items()
        if index not in added
    }
    return table | {index: token.content.encode() for index, token in added.items()}


def _most_bytes_of_a_token(tokenizer: Tokenizer, tokens: Iterable[bytes]) -> float:
    """No token stands for more bytes of its text; infinite where no such bound is known.

    None is where a step before the vocabulary can drop text, or where a byte has no token.
    Composing characters (NFC) makes text shorter by less than a factor of four.
    """
    parts = json.loads(tokenizer.to_str())
    steps = _flat(parts["pre_tokenizer"], "pretokenizers")
    keeps = all(
        step["type"] in ("ByteLevel", "Digits", "Split") and step.get("behavior") != "Removed"
        for step in steps
    )
    normalizers = {step["type"] for step in _flat(parts["normalizer"], "normalizers")}
    strips = any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"])
    complete = _byte_alphabet().keys() <= parts["model"].get("vocab", {}).keys()
    if not keeps or strips or not complete or not normalizers <= {"NFC"}:
        return math.inf
    return max(map(len, tokens)) * (4.0 if normalizers else 1.0)


def _flat(step: Any, below: str) -> list[dict[str, Any]]:
    """The steps of a sequence, or the only one, or none."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [inner for outer in step[below] for inner in _flat(outer, below)]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: visible Latin-1 characters are themselves, the rest follow."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    stand_ins = {chr(byte): byte for byte in visible}
    return stand_ins | {chr(256 + offset): byte for offset, byte in enumerate(hidden)}

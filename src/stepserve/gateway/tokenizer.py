"""Text to token ids and back, from the files of a Hugging Face model folder."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from stepserve.core.errors import FieldError, check
from stepserve.files import read_json, read_text
from stepserve.gateway.decoding import ALPHABET, BYTE_TOKENS, FILE, Decoding, Pieces

CONFIG_FILE, CHAT = "tokenizer_config.json", "chat_template"

_PROBE = "a \N{SNOWMAN}"
"""Has a character that most vocabularies lack: without a token for those, texts would fail."""

_TOKEN_KEYS = ("bos_token", "eos_token", "pad_token", "sep_token", "unk_token", "mask_token")


class TextTokenizer:
    """A tokenizer with the model's prompt templates. Of its decoders see ``decoding``."""

    def __init__(self, tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
        """Raises FieldError, whose field is the file that has what cannot be used."""
        self._tokenizer = tokenizer
        self._pieces = Pieces(tokenizer)
        self._most_bytes = _most_bytes_of_a_token(tokenizer, self._pieces.table.values())
        self._variables = {key: _content(key, config.get(key)) for key in _TOKEN_KEYS}
        environment = _template_environment()
        chat = _named_template(config.get("chat_template"))
        completion = config.get("completion_template", "{{ bos_token }}{{ prompt }}")
        self._chat_source = chat or ""
        self._chat_template = None if chat is None else _parsed(environment, CHAT, chat)
        self._completion_template = _parsed(environment, "completion_template", completion)

    @classmethod
    def from_folder(cls, folder: Path) -> "TextTokenizer":
        """Read ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``.

        Raises FieldError (``model``) that names the file at fault.
        """
        text = read_text(folder / FILE, "model")
        config = read_json(folder / CONFIG_FILE, "model")
        template = folder / "chat_template.jinja"
        if template.exists():
            config[CHAT] = read_text(template, "model")
        try:
            return cls(_tokenizer(text), config)
        except FieldError as error:
            raise FieldError("model", f"{folder / error.field}: {error.message}") from error

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
        return self._pieces.usual.get(token_id, b"")

    def token_name(self, token_id: int) -> str:
        r"""A token as log probabilities show it, also one that is no text by itself.

        Special tokens by their names, parts of characters by their bytes (``bytes:\xe2``), ids
        that stand for nothing by themselves (``token_id:7``).
        """
        data = self._pieces.table.get(token_id)
        if not data:
            return f"token_id:{token_id}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out, invalid bytes as U+FFFD."""
        decoding = self.decoding()
        return decoding.push(*ids) + decoding.end()

    def decoding(self, *, begins: bool = True) -> Decoding:
        """The text of tokens as they come. ``begins``: whether nothing stands before it."""
        return Decoding(self._pieces, begins=begins)

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


def _content(key: str, token: Any) -> str:
    """A special token of ``tokenizer_config.json``: a string, an object, or absent."""
    content = token.get("content") if isinstance(token, Mapping) else token or ""
    check(isinstance(content, str), CONFIG_FILE, f"{key} must be a string, or an object with one")
    return str(content)


def _named_template(template: Any) -> Any:
    """The chat template, out of one template or a list of named ones."""
    if not isinstance(template, list):
        return template
    named = all(isinstance(entry, Mapping) for entry in template)
    check(named, CONFIG_FILE, f"{CHAT} must be a string, or a list of named ones")
    return next((e.get("template") for e in template if e.get("name") == "default"), None)


def _parsed(environment: ImmutableSandboxedEnvironment, key: str, template: Any) -> Template:
    check(isinstance(template, str), CONFIG_FILE, f"{key} must be a string")
    try:
        return environment.from_string(template)
    except (TemplateError, RecursionError) as error:
        raise FieldError(CONFIG_FILE, f"{key} cannot be used: {error}") from error


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
    normalizers = {_normalizer(step) for step in _flat(parts["normalizer"], "normalizers")}
    strips = any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"])
    single = BYTE_TOKENS if parts["model"].get("byte_fallback") else ALPHABET.keys()
    complete = single <= tokenizer.get_vocab().keys()
    if not keeps or strips or not complete or not normalizers <= {"NFC", "Prepend", "spaces"}:
        return math.inf
    return max(map(len, tokens)) * (4.0 if "NFC" in normalizers else 1.0)


def _normalizer(step: Mapping[str, Any]) -> str:
    """What a step does to a text; ``spaces``: it writes them as SentencePiece does."""
    written = step.get("pattern") == {"String": " "} and step.get("content") == "▁"
    return "spaces" if step["type"] == "Replace" and written else str(step["type"])


def _flat(step: Any, below: str) -> list[dict[str, Any]]:
    """The steps of a sequence, or the only one, or none."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [inner for outer in step[below] for inner in _flat(outer, below)]


def _tokenizer(text: str) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(text)
        tokenizer.encode(_PROBE, add_special_tokens=False)
    except BaseException as error:  # the package raises nothing narrower, and panics
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        why = " ".join(str(error).split())
        raise FieldError(FILE, f"is no tokenizer that can be used: {why}") from error
    return tokenizer

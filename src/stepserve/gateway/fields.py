"""Request fields that other servers know and this one does not: neutral value, or 400.

Clients send many of these with the value that means "off"; that is accepted. Any other value
is refused by name, since a field that is accepted must change something.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from stepserve.core.errors import FieldError


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Values that ask for nothing (``None`` always does), and why others are refused."""

    neutral: tuple[Any, ...] = ()
    reason: str = "is not supported"
    moot: tuple[str, Any] = ("", None)  # another field, and its value that makes it have no effect


_TEXT_ONLY = Unsupported((), "is not supported; messages are text")
_STRUCTURE = Unsupported((), "is not supported: constrained output is not implemented")
_NO_TOOLS = "is not supported: tool calling is not implemented"
_PENALTY = Unsupported((0.0,), "is not supported; only 0 is accepted")

UNSUPPORTED = {
    "audio": _TEXT_ONLY,
    "bad_words": Unsupported(([],)),
    "best_of": Unsupported((1,), "is not supported; use n"),
    "chat_template": Unsupported((), "is not supported; the model's own template is used"),
    "chat_template_kwargs": Unsupported(({},)),
    "add_generation_prompt": Unsupported((True,)),
    "allowed_token_ids": Unsupported(),
    "continue_final_message": Unsupported((False,)),
    "documents": Unsupported(([],)),
    "echo": Unsupported((False,), "is supported by /v1/completions only"),
    "frequency_penalty": _PENALTY,
    "function_call": Unsupported(("none", "auto"), "is not supported"),
    "functions": Unsupported(([],), _NO_TOOLS, ("function_call", "none")),
    "guided_choice": _STRUCTURE,
    "guided_grammar": _STRUCTURE,
    "guided_json": _STRUCTURE,
    "guided_regex": _STRUCTURE,
    "length_penalty": Unsupported((1.0,)),
    "logit_bias": Unsupported(({},)),
    "logits_processors": Unsupported(([],)),
    "modalities": Unsupported((["text"],), "is not supported; output is text"),
    "parallel_tool_calls": Unsupported((False, True)),
    "prediction": Unsupported(),
    "presence_penalty": _PENALTY,
    "priority": Unsupported((0,), "servers disagree on its sign; use slo.class"),
    "prompt_logprobs": Unsupported((False,)),
    "repetition_penalty": Unsupported((1.0,), "is not supported; only 1 is accepted"),
    "response_format": Unsupported(({"type": "text"},), 'is not supported beyond {"type": "text"}'),
    "skip_special_tokens": Unsupported((True,)),
    "spaces_between_special_tokens": Unsupported((True,)),
    "structured_outputs": _STRUCTURE,
    "suffix": Unsupported(("",), "is not supported: infilling is not implemented"),
    "tool_choice": Unsupported(("none", "auto"), "is not supported: there are no tools"),
    "tools": Unsupported(([],), _NO_TOOLS, ("tool_choice", "none")),
    "top_logprobs": Unsupported((), "belongs to /v1/chat/completions; use logprobs"),
    "truncate_prompt_tokens": Unsupported(),
    "use_beam_search": Unsupported((False,)),
    "verbosity": Unsupported(("medium",)),
    "web_search_options": Unsupported(),
}


def check_extra_fields(body: BaseModel, strict: bool) -> tuple[str, ...]:
    """Names of the unknown fields of a body, which have no effect.

    Raises FieldError for an unsupported field that asks for something, and for any unknown
    field when ``strict``.
    """
    ignored, given = [], body.model_extra or {}
    for path, name, value in _extra_fields(body, ""):
        unsupported = UNSUPPORTED.get(name)
        if value is None:
            continue
        if unsupported is not None:
            asks = not any(_same(value, neutral) for neutral in unsupported.neutral)
            other, of_none = unsupported.moot
            if asks and other and given.get(other) == of_none:
                ignored.append(path)
            elif asks:
                raise FieldError(path, unsupported.reason)
        elif strict:
            raise FieldError(path, "unknown field")
        else:
            ignored.append(path)
    return tuple(sorted(ignored))


def ignored_fields_header(names: tuple[str, ...]) -> Mapping[str, str]:
    """The warning that fields had no effect; names that are no identifiers show as ``?``."""
    if not names:
        return {}
    safe = [name if name.isascii() and name.isprintable() else "?" for name in names[:32]]
    return {"x-stepserve-ignored-fields": ", ".join(safe)[:1024]}


def _extra_fields(model: BaseModel, prefix: str) -> Iterator[tuple[str, str, Any]]:
    """(dotted path, name, value) of fields that no schema declares, at any depth."""
    for name, value in (model.model_extra or {}).items():
        yield f"{prefix}{name}", name, value
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from _extra_fields(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            for index, item in enumerate(value):
                yield from _extra_fields(item, f"{prefix}{name}.{index}.")


def _same(a: Any, b: Any) -> bool:
    """Equality that tells ``True`` from 1."""
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)

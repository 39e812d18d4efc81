"""Messages of a chat as chat templates take them."""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from stepserve.core.errors import FieldError
from stepserve.gateway.schemas import Message, ToolCall
from stepserve.gateway.tokenizer import TextTokenizer

_MAY_BE_EMPTY = ("assistant", "function")
_BOOKKEEPING = {"annotations", "content", "refusal", "role", "tool_calls"}


def chat_text(messages: Sequence[Message], tokenizer: TextTokenizer) -> str:
    """The prompt of a chat. Raises FieldError for messages that the model has no way to take."""
    values = [_values(i, message, tokenizer) for i, message in enumerate(messages)]
    text = tokenizer.chat_text(values)
    for role in sorted({value["role"] for value in values} & {"tool", "function"}):
        if text == tokenizer.chat_text([value for value in values if value["role"] != role]):
            raise FieldError("messages", f"the chat template leaves out messages of role {role!r}")
    return text


def chat_size(messages: Sequence[Message]) -> int:
    """Characters of text."""
    return sum(len(message.content or "") for message in messages)


def _values(index: int, message: Message, tokenizer: TextTokenizer) -> dict[str, Any]:
    """One message; text is always a string, and absent keys are those that ask for nothing."""
    content = message.content if message.content is not None else message.refusal
    if content is None and message.role not in _MAY_BE_EMPTY:
        raise FieldError(
            f"messages.{index}.content", "must be a string or a list of parts of type text"
        )
    role = message.role
    if role == "developer" and not tokenizer.chat_knows("developer"):
        role = "system"  # what the official schema calls it for older models
    values: dict[str, Any] = {"role": role, "content": content or ""}
    if message.tool_calls:
        if not tokenizer.chat_knows("tool_calls"):
            raise FieldError(
                f"messages.{index}.tool_calls", "the model's chat template knows no tool calls"
            )
        values["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return values | message.model_dump(exclude_none=True, exclude=_BOOKKEEPING)


def _tool_call(call: ToolCall) -> dict[str, Any]:
    """Templates want arguments as values, clients send them as JSON."""
    values = call.model_dump(exclude_none=True)
    with suppress(ValueError):  # models make mistakes: those stay as they were written
        values["function"]["arguments"] = json.loads(call.function.arguments)
    return values

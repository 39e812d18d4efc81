"""One check for all strings of a body: text that is no Unicode can be neither read nor answered."""

from typing import Any

from pydantic import BaseModel, model_validator

from stepserve.core.errors import FieldError

_NO_TEXT = frozenset((int, float, bool, type(None)))


class TextBody(BaseModel):
    """A whole body: every string in it, declared or not, is text."""

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        check_text(value)
        return value


def check_text(body: Any) -> None:
    """Raises FieldError naming the first string that cannot be encoded: it holds half a character.

    JSON can write such halves, as one escape where two belong together; UTF-8 cannot.
    """
    left = [("", body)]
    while left:
        path, value = left.pop()
        if isinstance(value, str):
            if not encodable(value):
                raise FieldError(path or "body", "is no Unicode text: half of a surrogate pair")
        elif isinstance(value, dict):
            for key in value:
                if not encodable(key):
                    raise FieldError(path or "body", f"the key {key!a} is no Unicode text")
            below = [(_join(path, key), item) for key, item in value.items()]
            left += reversed(below)
        elif isinstance(value, list) and not set(map(type, value)) <= _NO_TEXT:
            left += [(_join(path, i), item) for i, item in reversed(list(enumerate(value)))]


def encodable(text: str) -> bool:
    """Whether UTF-8 can write it."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)

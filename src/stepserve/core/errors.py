"""Errors that a caller can act on. Each names the field or the resource at fault."""

import difflib
from collections.abc import Iterable
from typing import Any


class StepserveError(Exception):
    """Base of every error that stepserve raises on purpose."""


class FieldError(StepserveError):
    """A value given from outside is not acceptable; ``field`` names it, dotted from the top."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message

    def __reduce__(self) -> "tuple[type[FieldError], tuple[str, str]]":
        """It may come out of another process."""
        return FieldError, (self.field, self.message)


def check(holds: bool, field: str, message: str) -> None:
    """Raises FieldError unless it holds."""
    if not holds:
        raise FieldError(field, message)


def nearest(word: str, known: Iterable[str]) -> str:
    """A question that names the known word nearest to a wrong one, if one is near."""
    close = difflib.get_close_matches(word, list(known), 1)
    return f" (did you mean {close[0]}?)" if close else ""


def check_known(word: Any, known: Iterable[str], field: str, more: str = "") -> None:
    """Raises FieldError for a word that is none of the known ones, nor any ``more`` of them."""
    known = list(known)
    if word not in known:
        hint = nearest(str(word), known)
        raise FieldError(field, f"unknown {word!r}{hint}; known: {', '.join(known)}{more}")


class EventError(StepserveError):
    """A scheduler failed on an ``event`` that had waited until another was handled."""

    def __init__(self, event: Any) -> None:
        super().__init__(f"failed on {event}")
        self.event = event


class CapacityError(StepserveError):
    """A reservation does not fit: a scheduler asked for pages that do not exist."""

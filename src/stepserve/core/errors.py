"""Errors that a caller can act on. Each names the field or the resource at fault."""

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


def check_share(options: object, *names: str) -> None:
    """Raises FieldError for an attribute that is no share: neither in (0, 1] nor ``None``."""
    for name in names:
        share = getattr(options, name)
        check(share is None or 0.0 < share <= 1.0, name, "must be in (0, 1]")


class EventError(StepserveError):
    """A scheduler failed on an ``event`` that had waited until another was handled."""

    def __init__(self, event: Any) -> None:
        super().__init__(f"failed on {event}")
        self.event = event


class CapacityError(StepserveError):
    """A reservation does not fit: a scheduler asked for pages that do not exist."""

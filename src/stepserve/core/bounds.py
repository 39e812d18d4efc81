"""Bounds in the types of a dataclass's fields: ``margin: Share = 0.9``."""

import functools
import itertools
import math
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from stepserve.core.errors import FieldError


@dataclass(frozen=True, slots=True)
class Bound:
    """What a value must be; of a tuple, what each one must be. ``None`` is always allowed."""

    text: str
    holds: Callable[[Any], bool]

    def check(self, value: Any, field: str) -> None:
        """Raises FieldError unless the value is within the bound."""
        values = value if isinstance(value, tuple) else (value,)
        if not all(one is None or self.holds(one) for one in values):
            raise FieldError(field, f"must be {self.text}")


def among(known: Iterable[str]) -> Bound:
    """Words that are known."""
    words = tuple(known)
    return Bound(f"one of {', '.join(words)}", words.__contains__)


AT_LEAST_1 = Bound("at least 1", lambda n: n >= 1)
AT_LEAST_0 = Bound("at least 0", lambda n: n >= 0)
POSITIVE = Bound("positive", lambda n: n > 0)
SHARE = Bound("in (0, 1]", lambda n: 0.0 < n <= 1.0)

Count = Annotated[int, AT_LEAST_1]
Whole = Annotated[int, AT_LEAST_0]
Positive = Annotated[float, POSITIVE]
NotNegative = Annotated[float, AT_LEAST_0]
Share = Annotated[float, SHARE]
Chance = Annotated[float, Bound("in 0 .. 1", lambda n: 0.0 <= n <= 1.0)]
FinitePositive = Annotated[float, Bound("positive and finite", lambda n: 0.0 < n < math.inf)]
FiniteNotNegative = Annotated[float, Bound("at least 0 and finite", lambda n: 0.0 <= n < math.inf)]


class Bounded:
    """A dataclass whose values are checked when it is made."""

    __slots__ = ()
    _path: ClassVar[str] = ""

    def __init_subclass__(cls, path: str = "") -> None:
        """``path``: what errors put before a field's name."""
        if path:
            cls._path = f"{path}."

    def __post_init__(self) -> None:
        """Raises FieldError naming the first field whose value is out of bounds."""
        cls: Any = type(self)
        for name, bound in bounds(cls).items():
            bound.check(getattr(self, name), self._path + name)


def ascends(values: Sequence[float]) -> bool:
    """Whether there is a value, and each is above the one before it."""
    return bool(values) and all(low < high for low, high in itertools.pairwise(values))


def descends(values: Sequence[float]) -> bool:
    """Whether there is a value, and each is below the one before it."""
    return ascends(values[::-1])


@functools.cache
def bounds(cls: type[Any]) -> Mapping[str, Bound]:
    """The bound of every field that has one."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {name: bound for name, hint in hints.items() for bound in _within(hint)}


def _within(hint: Any) -> list[Bound]:
    if isinstance(hint, Bound):
        return [hint]
    return [bound for part in typing.get_args(hint) for bound in _within(part)]

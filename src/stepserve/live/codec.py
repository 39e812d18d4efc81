"""Frozen values to JSON values and back, by their type hints.

Made for the closed unions ``Event`` and ``Action``: a recorded run can be read back as the very
values it was made of. A member of a union is tagged with the name of its type; fields that
have their default value are left out. Floats survive exactly.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

TAG = "is"
"""Key of the type's name in an encoded member of a union."""


@dataclass(frozen=True, slots=True)
class Codec:
    """``encode`` gives what ``json.dumps`` takes; ``decode`` is its inverse.

    Decoding raises KeyError, TypeError or ValueError (FieldError from a value's own checks)
    for what was never encoded.
    """

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


@functools.cache
def codec(hint: Any) -> Codec:
    """The codec of a type hint.

    Known are: str, int, float, bool, ``Any`` (of JSON), names for these, enums, dataclasses, named
    tuples, tuples, mappings, and unions of records, or of anything with ``None``. Raises TypeError
    for others.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in (str, int, float, bool, Any):
        return Codec(_same, _same)
    if isinstance(hint, typing.NewType):
        return codec(hint.__supertype__)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return Codec(lambda member: member.value, hint)
    if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or hasattr(hint, "_fields")):
        return _record(hint)
    if origin is tuple:
        return _row(args)
    if origin is Mapping:
        return _table(*map(codec, args))
    if origin in (typing.Union, types.UnionType):
        return _choice(args)
    raise TypeError(f"no codec for {hint!r}")


def _same(value: Any) -> Any:
    return value


def _record(cls: Any) -> Codec:
    """A dataclass or a named tuple."""
    hints = typing.get_type_hints(cls)
    if dataclasses.is_dataclass(cls):
        defaults = {f.name: f.default for f in dataclasses.fields(cls)}
    else:
        defaults = {
            name: cls._field_defaults.get(name, dataclasses.MISSING) for name in cls._fields
        }
    fields = [(name, codec(hints[name]), default) for name, default in defaults.items()]
    codecs = {name: part for name, part, _ in fields}

    def encode(value: Any) -> Any:
        rows = ((name, part, default, getattr(value, name)) for name, part, default in fields)
        return {name: part.encode(v) for name, part, default, v in rows if v != default}

    def decode(table: Any) -> Any:
        return cls(**{name: codecs[name].decode(v) for name, v in table.items() if name != TAG})

    return Codec(encode, decode)


def _row(args: tuple[Any, ...]) -> Codec:
    if len(args) == 2 and args[1] is Ellipsis:
        part = codec(args[0])
        return Codec(
            lambda row: [part.encode(v) for v in row],
            lambda row: tuple(part.decode(v) for v in row),
        )
    parts = [codec(arg) for arg in args]
    return Codec(
        lambda row: [part.encode(v) for part, v in zip(parts, row, strict=True)],
        lambda row: tuple(part.decode(v) for part, v in zip(parts, row, strict=True)),
    )


def _table(key: Codec, value: Codec) -> Codec:
    """A list of pairs: keys of JSON objects are text."""
    return Codec(
        lambda table: [[key.encode(k), value.encode(v)] for k, v in table.items()],
        lambda pairs: {key.decode(k): value.decode(v) for k, v in pairs},
    )


def _choice(args: tuple[Any, ...]) -> Codec:
    members = [arg for arg in args if arg is not type(None)]
    only = codec(members[0]) if len(members) == 1 else _tagged(members)
    if len(members) == len(args):
        return only
    return Codec(
        lambda value: None if value is None else only.encode(value),
        lambda value: None if value is None else only.decode(value),
    )


def _tagged(members: list[Any]) -> Codec:
    by_type = {member: (member.__name__, codec(member)) for member in members}
    by_name = dict(by_type.values())

    def encode(value: Any) -> Any:
        name, part = by_type[type(value)]
        return {TAG: name, **part.encode(value)}

    return Codec(encode, lambda table: by_name[table[TAG]].decode(table))

"""Configuration read from TOML tables, and written as such. An unknown key is an error."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from stepserve.core.config import Choice
from stepserve.core.errors import FieldError, nearest

T = TypeVar("T")


def from_table(cls: type[T], table: Mapping[str, Any], path: str = "", base: T | None = None) -> T:
    """Build config dataclass ``cls`` from a TOML table, laid over ``base`` if given.

    Raises FieldError naming the dotted key for an unknown key or a value of a wrong type.
    """
    _expect(table, Mapping, path)
    hints = typing.get_type_hints(cls)
    specs = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values = {} if base is None else {name: getattr(base, name) for name in specs}
    for key, value in table.items():
        dotted = f"{path}.{key}" if path else key
        if key not in specs:
            what = f"unknown key{nearest(key, specs)}; known: {', '.join(sorted(specs))}"
            raise FieldError(dotted, what)
        present = values[key] if key in values else _default(specs[key])
        values[key] = _convert(value, hints[key], present, dotted)
    return cls(**values)


def as_table(value: Any) -> Any:
    """The inverse of ``from_table``: a config value as TOML values, without what is ``None``."""
    if isinstance(value, Choice):
        return {"use": value.use, **as_table(value.options)} if value.options else value.use
    if dataclasses.is_dataclass(value):
        value = {spec.name: getattr(value, spec.name) for spec in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: as_table(item) for key, item in value.items() if item is not None}
    return [as_table(item) for item in value] if isinstance(value, (tuple, list)) else value


def _default(spec: "dataclasses.Field[Any]") -> Any:
    if spec.default_factory is not dataclasses.MISSING:
        return spec.default_factory()
    return None if spec.default is dataclasses.MISSING else spec.default


def _convert(value: Any, hint: Any, present: Any, path: str) -> Any:
    """A TOML value as ``hint`` says; ``present`` is what a table is laid over."""
    args = typing.get_args(hint)
    if type(None) in args:
        (hint,) = (arg for arg in args if arg is not type(None))
        args = typing.get_args(hint)
    if hint is Choice:
        options = {"use": value} if isinstance(value, str) else dict(_expect(value, Mapping, path))
        return Choice(_expect(options.pop("use", ""), str, f"{path}.use"), options).over(present)
    if dataclasses.is_dataclass(hint):
        table = _expect(value, Mapping, path)
        return from_table(hint, table, path, present)  # type: ignore[arg-type]
    if typing.get_origin(hint) is tuple:
        row = _expect(value, (list, tuple), path)
        return tuple(_convert(item, args[0], None, path) for item in row)
    if typing.get_origin(hint) is Mapping:
        rows = _expect(value, Mapping, path).items()
        given = {k: _convert(v, args[1], None, f"{path}.{k}") for k, v in rows}
        return {**(present or {}), **given}
    if hint is float:
        return float(_expect(value, (int, float), path))
    return _expect(value, hint, path)


def _expect(value: Any, kind: Any, path: str) -> Any:
    numeric = kind is int or kind == (int, float)
    if not isinstance(value, kind) or (numeric and isinstance(value, bool)):
        raise FieldError(path, f"unexpected value {value!r}")
    return value

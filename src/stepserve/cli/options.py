"""What commands check before any work, and how they write results. Errors name the option."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepserve.core.bounds import Bound
from stepserve.core.errors import FieldError


def option(name: str) -> str:
    """A field's name as it is written on the command line."""
    return "--" + name.replace("_", "-")


def check_numbers(given: object, bounds: Mapping[str, Bound]) -> None:
    """Raises FieldError for an attribute of ``given`` that is not finite or out of its bound."""
    for name, bound in bounds.items():
        value = getattr(given, name)
        if value is not None and not math.isfinite(value):
            raise FieldError(option(name), f"must be a finite number, not {value}")
        bound.check(value, option(name))


def check_output(name: str, path: Path | None) -> None:
    """Raises FieldError unless the file can be written, or none was asked for."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise FieldError(name, f"no folder {path.parent}")
    if path.is_dir():
        raise FieldError(name, f"{path} is a folder, not a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise FieldError(name, f"{path} cannot be written")


def check_folder(name: str, folder: Path) -> None:
    """Raises FieldError unless the folder can be written to, or made with its parents."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise FieldError(name, f"{folder} is no folder that can be written to")


def merged(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``table`` with ``changes`` laid over it; nested tables are merged, the rest replaced."""
    result = dict(table)
    for key, value in changes.items():
        old = result.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = merged(old, value)
        result[key] = value
    return result


def write_json(name: str, path: Path | None, content: Mapping[str, Any]) -> None:
    """Write a result where it was asked for, if it was."""
    if path is None:
        return
    try:
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise FieldError(name, f"{path} cannot be written: {error}") from error

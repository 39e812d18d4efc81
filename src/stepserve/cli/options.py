"""What commands check before any work, and how they write results. Errors name the option."""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from stepserve.core.errors import FieldError


class Rule(NamedTuple):
    """What a finite number must be."""

    text: str
    holds: Callable[[float], bool]


NOT_NEGATIVE = Rule("must not be negative", lambda number: number >= 0)
AT_LEAST_ONE = Rule("must be at least 1", lambda number: number >= 1)
POSITIVE = Rule("must be positive", lambda number: number > 0)
SHARE = Rule("must be in (0, 1]", lambda number: 0 < number <= 1)


def option(name: str) -> str:
    """A field's name as it is written on the command line."""
    return "--" + name.replace("_", "-")


def check_numbers(given: object, rules: Mapping[str, Rule]) -> None:
    """Raises FieldError for an attribute of ``given`` that breaks its rule; ``None`` never does."""
    for name, rule in rules.items():
        value = getattr(given, name)
        if value is None:
            continue
        if not math.isfinite(value):
            raise FieldError(option(name), f"must be a finite number, not {value}")
        if not rule.holds(value):
            raise FieldError(option(name), rule.text)


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


def write_json(name: str, path: Path | None, content: Mapping[str, Any]) -> None:
    """Write a result where it was asked for, if it was."""
    if path is None:
        return
    try:
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise FieldError(name, f"{path} cannot be written: {error}") from error

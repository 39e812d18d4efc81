"""Text files that somebody points at. What cannot be read raises a FieldError naming the file."""

import json
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stepserve.core.errors import FieldError

LFS_POINTER = "version https://git-lfs.github.com/spec/"
"""How a file begins that only says where its content is kept."""


def read_text(path: Path, field: str) -> str:
    """The text of a file in UTF-8, with a byte order mark or without."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise FieldError(field, f"{path} is not in UTF-8 (byte {error.start})") from error
    except (OSError, ValueError) as error:  # a name may hold a null character
        why = getattr(error, "strerror", None) or error
        raise FieldError(field, f"cannot read {path}: {why}") from error
    if text.startswith(LFS_POINTER):
        raise FieldError(field, f"{path} is a git-lfs pointer: fetch the file with git lfs pull")
    return text


def read_json(path: Path, field: str) -> dict[str, Any]:
    """The object that a file in JSON holds."""
    try:
        content = json.loads(read_text(path, field))
    except (ValueError, RecursionError) as error:
        raise FieldError(field, f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise FieldError(field, f"{path} holds no JSON object")
    return content


def read_toml(path: Path, field: str) -> dict[str, Any]:
    """The table that a file in TOML is."""
    try:
        return tomllib.loads(read_text(path, field))
    except (ValueError, RecursionError) as error:
        raise FieldError(field, f"{path} is no TOML: {error}") from error


@contextmanager
def content_of(path: Path, field: str, kind: str) -> Iterator[None]:
    """What fails within is the file's fault: it is no ``kind``, or has a value that cannot be."""
    try:
        yield
    except FieldError as error:
        raise FieldError(error.field, f"{path}: {error.message}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise FieldError(field, f"{path} is no {kind}: {error!r}") from error

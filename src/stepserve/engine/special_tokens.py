"""Ids of the tokens with a meaning, from wherever a checkpoint in Hugging Face layout has them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepserve.core.errors import FieldError


def read_json(path: Path) -> dict[str, Any]:
    """The content of a JSON file. Raises FieldError (field ``model``) if there is none."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FieldError("model", f"cannot read {path}: {error}") from error
    return content


def token_ids(folder: Path, raw: Mapping[str, Any], mask_token: str | None) -> dict[str, Any]:
    """``eos_token_id`` and ``mask_token_id`` as they apply; a key is absent if nothing has it.

    What ends a text is first of all said by ``generation_config.json``, then by ``config.json``
    (``raw``), at last by the tokenizer. The mask is a diffusion model's: ``config.json`` comes
    first, and ``mask_token`` is its name where not even the tokenizer says which token it is.
    """
    generation = _read_if_there(folder / "generation_config.json")
    tokenizer = _read_if_there(folder / "tokenizer_config.json")
    orders = {"eos_token_id": (generation, raw), "mask_token_id": (raw, generation)}
    found: dict[str, Any] = {}
    for key, places in orders.items():
        if key == "mask_token_id" and mask_token is None:
            continue
        values = [place[key] for place in places if place.get(key) is not None]
        if not values:
            names = [tokenizer.get(key.removesuffix("_id"))]
            names += [mask_token] if key == "mask_token_id" else []
            added = _added_tokens(folder, tokenizer)
            values = [added[name] for name in map(_content, names) if name in added]
        found |= {key: values[0]} if values else {}
    return found


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _content(token: Any) -> str | None:
    """A token of ``tokenizer_config.json``: a string, an object, or absent."""
    content: str | None = token["content"] if isinstance(token, dict) else token
    return content


def _added_tokens(folder: Path, tokenizer: Mapping[str, Any]) -> dict[str, int]:
    listed = tokenizer.get("added_tokens_decoder") or {}
    more = _read_if_there(folder / "tokenizer.json").get("added_tokens") or []
    return {token["content"]: int(index) for index, token in listed.items()} | {
        token["content"]: token["id"] for token in more
    }

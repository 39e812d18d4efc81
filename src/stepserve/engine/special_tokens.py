"""Ids of the tokens with a meaning, from wherever a checkpoint in Hugging Face layout has them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepserve.engine.config_fields import refuse_value
from stepserve.files import content_of, read_json


def token_ids(folder: Path, raw: Mapping[str, Any], mask_token: str | None) -> dict[str, Any]:
    """``eos_token_id`` and ``mask_token_id`` as they apply; a key is absent if nothing has it.

    Raises FieldError (``model``) that names a file of another kind, or one of an id that is none.

    What ends a text is first of all said by ``generation_config.json``, then by ``config.json``
    (``raw``), at last by the tokenizer. The mask is a diffusion model's: ``config.json`` comes
    first, and ``mask_token`` is its name where not even the tokenizer says which token it is.
    """
    generation = folder / "generation_config.json"
    read = {folder / "config.json": raw, generation: _read_if_there(generation)}
    vocabulary = range(raw.get("embedding_size") or raw["vocab_size"])
    found: dict[str, Any] = {}
    for key, places in (("eos_token_id", reversed(read)), ("mask_token_id", iter(read))):
        if key == "mask_token_id" and mask_token is None:
            continue
        path = next((path for path in places if read[path].get(key) is not None), None)
        value = read[path][key] if path else _id_by_name(folder, key, mask_token)
        if value is None:
            continue
        with content_of(path or folder / "tokenizer.json", "model", "list of tokens"):
            ids = value if isinstance(value, list) and key == "eos_token_id" else [value]
            if not ids or not all(type(one) is int and one in vocabulary for one in ids):
                refuse_value(key, value, f"an id of the {len(vocabulary)} of the vocabulary")
        found[key] = value
    return found


def _id_by_name(folder: Path, key: str, mask_token: str | None) -> Any:
    """What the tokenizer says of a token that no config has the id of."""
    path = folder / "tokenizer_config.json"
    tokenizer = _read_if_there(path)
    with content_of(path, "model", "configuration of a tokenizer"):
        names = [_content(tokenizer.get(key.removesuffix("_id")))]
        listed = tokenizer.get("added_tokens_decoder") or {}
        added = {token["content"]: int(index) for index, token in listed.items()}
    path = folder / "tokenizer.json"
    more = _read_if_there(path).get("added_tokens") or []
    with content_of(path, "model", "tokenizer"):
        added |= {token["content"]: token["id"] for token in more}
    names += [mask_token] if key == "mask_token_id" else []
    return next((added[name] for name in names if name in added), None)


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path, "model") if path.exists() else {}


def _content(token: Any) -> str | None:
    """A token of ``tokenizer_config.json``: a string, an object, or absent."""
    content = token["content"] if isinstance(token, dict) else token
    return content if isinstance(content, str) else None

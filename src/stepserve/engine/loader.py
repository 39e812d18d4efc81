"""Reads checkpoints in Hugging Face layout: config.json and safetensors, whole or sharded.

What is supported stands in ``architectures``; anything else is refused with the list of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from stepserve.core.errors import FieldError
from stepserve.core.request import Family
from stepserve.engine.architectures import ARCHITECTURES, Architecture, refuse_value
from stepserve.engine.models.transformer import DiffusionTransformer, ModelConfig
from stepserve.engine.special_tokens import read_json, token_ids

DEFAULT_BLOCK_LENGTHS = (4, 8, 16, 32, 64)
DEFAULT_BLOCK_LENGTH = 32
DEFAULT_MAX_TOKENS = 256


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and what a server wants to know of it.

    ``suppressed_token_ids`` must never be written into an output (mask, padding, ...).
    Block lengths mean nothing to an autoregressive model; a block-causal one has its own.
    """

    model: DiffusionTransformer
    config: ModelConfig
    name: str
    block_lengths: tuple[int, ...]
    default_block_length: int
    default_max_tokens: int
    suppressed_token_ids: tuple[int, ...]
    family: Family = Family.DIFFUSION


def load_model(
    directory: Path | str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> LoadedModel:
    """Load a checkpoint directory. On the device ``meta`` no weights are read.

    Raises FieldError (field ``model``) that says what is wrong: no config.json, an unknown
    architecture or option, tensors that are missing, unexpected or of another shape.
    """
    folder = Path(directory)
    raw = read_json(folder / "config.json")
    architecture = _architecture(raw)
    raw |= token_ids(folder, raw, architecture.mask_token)
    if architecture.mask_token is not None and raw.get("mask_token_id") is None:
        token = architecture.mask_token
        raise FieldError("model", f"no mask token: no mask_token_id, no {token} in the tokenizer")
    try:
        config = architecture.config(raw)
    except KeyError as missing:
        raise FieldError("model", f"config.json lacks {missing}") from None
    with torch.device("meta"):  # no memory, no random initialisation: every weight is loaded
        model = DiffusionTransformer(config)
    tensors = _load_tensors(folder, model, architecture, device, dtype)
    model.load_state_dict(tensors, assign=True)
    model.set_rotary_tables(torch.device(device))
    extra = raw.get("stepserve", {})
    usual = {raw.get(f"{kind}_token_id") for kind in architecture.suppressed}
    suppressed = {
        config.mask_token_id,
        *extra.get("suppressed_token_ids", usual - {*config.eos_token_ids}),
    }
    block = config.attention_block
    lengths = DEFAULT_BLOCK_LENGTHS if block is None else (block,)
    return LoadedModel(
        model=model.eval().requires_grad_(False),
        config=config,
        name=extra.get("name", folder.resolve().name),
        block_lengths=tuple(extra.get("block_lengths", lengths)),
        default_block_length=extra.get("default_block_length", block or DEFAULT_BLOCK_LENGTH),
        default_max_tokens=extra.get("default_max_tokens", DEFAULT_MAX_TOKENS),
        suppressed_token_ids=tuple(sorted(suppressed - {None})),
        family=architecture.family,
    )


def _architecture(raw: Mapping[str, Any]) -> Architecture:
    names = raw.get("architectures") or ["(none)"]
    architecture = ARCHITECTURES.get(names[0])
    if architecture is None:
        supported = ", ".join(sorted(ARCHITECTURES))
        raise FieldError(
            "model", f"architecture {names[0]} is not supported; these are: {supported}"
        )
    for key, value in architecture.fixed.items():
        if raw.get(key) not in (None, value):
            refuse_value(key, raw[key], repr(value))
    return architecture


def _load_tensors(
    folder: Path,
    model: DiffusionTransformer,
    architecture: Architecture,
    device: torch.device | str,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """The checkpoint's tensors under our names; FieldError lists what does not fit."""
    files = _tensor_files(folder)
    config, ours = model.config, model.state_dict()
    sources = {name: _sources(architecture, name, config) for name in ours}
    tied_head = sources["head.weight"] if config.tie_embeddings else ()
    if tied_head:  # a checkpoint may hold a copy of a tied head; it is not read
        sources["head.weight"] = sources["embed.weight"]
    wanted = {theirs for names in sources.values() for theirs in names}
    found = {name for name in files if not name.endswith(".inv_freq")} - {*tied_head}
    _refuse("missing tensors", sorted(wanted - found))
    _refuse("unexpected tensors", sorted(found - wanted))
    read: dict[str, Tensor] = {}
    for path in sorted(set(files.values())):
        described = str(device) == "meta"
        with safe_open(path, framework="pt", device="cpu" if described else str(device)) as file:
            for name in wanted.intersection(file.keys()):
                # How an expert is chosen must not depend on the precision of the rest.
                exact = name.endswith(".expert_bias")
                kept = torch.float32 if exact else dtype
                if described:
                    shape = file.get_slice(name).get_shape()
                    read[name] = torch.empty(shape, dtype=kept, device=device)
                else:
                    read[name] = file.get_tensor(name).to(kept)
    tensors: dict[str, Tensor] = {}
    misfits: list[str] = []
    for name, weight in ours.items():
        rows, parts = architecture.own_rows(name, config), [read[n] for n in sources[name]]
        shape = weight.shape if len(parts) == 1 else weight.shape[1:]
        misfits += [
            f"{theirs} {tuple(part.shape)} instead of {tuple(shape)}"
            for theirs, part in zip(sources[name], parts, strict=True)
            if part[rows].shape != shape
        ]
        if not misfits:
            tensors[name] = parts[0][rows] if len(parts) == 1 else torch.stack(parts)
    _refuse("tensors of another shape", sorted(misfits))
    return tensors


def _sources(architecture: Architecture, name: str, config: ModelConfig) -> tuple[str, ...]:
    """Names in the checkpoint of what makes up a tensor of ours: one, or one for each expert."""
    theirs = architecture.source(name)
    if "{}" not in theirs:
        return (theirs,)
    assert config.experts is not None
    return tuple(theirs.format(expert) for expert in range(config.experts.count))


def _refuse(what: str, items: list[str]) -> None:
    if items:
        more = f" and {len(items) - 5} more" if len(items) > 5 else ""
        raise FieldError("model", f"{what}: {', '.join(items[:5])}{more}")


def _tensor_files(folder: Path) -> dict[str, Path]:
    """File of each tensor, from the index of a sharded checkpoint or from its only file."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return {name: folder / file for name, file in read_json(index)["weight_map"].items()}
    path = folder / "model.safetensors"
    try:
        with safe_open(path, framework="pt") as file:
            return dict.fromkeys(file.keys(), path)
    except OSError as error:
        raise FieldError("model", f"cannot read {path}: {error}") from error

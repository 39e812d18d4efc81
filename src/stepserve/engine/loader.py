"""Reads checkpoints in Hugging Face layout: config.json and safetensors, whole or sharded.

What is supported stands in ``architectures``; anything else is refused with the list of it.
"""

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stepserve.core.errors import FieldError, check
from stepserve.core.request import Family
from stepserve.engine.architectures import ARCHITECTURES, Architecture
from stepserve.engine.config_fields import checked, refuse_value
from stepserve.engine.models.transformer import DecoderModel, ModelConfig
from stepserve.engine.parallel import ALONE, Group, Share, parallelize
from stepserve.engine.special_tokens import token_ids
from stepserve.files import LFS_POINTER, content_of, read_json
from stepserve.tables import from_table

DEFAULT_BLOCK_LENGTHS = (4, 8, 16, 32, 64)
DEFAULT_BLOCK_LENGTH = 32
DEFAULT_MAX_TOKENS = 256
FLOATS = ("F64", "F32", "F16", "BF16")

_FILE_NAME = re.compile(r"[\w-][\w.-]*")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and what a server wants to know of it.

    ``suppressed_token_ids`` must never be written into an output (mask, padding, ...).
    Block lengths mean nothing to an autoregressive model; a block-causal one has its own.
    ``folder`` is where it was loaded from, ``group`` the ranks it is split over.
    """

    model: DecoderModel
    config: ModelConfig
    name: str
    block_lengths: tuple[int, ...]
    default_block_length: int
    default_max_tokens: int
    suppressed_token_ids: tuple[int, ...]
    family: Family = Family.DIFFUSION
    folder: Path | None = None
    group: Group = ALONE


def load_model(
    directory: Path | str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    group: Group = ALONE,
) -> LoadedModel:
    """Load a checkpoint directory: a rank of a ``group`` reads its share of the weights only.

    On a CPU, in the checkpoint's own dtype, what is read stays in the mapped file, which all
    processes of a node share; parts of rows are copied. On the device ``meta`` no weights are
    read.

    Raises FieldError (field ``model``) that says what is wrong: no config.json, an unknown
    architecture or option, tensors that are missing, unexpected or of another shape; (field
    ``tp_degree``) for a group that the model cannot be split over.
    """
    folder = Path(directory)
    raw, architecture = _read_config(folder)
    files = _tensor_files(folder)
    with content_of(folder / "config.json", "model", "configuration of a model"):
        config = _model_config(architecture, raw, len(files))
        extra = from_table(_Extra, raw.get("stepserve", {}), "stepserve")
        suppressed = _suppressed(architecture, config, raw, extra)
    with _Unloaded():
        model = DecoderModel(config)
    tensors = _load_tensors(files, model, architecture, device, dtype, group)
    if group.size > 1:
        parallelize(model, group)
    model.load_state_dict(tensors, assign=True)
    model.set_rotary_tables(torch.device(device))
    block = config.attention_block
    lengths = DEFAULT_BLOCK_LENGTHS if block is None else (block,)
    return LoadedModel(
        model=model.eval().requires_grad_(False),
        config=config,
        name=extra.name or folder.resolve().name,
        block_lengths=extra.block_lengths or lengths,
        default_block_length=extra.default_block_length or block or DEFAULT_BLOCK_LENGTH,
        default_max_tokens=extra.default_max_tokens,
        suppressed_token_ids=tuple(sorted(suppressed)),
        family=architecture.family,
        folder=folder,
        group=group,
    )


@dataclass(frozen=True, slots=True)
class _Extra:
    """The table ``stepserve`` of config.json, which the bundled model has."""

    name: str = ""
    block_lengths: tuple[int, ...] = ()
    default_block_length: int | None = None
    default_max_tokens: int = DEFAULT_MAX_TOKENS
    suppressed_token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Raises FieldError naming a number that is not positive."""
        for name in ("block_lengths", "default_block_length", "default_max_tokens"):
            value = getattr(self, name)
            numbers = value if isinstance(value, tuple) else (value,)
            positive = all(number is None or number > 0 for number in numbers)
            check(positive, f"stepserve.{name}", "must be positive")


def _read_config(folder: Path) -> tuple[dict[str, Any], Architecture]:
    """The keys of config.json, with the ids of special tokens wherever they are from."""
    path = folder / "config.json"
    raw = read_json(path, "model")
    with content_of(path, "model", "configuration of a model"):
        raw = checked(raw)
        architecture = _architecture(raw)
        if not (raw.get("embedding_size") or raw.get("vocab_size")):
            raise FieldError("model", "lacks 'vocab_size'")
    raw |= token_ids(folder, raw, architecture.mask_token)
    if architecture.mask_token is not None and raw.get("mask_token_id") is None:
        token = architecture.mask_token
        raise FieldError("model", f"no mask token: no mask_token_id, no {token} in the tokenizer")
    return raw, architecture


def _model_config(architecture: Architecture, raw: Mapping[str, Any], tensors: int) -> ModelConfig:
    """The model's shape, if one can be built of so many tensors."""
    try:
        config = architecture.config(raw)
    except KeyError as missing:
        raise FieldError("model", f"lacks {missing}") from None
    parts = {"layers": config.layers, "experts": config.experts.count if config.experts else 0}
    for what, count in parts.items():
        if count > tensors:
            raise FieldError("model", f"{count} {what}, but the files hold {tensors} tensors")
    if config.heads % config.kv_heads:
        what = f"{config.heads} heads of queries, {config.kv_heads} of keys: not equally many each"
        raise FieldError("model", what)
    if config.head_dim < 2 or config.rotary_dim % 2 or config.rotary_dim > config.head_dim:
        what = f"heads of {config.head_dim}, {config.rotary_dim} of them rotated: not in pairs"
        raise FieldError("model", what)
    return config


def _suppressed(
    architecture: Architecture, config: ModelConfig, raw: Mapping[str, Any], extra: _Extra
) -> set[int]:
    """Ids that are never to be written. FieldError for one that is no id of the vocabulary."""
    given = extra.suppressed_token_ids
    keys = [f"{kind}_token_id" for kind in architecture.suppressed] if given is None else []
    named = [("mask_token_id", config.mask_token_id), *((key, raw.get(key)) for key in keys)]
    named += [("stepserve.suppressed_token_ids", one) for one in given or ()]
    for key, one in named:
        if one is not None and (type(one) is not int or one not in range(config.vocab_size)):
            refuse_value(key, one, f"an id of the {config.vocab_size} of the vocabulary")
    own = config.eos_token_ids if given is None else ()  # padding with what ends a text is usual
    return {one for _, one in named if one is not None and one not in own}


class _Unloaded(TorchFunctionMode):
    """Models are made without memory for weights and without drawing any.

    ``torch.device("meta")`` alone would do the first only, and import a compiler for seconds.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is nn.init.normal_:
            return given["tensor"]
        if func in (torch.empty, torch.arange):  # weights; positions of the rotary tables
            given["device"] = "meta"
        return func(*args, **given)


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
    files: Mapping[str, Path],
    model: DecoderModel,
    architecture: Architecture,
    device: torch.device | str,
    dtype: torch.dtype,
    group: Group,
) -> dict[str, Tensor]:
    """The checkpoint's tensors under our names, or the rank's share of them.

    FieldError lists what does not fit.
    """
    share = None if group.size == 1 else Share.of(model.config, group.rank, group.size)
    config, ours = model.config, dict(model.state_dict())
    tied_head: tuple[str, ...] = ()
    if config.tie_embeddings:  # a checkpoint may hold a copy of a tied head; it is not read
        tied_head = _sources(architecture, "head.weight", config)
        del ours["head.weight"]
    sources = {name: _sources(architecture, name, config) for name in ours}
    wanted = {theirs for names in sources.values() for theirs in names}
    found = {name for name in files if not name.endswith(".inv_freq")} - {*tied_head}
    _refuse("missing tensors", sorted(wanted - found))
    _refuse("unexpected tensors", sorted(found - wanted))
    described = torch.device(device).type == "meta"
    tensors: dict[str, Tensor] = {}
    with contextlib.ExitStack() as stack:
        opened: dict[Path, Any] = {}
        for path in sorted(set(files.values())):
            where = "cpu" if described else str(device)
            opened[path] = stack.enter_context(_open(path, where))
        stored = {theirs: opened[files[theirs]] for theirs in wanted}
        _refuse("tensors that are not in the file of the index", _absent(files, opened))
        _refuse("tensors that are no plain floats", _quantized(stored))
        _refuse("tensors of another shape", _misfits(architecture, config, ours, stored))
        for name, weight in ours.items():
            # How an expert is chosen must not depend on the precision of the rest.
            kept = torch.float32 if name.endswith("router.bias") else dtype
            if described:
                tensors[name] = torch.empty(weight.shape, dtype=kept, device=device)
                continue
            read = partial(_part, stored, name, architecture.own_rows(name, config), share)
            if weight.dim() == 3:
                tensors[name] = _stacked(read, sources[name], kept)
            else:
                tensors[name] = read(sources[name][0]).to(kept)
    if config.tie_embeddings:
        tensors["head.weight"] = tensors["embed.weight"]
    return tensors


def _part(
    stored: Mapping[str, Any], name: str, rows: slice, share: Share | None, source: str
) -> Tensor:
    """Rows of the checkpoint's tensor ``source``, or the rank's share of them."""
    tensor: Tensor
    if share is None and rows == slice(None):
        tensor = stored[source].get_tensor(source)  # of a CPU: stays in the file
    else:
        part = stored[source].get_slice(source)
        tensor = part[rows] if share is None else share.read(name, part, rows)
    return tensor


def _stacked(read: Callable[[str], Tensor], sources: Sequence[str], dtype: torch.dtype) -> Tensor:
    """Tensors of one shape in one, of which no two exist at a time beside it."""
    first = read(sources[0])
    stack = torch.empty((len(sources), *first.shape), dtype=dtype, device=first.device)
    del first  # its shape was all that was wanted
    for expert, source in zip(stack, sources, strict=True):
        expert.copy_(read(source))
    return stack


def _misfits(
    architecture: Architecture,
    config: ModelConfig,
    ours: Mapping[str, Tensor],
    stored: Mapping[str, Any],
) -> list[str]:
    """Tensors of a checkpoint, ``stored`` in open files, that have not the shape of ours."""
    misfits = set()
    for name, weight in ours.items():
        rows, expected = architecture.own_rows(name, config), tuple(weight.shape[-2:])
        for theirs in _sources(architecture, name, config):
            shape = tuple(stored[theirs].get_slice(theirs).get_shape())
            if (*(len(range(n)[rows]) for n in shape[:1]), *shape[1:]) != expected:
                misfits.add(f"{theirs} {shape} instead of {expected}")
    return sorted(misfits)


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
    if not index.exists():
        path = folder / "model.safetensors"
        with _open(path) as file:
            return dict.fromkeys(file.keys(), path)
    listed = read_json(index, "model").get("weight_map")
    if not isinstance(listed, dict):
        raise FieldError("model", f"{index} has no weight_map, a table of tensors and their files")
    for file in listed.values():
        if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
            raise FieldError("model", f"{index}: weight_map: {file!r} is no name of a file")
    return {name: folder / file for name, file in listed.items()}


def _open(path: Path, device: str = "cpu") -> Any:
    """A file of weights. FieldError that names it if it is none, or not whole."""
    try:
        with path.open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER.encode():
                what = "is a git-lfs pointer: fetch the file with git lfs pull"
                raise FieldError("model", f"{path} {what}")
        return safe_open(path, framework="pt", device=device)
    except OSError as error:
        why = error.strerror or error
        raise FieldError("model", f"cannot read {path}: {why} (a file of safetensors)") from error
    except SafetensorError as error:
        what = f"{path} is empty, cut off, or no file of safetensors: {error}"
        raise FieldError("model", what) from error


def _absent(files: Mapping[str, Path], opened: Mapping[Path, Any]) -> list[str]:
    there = {path: {*file.keys()} for path, file in opened.items()}
    return sorted(f"{name} in {path}" for name, path in files.items() if name not in there[path])


def _quantized(stored: Mapping[str, Any]) -> list[str]:
    kinds = {name: str(file.get_slice(name).get_dtype()) for name, file in stored.items()}
    return sorted(f"{name} ({kind})" for name, kind in kinds.items() if kind not in FLOATS)

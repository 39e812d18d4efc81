"""Reads checkpoints in Hugging Face layout: config.json and safetensors, whole or sharded.

Each architecture is one entry of ``ARCHITECTURES``: how its config reads, and what its
tensors are called. Anything else is refused with the list of what is supported.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stepserve.core.errors import FieldError
from stepserve.core.request import Family
from stepserve.engine.models.transformer import DiffusionTransformer, ModelConfig
from stepserve.engine.parallel import ALONE, Group, Share, parallelize

DEFAULT_BLOCK_LENGTHS = (4, 8, 16, 32, 64)
DEFAULT_BLOCK_LENGTH = 32
DEFAULT_MAX_TOKENS = 256


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and what a server wants to know of it.

    ``suppressed_token_ids`` must never be written into an output (mask, padding, ...).
    Block lengths mean nothing to an autoregressive model. ``folder`` is where it was loaded
    from, ``group`` the ranks it is split over.
    """

    model: DiffusionTransformer
    config: ModelConfig
    name: str
    block_lengths: tuple[int, ...]
    default_block_length: int
    default_max_tokens: int
    suppressed_token_ids: tuple[int, ...]
    family: Family = Family.DIFFUSION
    folder: Path | None = None
    group: Group = ALONE


@dataclass(frozen=True, slots=True)
class Architecture:
    """How the checkpoints of one architecture are read.

    ``top`` and ``layer`` map our names to theirs (without ``.weight`` or ``.bias``); layer
    ``i`` lies under ``layers.format(i)``. ``fixed``: config keys whose only supported value
    is the given one (absent is fine). ``suppressed``: kinds of tokens (``{}_token_id``) that are
    not to be written unless the checkpoint says what is: diffusion models are trained to fill
    with them, causal ones hardly predict them.
    """

    config: Callable[[Mapping[str, Any]], ModelConfig]
    top: Mapping[str, str]
    layers: str
    layer: Mapping[str, str]
    fixed: Mapping[str, object]
    family: Family = Family.DIFFUSION
    suppressed: tuple[str, ...] = ("pad", "bos")

    def source(self, name: str) -> str:
        """Name in the checkpoint of a tensor of ``DiffusionTransformer``."""
        if not name.startswith("layers."):
            part, kind = name.rsplit(".", 1)
            return f"{self.top[part]}.{kind}"
        _, index, part, kind = name.split(".")
        return f"{self.layers.format(index)}.{self.layer[part]}.{kind}"


def _llada_config(raw: Mapping[str, Any]) -> ModelConfig:
    return ModelConfig(
        vocab_size=raw.get("embedding_size") or raw["vocab_size"],
        hidden_size=raw["d_model"],
        layers=raw["n_layers"],
        heads=raw["n_heads"],
        kv_heads=raw.get("n_kv_heads") or raw["n_heads"],
        mlp_size=raw["mlp_hidden_size"],
        max_positions=raw["max_sequence_length"],
        mask_token_id=raw["mask_token_id"],
        eos_token_id=raw["eos_token_id"],
        rope_theta=raw.get("rope_theta", 10_000.0),
        norm_eps=raw.get("rms_norm_eps", 1e-5),
        tie_embeddings=raw.get("weight_tying", False),
        scale_embeddings=raw.get("input_emb_norm", False),
        qkv_bias=raw.get("include_qkv_bias") or False,
    )


def _dream_config(raw: Mapping[str, Any]) -> ModelConfig:
    return ModelConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        layers=raw["num_hidden_layers"],
        heads=raw["num_attention_heads"],
        kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
        mlp_size=raw["intermediate_size"],
        max_positions=raw["max_position_embeddings"],
        mask_token_id=raw["mask_token_id"],
        eos_token_id=raw["eos_token_id"],
        rope_theta=raw.get("rope_theta", 10_000.0),
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        tie_embeddings=raw.get("tie_word_embeddings", False),
        qkv_bias=True,
        shift_logits=True,
    )


def _causal_config(raw: Mapping[str, Any], *, qkv_bias: bool) -> ModelConfig:
    """Llama and Qwen2. Transformers 5 writes ``rope_parameters``, older ones ``rope_scaling``."""
    heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
    rope = raw.get("rope_parameters") or {}
    for key in ("rope_parameters", "rope_scaling"):
        scaling = raw.get(key) or {}
        if scaling.get("rope_type", scaling.get("type", "default")) != "default":
            _refuse_value(key, scaling, "plain rotary embeddings")
    if (raw.get("head_dim") or hidden // heads) * heads != hidden:
        _refuse_value("head_dim", raw.get("head_dim"), "hidden_size / num_attention_heads")
    if set(raw.get("layer_types") or ()) - {"full_attention"}:
        _refuse_value("layer_types", raw["layer_types"], "full_attention")
    eos = raw["eos_token_id"]
    first, *more = eos if isinstance(eos, list) and eos else [eos]
    if not isinstance(first, int):
        _refuse_value("eos_token_id", eos, "a token id or a list of them")
    return ModelConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=hidden,
        layers=raw["num_hidden_layers"],
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        mlp_size=raw["intermediate_size"],
        max_positions=raw["max_position_embeddings"],
        mask_token_id=None,
        eos_token_id=first,
        more_eos_token_ids=tuple(more),
        rope_theta=raw.get("rope_theta") or rope.get("rope_theta", 10_000.0),
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        tie_embeddings=raw.get("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
    )


def _refuse_value(key: str, value: object, only: str) -> NoReturn:
    raise FieldError("model", f"{key} = {value!r} is not supported, only {only}")


# The names of Llama, which Qwen2 and Dream took over.
LLAMA_TOP = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
LLAMA_LAYER = {
    "attn_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}


def _causal(qkv_bias: bool, fixed: Mapping[str, object]) -> Architecture:
    return Architecture(
        config=partial(_causal_config, qkv_bias=qkv_bias),
        top=LLAMA_TOP,
        layers="model.layers.{}",
        layer=LLAMA_LAYER,
        fixed={"hidden_act": "silu", "attention_bias": qkv_bias, "mlp_bias": False, **fixed},
        family=Family.AUTOREGRESSIVE,
        suppressed=(),
    )


ARCHITECTURES = {
    "LLaDAModelLM": Architecture(
        config=_llada_config,
        top={
            "embed": "model.transformer.wte",
            "norm": "model.transformer.ln_f",
            "head": "model.transformer.ff_out",
        },
        layers="model.transformer.blocks.{}",
        layer={
            "attn_norm": "attn_norm",
            "q_proj": "q_proj",
            "k_proj": "k_proj",
            "v_proj": "v_proj",
            "o_proj": "attn_out",
            "mlp_norm": "ff_norm",
            "gate_proj": "ff_proj",
            "up_proj": "up_proj",
            "down_proj": "ff_out",
        },
        fixed={
            "block_type": "llama",
            "layer_norm_type": "rms",
            "activation_type": "silu",
            "rope": True,
            "alibi": False,
            "include_bias": False,
            "scale_logits": False,
        },
    ),
    "DreamModel": Architecture(
        config=_dream_config,
        top=LLAMA_TOP,
        layers="model.layers.{}",
        layer=LLAMA_LAYER,
        fixed={"hidden_act": "silu", "rope_scaling": None, "use_sliding_window": False},
    ),
    "LlamaForCausalLM": _causal(qkv_bias=False, fixed={"sliding_window": None}),
    "Qwen2ForCausalLM": _causal(qkv_bias=True, fixed={"use_sliding_window": False}),
}


def load_model(
    directory: Path | str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    group: Group = ALONE,
) -> LoadedModel:
    """Load a checkpoint directory: a rank of a ``group`` reads its share of the weights only.

    On a CPU, in the checkpoint's own dtype, what is read stays in the mapped file, which all
    processes of a node share; parts of rows are copied. On the device ``meta`` there are no
    weights at all.

    Raises FieldError (field ``model``) that says what is wrong: no config.json, an unknown
    architecture or option, tensors that are missing, unexpected or of another shape; (field
    ``tp_degree``) for a group that the model cannot be split over.
    """
    folder = Path(directory)
    raw = _read_json(folder / "config.json")
    architecture = _architecture(raw)
    if architecture.family is Family.AUTOREGRESSIVE:
        raw |= _generation_ends(folder)
    try:
        config = architecture.config(raw)
    except KeyError as missing:
        raise FieldError("model", f"config.json lacks {missing}") from None
    with _Unloaded():
        model = DiffusionTransformer(config)
    if torch.device(device).type == "meta":
        model.to(dtype)
    else:
        tensors = _load_tensors(folder, model, architecture, device, dtype, group)
        if group.size > 1:
            parallelize(model, group)
        model.load_state_dict(tensors, assign=True)
        model.set_rotary_tables(torch.device(device))
    extra = raw.get("stepserve", {})
    usual = {raw.get(f"{kind}_token_id") for kind in architecture.suppressed}
    suppressed = {
        config.mask_token_id,
        *extra.get("suppressed_token_ids", usual - {config.eos_token_id}),
    }
    return LoadedModel(
        model=model.eval().requires_grad_(False),
        config=config,
        name=extra.get("name", folder.resolve().name),
        block_lengths=tuple(extra.get("block_lengths", DEFAULT_BLOCK_LENGTHS)),
        default_block_length=extra.get("default_block_length", DEFAULT_BLOCK_LENGTH),
        default_max_tokens=extra.get("default_max_tokens", DEFAULT_MAX_TOKENS),
        suppressed_token_ids=tuple(sorted(suppressed - {None})),
        family=architecture.family,
        folder=folder,
        group=group,
    )


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
        if func is torch.empty:
            given["device"] = "meta"
        return func(*args, **given)


def _generation_ends(folder: Path) -> dict[str, Any]:
    """What ends a text by ``generation_config.json``, which outranks ``config.json``."""
    path = folder / "generation_config.json"
    eos = _read_json(path).get("eos_token_id") if path.exists() else None
    return {} if eos is None else {"eos_token_id": eos}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FieldError("model", f"cannot read {path}: {error}") from error
    return content


def _architecture(raw: Mapping[str, Any]) -> Architecture:
    names = raw.get("architectures") or ["(none)"]
    architecture = ARCHITECTURES.get(names[0])
    if architecture is None:
        supported = ", ".join(sorted(ARCHITECTURES))
        raise FieldError(
            "model", f"architecture {names[0]} is not supported; these are: {supported}"
        )
    for key, value in architecture.fixed.items():
        if raw.get(key, value) != value:
            raise FieldError("model", f"{key} = {raw[key]!r} is not supported, only {value!r}")
    return architecture


def _load_tensors(
    folder: Path,
    model: DiffusionTransformer,
    architecture: Architecture,
    device: torch.device | str,
    dtype: torch.dtype,
    group: Group,
) -> dict[str, Tensor]:
    """The checkpoint's tensors under our names, or the rank's share of them.

    FieldError lists what does not fit.
    """
    share = None if group.size == 1 else Share.of(model.config, group.rank, group.size)
    files = _tensor_files(folder)
    sources = {name: architecture.source(name) for name in model.state_dict()}
    tied_head = sources["head.weight"] if model.config.tie_embeddings else None
    if tied_head is not None:  # a checkpoint may hold a copy of a tied head; it is not read
        sources["head.weight"] = sources["embed.weight"]
    wanted = set(sources.values())
    found = {name for name in files if not name.endswith(".inv_freq")} - {tied_head}
    _refuse("missing tensors", sorted(wanted - found))
    _refuse("unexpected tensors", sorted(found - wanted))
    ours = {theirs: (name, model.state_dict()[name].shape) for name, theirs in sources.items()}
    read: dict[str, Tensor] = {}
    shapes = []
    for path in sorted(set(files.values())):
        with safe_open(path, framework="pt", device=str(device)) as file:
            for theirs in wanted.intersection(file.keys()):
                name, shape = ours[theirs]
                tensor = file.get_slice(theirs)
                if tuple(tensor.get_shape()) != shape:
                    what = f"{theirs} {tuple(tensor.get_shape())} instead of {tuple(shape)}"
                    shapes.append(what)
                    continue
                part = file.get_tensor(theirs) if share is None else share.read(name, tensor)
                read[theirs] = part.to(dtype)
    _refuse("tensors of another shape", sorted(shapes))
    return {name: read[theirs] for name, theirs in sources.items()}


def _refuse(what: str, items: list[str]) -> None:
    if items:
        more = f" and {len(items) - 5} more" if len(items) > 5 else ""
        raise FieldError("model", f"{what}: {', '.join(items[:5])}{more}")


def _tensor_files(folder: Path) -> dict[str, Path]:
    """File of each tensor, from the index of a sharded checkpoint or from its only file."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return {name: folder / file for name, file in _read_json(index)["weight_map"].items()}
    path = folder / "model.safetensors"
    try:
        with safe_open(path, framework="pt") as file:
            return dict.fromkeys(file.keys(), path)
    except OSError as error:
        raise FieldError("model", f"cannot read {path}: {error}") from error

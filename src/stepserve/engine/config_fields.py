"""What the keys of a checkpoint's config.json may hold, checked before any of them is used."""

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from stepserve.core.errors import FieldError

MOST_POSITIONS = 2**24
"""Tables of rotary embeddings have a row for each position."""


def refuse_value(key: str, value: object, only: str) -> NoReturn:
    """Raise the FieldError that says which value of a config key is supported."""
    raise FieldError("model", f"{key} = {reprlib.repr(value)} is not supported, only {only}")


@dataclass(frozen=True, slots=True)
class Kind:
    """What a value must be, in words, and whether one is."""

    text: str
    holds: Callable[[Any], bool]


def _whole(least: int, most: int = 2**31 - 1) -> Kind:
    return Kind(
        f"a whole number of {least} to {most}", lambda v: type(v) is int and least <= v <= most
    )


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _list_of(kind: type) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, list) and all(type(one) is kind for one in v)


COUNT, WHOLE, POSITIONS = _whole(1), _whole(0), _whole(1, MOST_POSITIONS)
POSITIVE = Kind("a positive number", lambda v: _number(v) and v > 0)
ABOVE_1 = Kind("a number above 1", lambda v: _number(v) and v > 1)
SHARE = Kind("a number in (0, 1]", lambda v: _number(v) and 0 < v <= 1)
FLAG = Kind("true or false", lambda v: type(v) is bool)
TABLE = Kind("a table", lambda v: isinstance(v, dict))

KINDS = {
    **dict.fromkeys(
        (
            "vocab_size", "embedding_size", "hidden_size", "d_model", "num_hidden_layers",
            "n_layers", "num_attention_heads", "n_heads", "num_key_value_heads", "n_kv_heads",
            "head_dim", "intermediate_size", "mlp_hidden_size", "dense_intermediate_size",
            "expert_intermediate_size", "moe_intermediate_size", "num_experts",
            "num_experts_per_tok", "n_group", "topk_group", "block_size", "bd_size",
        ),
        COUNT,
    ),
    **dict.fromkeys(
        ("first_k_dense_replace", "num_shared_experts", "shared_expert_intermediate_size"), WHOLE
    ),
    **dict.fromkeys(("max_position_embeddings", "max_sequence_length"), POSITIONS),
    **dict.fromkeys(("rms_norm_eps", "routed_scaling_factor"), POSITIVE),
    "rope_theta": ABOVE_1,
    "partial_rotary_factor": SHARE,
    **dict.fromkeys(
        (
            "weight_tying", "tie_word_embeddings", "input_emb_norm", "include_qkv_bias",
            "qk_layernorm", "use_qk_norm", "use_qkv_bias",
        ),
        FLAG,
    ),
    **dict.fromkeys(("rope_parameters", "rope_scaling", "stepserve"), TABLE),
    "architectures": Kind("a list of names", _list_of(str)),
    "layer_types": Kind("a list of names", _list_of(str)),
    "moe_layer_freq": Kind("a list of whole numbers", _list_of(int)),
}  # fmt: skip

ROPE_KINDS = {
    **dict.fromkeys(
        (
            "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
            "attention_factor",
        ),
        POSITIVE,
    ),
    **dict.fromkeys(("type", "rope_type"), Kind("a name", lambda v: isinstance(v, str))),
    "original_max_position_embeddings": POSITIONS,
    "rope_theta": ABOVE_1,
    "partial_rotary_factor": SHARE,
    "truncate": FLAG,
}  # fmt: skip

QUANTIZED = ("quantization_config", "compression_config")


def checked(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config; of those that are known null is as if they were absent.

    Raises FieldError (``model``) naming a key whose value cannot be.
    """
    for key in QUANTIZED:
        if raw.get(key) is not None:
            refuse_value(key, raw[key], "weights that are not quantized")
    found = _checked(raw, KINDS, "")
    for key in ("rope_parameters", "rope_scaling"):
        if key in found:
            found[key] = _checked(found[key], ROPE_KINDS, f"{key}.")
    return found


def _checked(raw: Mapping[str, Any], kinds: Mapping[str, Kind], path: str) -> dict[str, Any]:
    for key, kind in kinds.items():
        value = raw.get(key)
        if value is not None and not kind.holds(value):
            refuse_value(path + key, value, kind.text)
    return {key: value for key, value in raw.items() if value is not None or key not in kinds}

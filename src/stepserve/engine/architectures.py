"""The architectures that stepserve serves: how a config reads, what tensors are called.

Each is one entry of ``ARCHITECTURES``, under its name in ``config.json``. Keys, names and masks
are those of the public code: transformers 5.19 (Llama, Qwen2, Qwen3), JetAstra/SDAR,
NVlabs/Fast-dLLM, inclusionAI/dInfer (LLaDA-MoE, LLaDA2).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from stepserve.core.request import Family
from stepserve.engine.config_fields import MOST_POSITIONS, refuse_value
from stepserve.engine.models.experts import ExpertsConfig, GroupedRouting, SoftmaxRouting
from stepserve.engine.models.rotary import Llama3Scaling, Scaling, YarnScaling
from stepserve.engine.models.transformer import ModelConfig


@dataclass(frozen=True, slots=True)
class Architecture:
    """How the checkpoints of one architecture are read.

    ``top`` and ``layer`` map our names to theirs, with or without ``.weight`` or ``.bias``; layer
    ``i`` lies under ``layers.format(i)``. A name with ``{}`` stands for one tensor of each
    expert, ``rows`` for those of a tensor that holds more than ours. ``fixed``: config keys whose
    only supported value is the given one (absent is fine). ``mask_token``: what the mask is
    called in the tokenizer, where no config has its id. ``suppressed``: kinds of tokens
    (``{}_token_id``) that are not to be written unless the checkpoint says what is: diffusion
    models are trained to fill with them, autoregressive ones hardly predict them.
    """

    config: Callable[[Mapping[str, Any]], ModelConfig]
    top: Mapping[str, str]
    layers: str
    layer: Mapping[str, str]
    fixed: Mapping[str, object]
    family: Family = Family.DIFFUSION
    suppressed: tuple[str, ...] = ("pad", "bos")
    mask_token: str | None = None
    rows: Mapping[str, Callable[[ModelConfig], slice]] = field(default_factory=dict)

    def source(self, name: str) -> str:
        """Name in the checkpoint of a tensor of ``DecoderModel``."""
        if not name.startswith("layers."):
            return _renamed(self.top, name)
        _, index, part = name.split(".", 2)
        return f"{self.layers.format(index)}.{_renamed(self.layer, part)}"

    def own_rows(self, name: str, config: ModelConfig) -> slice:
        """Rows of the checkpoint's tensor that are ours."""
        rows = self.rows.get(name.split(".")[-2])
        return slice(None) if rows is None else rows(config)


def _renamed(names: Mapping[str, str], name: str) -> str:
    if name in names:
        return names[name]
    part, kind = name.rsplit(".", 1)
    return f"{names[part]}.{kind}"


def _ends(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end a text, the first of them the model's own."""
    eos = raw["eos_token_id"]
    ids = tuple(eos) if isinstance(eos, list) else (eos,)
    vocabulary = range(raw.get("embedding_size") or raw["vocab_size"])
    if not ids or not all(type(token) is int and token in vocabulary for token in ids):
        refuse_value("eos_token_id", eos, "an id of the vocabulary or a list of them")
    return ids


def _llada_config(raw: Mapping[str, Any]) -> ModelConfig:
    rope = raw.get("rope_parameters") or {}
    first, *more = _ends(raw)
    if _scaling(raw, raw["max_sequence_length"]) is not None:
        key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
        refuse_value(key, raw[key], "plain rotary embeddings")
    return ModelConfig(
        vocab_size=raw.get("embedding_size") or raw["vocab_size"],
        hidden_size=raw["d_model"],
        layers=raw["n_layers"],
        heads=raw["n_heads"],
        kv_heads=raw.get("n_kv_heads") or raw["n_heads"],
        mlp_size=raw["mlp_hidden_size"],
        max_positions=raw["max_sequence_length"],
        mask_token_id=raw["mask_token_id"],
        eos_token_id=first,
        more_eos_token_ids=tuple(more),
        rope_theta=raw.get("rope_theta") or rope.get("rope_theta", 10_000.0),
        norm_eps=raw.get("rms_norm_eps", 1e-5),
        tie_embeddings=raw.get("weight_tying", False),
        scale_embeddings=raw.get("input_emb_norm", False),
        qkv_bias=raw.get("include_qkv_bias") or False,
    )


def _config(raw: Mapping[str, Any], *, mlp: str = "intermediate_size", **more: Any) -> ModelConfig:
    """What Llama's keys say, and ``more`` fields. ``mlp`` is the key of the MLP's size."""
    if set(raw.get("layer_types") or ()) - {"full_attention"}:
        refuse_value("layer_types", raw["layer_types"], "full_attention")
    heads, positions = raw["num_attention_heads"], raw["max_position_embeddings"]
    rope, scaling = raw.get("rope_parameters") or {}, _scaling(raw, positions)
    if isinstance(scaling, YarnScaling):
        positions = max(positions, int(scaling.factor * scaling.original_positions))
        if positions > MOST_POSITIONS:
            refuse_value("rope_scaling", scaling.factor, f"up to {MOST_POSITIONS} positions")
    head_dim = more.pop("head_dim", None) or raw.get("head_dim") or raw["hidden_size"] // heads
    partial_rotary = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    first, *others = _ends(raw)
    return ModelConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        layers=raw["num_hidden_layers"],
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        mlp_size=raw[mlp],
        max_positions=positions,
        mask_token_id=raw.get("mask_token_id"),
        eos_token_id=first,
        more_eos_token_ids=tuple(others),
        rope_theta=raw.get("rope_theta") or rope.get("rope_theta", 10_000.0),
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        tie_embeddings=raw.get("tie_word_embeddings", False),
        head_dim=head_dim,
        rotary_dim=int(head_dim * partial_rotary),
        rope_scaling=scaling,
        **more,
    )


def _scaling(raw: Mapping[str, Any], positions: int) -> Scaling | None:
    """Transformers 5 writes ``rope_parameters``, older ones ``rope_scaling``."""
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    rope = raw.get(key) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    original = rope.get("original_max_position_embeddings", positions)
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        if low >= high:
            refuse_value(f"{key}.low_freq_factor", low, "less than high_freq_factor")
        return Llama3Scaling(rope["factor"], low, high, original)
    if kind != "yarn" or rope.get("mscale") or not rope.get("truncate", True):
        refuse_value(key, rope, "plain rotary embeddings, llama3 and plain yarn")
    return YarnScaling(
        rope["factor"],
        original,
        rope.get("attention_factor") or _yarn_attention(rope["factor"]),
        rope.get("beta_fast") or 32.0,
        rope.get("beta_slow") or 1.0,
    )


def _yarn_attention(factor: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * math.log(factor) + 1.0


def _sdar_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Qwen3 with blocks. Released without ``block_size``, the model is the one of blocks of 4."""
    return _qwen3_config(raw, attention_block=raw.get("block_size", 4))


def _qwen3_config(raw: Mapping[str, Any], **more: Any) -> ModelConfig:
    return _config(raw, qk_norm=True, head_dim=raw.get("head_dim", 128), **more)


def _fast_dllm_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Qwen2 with blocks; what predicts a position stands before it, as in Qwen2."""
    block = raw.get("bd_size", 32)
    return _config(raw, qkv_bias=True, shift_logits=True, attention_block=block)


def _llada_moe_config(raw: Mapping[str, Any]) -> ModelConfig:
    kinds = raw.get("moe_layer_freq") or [1] * raw["num_hidden_layers"]
    if raw["num_experts_per_tok"] > raw["num_experts"]:
        refuse_value("num_experts_per_tok", raw["num_experts_per_tok"], "up to num_experts")
    experts = ExpertsConfig(
        raw["num_experts"],
        raw["expert_intermediate_size"],
        SoftmaxRouting(raw["num_experts_per_tok"]),
        raw.get("shared_expert_intermediate_size") or 0,
        frozenset(index for index, kind in enumerate(kinds) if kind == 0),
    )
    norm = bool(raw.get("qk_layernorm"))
    return _config(raw, mlp="dense_intermediate_size", qk_norm=norm, experts=experts)


def _llada2_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Blocks of 32: no config says so, the published sampler does (``block_length``)."""
    size = raw["moe_intermediate_size"]
    routing = GroupedRouting(
        raw["num_experts_per_tok"],
        raw["n_group"],
        raw["topk_group"],
        raw.get("routed_scaling_factor", 1.0),
    )
    in_group, left = divmod(raw["num_experts"], routing.groups)
    if left or in_group < 2:
        refuse_value("n_group", routing.groups, "groups of equally many experts, two at least")
    if not 1 <= routing.groups_per_token <= routing.groups:
        refuse_value("topk_group", routing.groups_per_token, "1 to n_group")
    if not 1 <= routing.per_token <= routing.groups_per_token * in_group:
        refuse_value("num_experts_per_tok", routing.per_token, "what topk_group groups have")
    experts = ExpertsConfig(
        raw["num_experts"],
        size,
        routing,
        size * (raw.get("num_shared_experts") or 0),
        frozenset(range(min(raw.get("first_k_dense_replace", 0), raw["num_hidden_layers"]))),
    )
    return _config(
        {"partial_rotary_factor": 0.5, **raw},
        qk_norm=raw.get("use_qk_norm", True),
        qkv_bias=raw.get("use_qkv_bias", False),
        attention_block=raw.get("block_size", 32),
        experts=experts,
    )


# The names of Llama, which most took over.
LLAMA_TOP = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
LLAMA_LAYER = {
    "attn_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}
EXPERTS = {
    "experts.router": "mlp.gate",
    "experts.gate_proj": "mlp.experts.{}.gate_proj.weight",
    "experts.up_proj": "mlp.experts.{}.up_proj.weight",
    "experts.down_proj": "mlp.experts.{}.down_proj.weight",
}
LLADA2_LAYER = {
    **LLAMA_LAYER,
    **EXPERTS,
    "q_proj": "attention.query_key_value",
    "k_proj": "attention.query_key_value",
    "v_proj": "attention.query_key_value",
    "o_proj": "attention.dense",
    "q_norm": "attention.query_layernorm",
    "k_norm": "attention.key_layernorm",
    "experts.router.bias": "mlp.gate.expert_bias",
    "experts.shared.gate_proj": "mlp.shared_experts.gate_proj",
    "experts.shared.up_proj": "mlp.shared_experts.up_proj",
    "experts.shared.down_proj": "mlp.shared_experts.down_proj",
}
LLADA_MOE_LAYER = {
    **LLAMA_LAYER,
    **EXPERTS,
    "experts.shared.gate_proj": "shared_expert.gate_proj",
    "experts.shared.up_proj": "shared_expert.up_proj",
    "experts.shared.down_proj": "shared_expert.down_proj",
}


def _fused(first: int, config: ModelConfig) -> slice:
    """Rows of queries (0), keys (1) or values (2) in one tensor of all three."""
    sizes = (config.heads, config.kv_heads, config.kv_heads)
    start = sum(sizes[:first]) * config.head_dim
    return slice(start, None if first == 2 else start + sizes[first] * config.head_dim)


def _llama(
    config: Callable[[Mapping[str, Any]], ModelConfig],
    fixed: Mapping[str, object],
    layer: Mapping[str, str] = LLAMA_LAYER,
    **more: Any,
) -> Architecture:
    """An architecture with Llama's names, but for those of ``layer``."""
    fixed = {"hidden_act": "silu", "mlp_bias": False, **fixed}
    return Architecture(config, LLAMA_TOP, "model.layers.{}", layer, fixed, **more)


_ar = partial(_llama, family=Family.AUTOREGRESSIVE, suppressed=())

_LLADA = Architecture(
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
)
_LLADA_MOE = _llama(
    _llada_moe_config,
    {
        "attention_bias": False,
        "clip_qkv": None,
        "moe_router_enable_expert_bias": False,
        "moe_router_score_function": "softmax",
        # The public code reads none of these three: whoever sets them expects what nobody computes.
        "norm_topk_prob": False,
        "router_num_group": 1,
        "router_topk_group": 1,
        "routed_scaling_factor": 1,
    },
    LLADA_MOE_LAYER,
    mask_token="<|mask|>",
)

ARCHITECTURES = {
    "LLaDAModelLM": _LLADA,
    "DreamModel": _llama(
        partial(_config, qkv_bias=True, shift_logits=True),
        {"use_sliding_window": False},
        mask_token="<|mask|>",
    ),
    "LLaDAMoEModelLM": _LLADA_MOE,
    "LLaDAMoEModel": _LLADA_MOE,
    "LLaDA2MoeModelLM": Architecture(
        _llada2_config,
        {**LLAMA_TOP, "embed": "model.word_embeddings"},
        "model.layers.{}",
        LLADA2_LAYER,
        {
            "hidden_act": "silu",
            "use_bias": False,
            "norm_head": False,
            "use_sliding_window": False,
            "score_function": "sigmoid",
            "norm_topk_prob": True,
            "moe_router_enable_expert_bias": True,
        },
        mask_token="<|mask|>",
        rows={f"{part}_proj": partial(_fused, index) for index, part in enumerate("qkv")},
    ),
    "SDARForCausalLM": _llama(
        _sdar_config,
        {"attention_bias": False, "use_sliding_window": False},
        mask_token="<|MASK|>",
    ),
    "Fast_dLLM_QwenForCausalLM": _llama(
        _fast_dllm_config,
        {"attention_bias": True, "use_sliding_window": False},
        mask_token="|<MASK>|",
    ),
    "LlamaForCausalLM": _ar(_config, {"attention_bias": False, "sliding_window": None}),
    "Qwen2ForCausalLM": _ar(
        partial(_config, qkv_bias=True), {"attention_bias": True, "use_sliding_window": False}
    ),
    "Qwen3ForCausalLM": _ar(_qwen3_config, {"attention_bias": False, "use_sliding_window": False}),
}

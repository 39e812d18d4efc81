"""Tiny random checkpoints of every architecture, in the layout that its public code writes.

Names and shapes are written out here once more, so a slip in ``engine/architectures`` shows.
"""

import json

import torch
from safetensors.torch import save_file

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD, MLP, EXPERTS = 44, 32, 3, 4, 2, 8, 40, 8
PAD, MASK, EOS = 0, 1, 2

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500.0,
    "hidden_act": "silu",
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
CONFIGS = {
    "LLaDAModelLM": {
        "vocab_size": VOCAB,
        "embedding_size": VOCAB,
        "d_model": HIDDEN,
        "n_layers": LAYERS,
        "n_heads": HEADS,
        "n_kv_heads": HEADS,
        "mlp_hidden_size": MLP,
        "max_sequence_length": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "mask_token_id": MASK,
    },
    "DreamModel": COMMON | {"intermediate_size": MLP, "mask_token_id": MASK},
    "LLaDAMoEModelLM": COMMON
    | {
        "num_key_value_heads": HEADS,
        "dense_intermediate_size": MLP,
        "expert_intermediate_size": 24,
        "shared_expert_intermediate_size": 16,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 3,
        "moe_layer_freq": [0, 1, 1],
        "qk_layernorm": True,
        "partial_rotary_factor": 1,
        "moe_router_score_function": "softmax",
        "moe_router_enable_expert_bias": False,
    },
    "LLaDA2MoeModelLM": COMMON
    | {
        "head_dim": 16,
        "intermediate_size": MLP,
        "moe_intermediate_size": 24,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 3,
        "num_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
        "use_bias": False,
        "use_qkv_bias": False,
        "norm_topk_prob": True,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    "SDARForCausalLM": COMMON
    | {"intermediate_size": MLP, "head_dim": 16, "block_size": 4, "mask_token_id": MASK},
    "Fast_dLLM_QwenForCausalLM": COMMON | {"intermediate_size": MLP, "bd_size": 8},
    "LlamaForCausalLM": COMMON | {"intermediate_size": MLP, "rope_scaling": LLAMA3},
    "Qwen2ForCausalLM": COMMON | {"intermediate_size": MLP, "rope_scaling": YARN},
    "Qwen3ForCausalLM": COMMON | {"intermediate_size": MLP, "head_dim": 16},
}
MASK_TOKENS = {
    "LLaDAMoEModelLM": "<|mask|>",
    "LLaDA2MoeModelLM": "<|mask|>",
    "Fast_dLLM_QwenForCausalLM": "|<MASK>|",
}
"""Checkpoints whose configs do not say which token is the mask; the tokenizer does."""


def write(folder, architecture, *, seed=0, tied=False, **changes):
    """Write one; its config and tensors."""
    config = CONFIGS[architecture] | {"architectures": [architecture]} | changes
    chance = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in _shapes(architecture, config, tied).items():
        noise = torch.randn(shape, generator=chance)
        norm = name.endswith(("norm.weight", "ln_f.weight"))
        tensors[name] = 1.0 + 0.1 * noise if norm else 0.3 * noise
    if tied:
        config["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))
    if architecture in MASK_TOKENS:
        added = [{"id": MASK, "content": MASK_TOKENS[architecture]}]
        (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return config, tensors


def _shapes(architecture, config, tied):
    if architecture == "LLaDAModelLM":
        return _llada_shapes()
    head = config.get("head_dim", HEAD)
    query, kv = HEADS * head, config["num_key_value_heads"] * head
    fused = architecture == "LLaDA2MoeModelLM"
    embedding = "model.word_embeddings" if fused else "model.embed_tokens"
    shapes = {f"{embedding}.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    biased = architecture in ("DreamModel", "Qwen2ForCausalLM", "Fast_dLLM_QwenForCausalLM")
    normed = architecture in ("Qwen3ForCausalLM", "SDARForCausalLM", "LLaDAMoEModelLM")
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        shapes[at + "input_layernorm.weight"] = (HIDDEN,)
        shapes[at + "post_attention_layernorm.weight"] = (HIDDEN,)
        if fused:
            shapes[at + "attention.query_key_value.weight"] = (query + 2 * kv, HIDDEN)
            shapes[at + "attention.dense.weight"] = (HIDDEN, query)
            shapes[at + "attention.query_layernorm.weight"] = (head,)
            shapes[at + "attention.key_layernorm.weight"] = (head,)
        else:
            for part, size in (("q", query), ("k", kv), ("v", kv)):
                shapes[f"{at}self_attn.{part}_proj.weight"] = (size, HIDDEN)
                if biased:
                    shapes[f"{at}self_attn.{part}_proj.bias"] = (size,)
                if normed and part != "v":
                    shapes[f"{at}self_attn.{part}_norm.weight"] = (head,)
            shapes[at + "self_attn.o_proj.weight"] = (HIDDEN, query)
        shapes |= _mlp_shapes(architecture, at, dense=i == 0)
    return shapes


def _mlp_shapes(architecture, at, *, dense):
    if dense or "Moe" not in architecture.replace("MoE", "Moe"):
        return _swiglu(at + "mlp", MLP)
    shapes = {at + "mlp.gate.weight": (EXPERTS, HIDDEN)}
    for expert in range(EXPERTS):
        shapes |= _swiglu(f"{at}mlp.experts.{expert}", 24)
    if architecture == "LLaDAMoEModelLM":
        return shapes | _swiglu(at + "shared_expert", 16)
    shapes[at + "mlp.gate.expert_bias"] = (EXPERTS,)
    return shapes | _swiglu(at + "mlp.shared_experts", 24)


def _swiglu(at, size):
    return {
        f"{at}.gate_proj.weight": (size, HIDDEN),
        f"{at}.up_proj.weight": (size, HIDDEN),
        f"{at}.down_proj.weight": (HIDDEN, size),
    }


def _llada_shapes():
    shapes = {
        "model.transformer.wte.weight": (VOCAB, HIDDEN),
        "model.transformer.ff_out.weight": (VOCAB, HIDDEN),
        "model.transformer.ln_f.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        at = f"model.transformer.blocks.{i}."
        shapes |= {f"{at}{part}_norm.weight": (HIDDEN,) for part in ("attn", "ff")}
        shapes |= {f"{at}{part}_proj.weight": (HIDDEN, HIDDEN) for part in "qkv"}
        shapes[at + "attn_out.weight"] = (HIDDEN, HIDDEN)
        shapes |= {f"{at}{part}.weight": (MLP, HIDDEN) for part in ("ff_proj", "up_proj")}
        shapes[at + "ff_out.weight"] = (HIDDEN, MLP)
    return shapes

"""Tiny random Llama and Qwen2 checkpoints in Hugging Face layout, float32; requests for them."""

import json
import random

import torch
from safetensors.torch import save_file

from stepserve.core.ids import RequestId
from stepserve.core.payload import Payload, SamplingParams
from stepserve.core.request import Family, Request
from stepserve.engine.ar_executor import AutoregressiveExecutor

VOCAB, EOS, HIDDEN, LAYERS, HEADS, KV_HEADS, MLP = 48, 2, 32, 2, 4, 2, 40


def write_checkpoint(
    folder, architecture="LlamaForCausalLM", *, tied=False, seed=0, change=None, **extra
):
    """Write one; ``change(config, tensors)`` may edit it before."""
    config = {
        "architectures": [architecture],
        "model_type": architecture[:5].lower(),
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": MLP,
        "max_position_embeddings": 700,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500.0,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "tie_word_embeddings": tied,
        **extra,
    }
    chance = torch.Generator().manual_seed(seed)

    def normal(*shape, std=0.4):
        return torch.randn(shape, generator=chance) * std

    kv = KV_HEADS * HIDDEN // HEADS
    tensors = {
        "model.embed_tokens.weight": normal(VOCAB, HIDDEN, std=0.2),  # the context counts
        "model.norm.weight": 1.0 + normal(HIDDEN, std=0.1),
    }
    if not tied:
        tensors["lm_head.weight"] = normal(VOCAB, HIDDEN)
    for i in range(LAYERS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{norm}.weight"] = 1.0 + normal(HIDDEN, std=0.1)
        for part, out in (("q", HIDDEN), ("k", kv), ("v", kv)):
            name = f"model.layers.{i}.self_attn.{part}_proj"
            tensors[f"{name}.weight"] = normal(out, HIDDEN)
            if architecture == "Qwen2ForCausalLM":
                tensors[f"{name}.bias"] = normal(out)
        tensors[f"model.layers.{i}.self_attn.o_proj.weight"] = normal(HIDDEN, HIDDEN)
        for part, shape in (
            ("gate", (MLP, HIDDEN)),
            ("up", (MLP, HIDDEN)),
            ("down", (HIDDEN, MLP)),
        ):
            tensors[f"model.layers.{i}.mlp.{part}_proj.weight"] = normal(*shape)
    if change is not None:
        change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make(name="r", prompt=5, output=12, seed=0, **sampling):
    """A request and its payload: random ids of that seed."""
    chance = random.Random(seed)
    ids = tuple(chance.randrange(3, VOCAB) for _ in range(prompt))
    request = Request(RequestId(name), Family.AUTOREGRESSIVE, "tiny", prompt, output, 0.0)
    return request, Payload(ids, SamplingParams(seed=seed, **sampling))


def engine(loaded, page_tokens=4, page_capacity=400):
    return AutoregressiveExecutor(loaded, page_tokens=page_tokens, page_capacity=page_capacity)

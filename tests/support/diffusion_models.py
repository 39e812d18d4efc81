"""Tiny random LLaDA and Dream checkpoints in Hugging Face layout, float32."""

import json

import torch
from safetensors.torch import save_file

from stepserve.engine.loader import ARCHITECTURES
from stepserve.engine.models.transformer import DecoderModel

LLADA = {
    "architectures": ["LLaDAModelLM"],
    "d_model": 40,
    "n_heads": 5,
    "n_layers": 2,
    "mlp_hidden_size": 42,
    "vocab_size": 45,
    "max_sequence_length": 256,
    "include_qkv_bias": True,
    "weight_tying": True,
    "mask_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
DREAM = {
    "architectures": ["DreamModel"],
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 42,
    "vocab_size": 45,
    "max_position_embeddings": 256,
    "mask_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def write_checkpoint(folder, raw, seed=0):
    """Write one whose tokens depend on the context and whose confidences are spread."""
    architecture = ARCHITECTURES[raw["architectures"][0]]
    torch.manual_seed(seed)
    model = DecoderModel(architecture.config(raw)).requires_grad_(False)
    for name, weight in model.named_parameters():
        if not name.endswith("norm.weight"):
            weight.normal_(std=0.5 if name == "head.weight" else 0.4)
    return save_checkpoint(folder, raw, model)


def save_checkpoint(folder, raw, model):
    """Write a model's weights under the names of the architecture."""
    architecture = ARCHITECTURES[raw["architectures"][0]]
    tensors = {architecture.source(name): t for name, t in model.state_dict().items()}
    if model.config.tie_embeddings:
        del tensors[architecture.source("head.weight")]
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder

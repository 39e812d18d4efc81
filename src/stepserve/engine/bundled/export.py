"""Shape of the bundled model and its export in the layout of Hugging Face LLaDA checkpoints."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from stepserve.engine.architectures import ARCHITECTURES
from stepserve.engine.bundled.batches import BLOCK_LENGTHS
from stepserve.engine.bundled.vocabulary import (
    BOS,
    EOS,
    MASK,
    PAD,
    SUPPRESSED,
    build_tokenizer,
    save_tokenizer,
)
from stepserve.engine.models.transformer import ModelConfig

CONFIG = ModelConfig(
    vocab_size=build_tokenizer().get_vocab_size(),
    hidden_size=160,
    layers=5,
    heads=5,
    kv_heads=5,
    mlp_size=448,
    max_positions=512,
    mask_token_id=MASK,
    eos_token_id=EOS,
    tie_embeddings=True,
    scale_embeddings=True,
    qkv_bias=True,  # a query that asks for "the token before", whatever stands here, is a bias
)
DEFAULT_MAX_TOKENS = 96
DEFAULT_BLOCK_LENGTH = 16
LLADA = ARCHITECTURES["LLaDAModelLM"]


def llada_config() -> dict[str, object]:
    """``config.json``: LLaDA's keys, and what stepserve's sampler wants to know."""
    return {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "block_type": "llama",
        "d_model": CONFIG.hidden_size,
        "n_heads": CONFIG.heads,
        "n_kv_heads": CONFIG.kv_heads,
        "n_layers": CONFIG.layers,
        "mlp_hidden_size": CONFIG.mlp_size,
        "vocab_size": CONFIG.vocab_size,
        "embedding_size": CONFIG.vocab_size,
        "max_sequence_length": CONFIG.max_positions,
        "rope": True,
        "rope_theta": CONFIG.rope_theta,
        "layer_norm_type": "rms",
        "rms_norm_eps": CONFIG.norm_eps,
        "activation_type": "silu",
        "weight_tying": True,
        "input_emb_norm": True,
        "include_bias": False,
        "include_qkv_bias": True,
        "mask_token_id": MASK,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "torch_dtype": "float16",
        "stepserve": {
            "name": "stepserve-bundled",
            "block_lengths": list(BLOCK_LENGTHS),
            "default_block_length": DEFAULT_BLOCK_LENGTH,
            "default_max_tokens": DEFAULT_MAX_TOKENS,
            "suppressed_token_ids": list(SUPPRESSED),
        },
    }


def export_model(weights: dict[str, Tensor], tokenizer: Tokenizer, folder: Path) -> None:
    """Write the model folder; float16 on disk, the weights file replaced atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        LLADA.source(name): weight.detach().to(torch.float16).contiguous()
        for name, weight in weights.items()
        if name != "head.weight"  # tied to the embeddings
    }
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(folder / "model.safetensors")
    text = json.dumps(llada_config(), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    save_tokenizer(tokenizer, folder)

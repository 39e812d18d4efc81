"""Writes an autoregressive model with random weights: to serve and measure, not to talk to.

Llama layout, float32, with the tokenizer of the bundled model. What it says is noise; how long
its steps take, and how requests are cut, batched and handed over, is what a trained model of
that shape would show.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

BUNDLED = Path(__file__).parent.parent / "src" / "stepserve" / "engine" / "bundled" / "model"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def main() -> int:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--positions", type=int, default=4096, help="longest prompt and output")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    bundled = json.loads((BUNDLED / "config.json").read_text())
    heads = args.hidden // 32
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": bundled["vocab_size"],
        "hidden_size": args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "intermediate_size": args.hidden * 8 // 3,
        "max_position_embeddings": args.positions,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "bos_token_id": bundled["bos_token_id"],
        "eos_token_id": bundled["eos_token_id"],
        "tie_word_embeddings": False,
        "stepserve": {"suppressed_token_ids": bundled["stepserve"]["suppressed_token_ids"]},
    }
    (args.folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    tensors = weights(config, torch.Generator().manual_seed(args.seed))
    save_file(tensors, args.folder / "model.safetensors", metadata={"format": "pt"})
    for name in TOKENIZER:
        shutil.copy(BUNDLED / name, args.folder)
    print(f"{sum(t.numel() for t in tensors.values()):,} parameters in {args.folder}")
    return 0


def weights(config: dict[str, Any], chance: torch.Generator) -> dict[str, torch.Tensor]:
    """Normal, scaled so that activations keep their size."""
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    kv = hidden * kv_heads // heads

    def normal(*shape: int) -> torch.Tensor:
        scale: float = shape[-1] ** -0.5
        return torch.randn(shape, generator=chance) * scale

    tensors = {
        "model.embed_tokens.weight": normal(config["vocab_size"], hidden) * hidden**0.5,
        "lm_head.weight": normal(config["vocab_size"], hidden),
        "model.norm.weight": torch.ones(hidden),
    }
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }
    for layer in range(config["num_hidden_layers"]):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = torch.ones(hidden)
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = normal(*shape)
    return tensors


if __name__ == "__main__":
    sys.exit(main())

"""Llama and Qwen2 checkpoints: what is read, and what is refused by its config key."""

import json

import pytest
import torch

from stepserve.core.errors import FieldError
from stepserve.core.request import Family
from stepserve.engine.diffusion_executor import DiffusionExecutor
from stepserve.engine.loader import load_model
from support.ar_models import write_checkpoint


def test_what_a_checkpoint_says_of_itself(tmp_path):
    loaded = load_model(write_checkpoint(tmp_path, "Qwen2ForCausalLM", pad_token_id=0))
    config = loaded.config
    assert loaded.family is Family.AUTOREGRESSIVE
    assert loaded.suppressed_token_ids == (), "an autoregressive model may write any token"
    assert (config.mask_token_id, config.eos_token_ids) == (None, (2,))
    assert (config.qkv_bias, config.tie_embeddings, config.rope_theta) == (True, False, 500.0)
    assert loaded.model.layers[1].q_proj.bias.abs().sum() > 0


def test_a_tied_head_is_the_embedding_even_if_a_copy_is_stored(tmp_path):
    def copy(config, tensors):
        tensors["lm_head.weight"] = torch.zeros_like(tensors["model.embed_tokens.weight"])

    loaded = load_model(write_checkpoint(tmp_path, tied=True, change=copy))
    assert loaded.model.head.weight.data_ptr() == loaded.model.embed.weight.data_ptr()
    assert loaded.model.head.weight.abs().sum() > 0


def test_several_ends_of_text(tmp_path):
    write_checkpoint(tmp_path, eos_token_id=[2, 7])
    assert load_model(tmp_path).config.eos_token_ids == (2, 7)
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [9, 2]}))
    assert load_model(tmp_path).config.eos_token_ids == (9, 2), "as chat models publish them"
    path.write_text("{}")
    assert load_model(tmp_path).config.eos_token_ids == (2, 7)


def test_rotary_parameters_of_either_age(tmp_path):
    parameters = {"rope_type": "default", "rope_theta": 250.0}
    write_checkpoint(
        tmp_path,
        change=lambda config, tensors: config.pop("rope_theta"),
        rope_parameters=parameters,
        layer_types=["full_attention"] * 2,
        head_dim=8,
    )
    assert load_model(tmp_path).config.rope_theta == 250.0


LLAMA, QWEN2 = "LlamaForCausalLM", "Qwen2ForCausalLM"


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        (LLAMA, "rope_scaling", {"rope_type": "longrope", "factor": 8.0}),
        (QWEN2, "rope_scaling", {"type": "yarn", "factor": 4.0, "mscale": 0.7}),
        (LLAMA, "rope_parameters", {"rope_type": "linear", "factor": 2.0}),
        (LLAMA, "sliding_window", 4096),
        (QWEN2, "use_sliding_window", True),
        (QWEN2, "layer_types", ["full_attention", "sliding_attention"]),
        (LLAMA, "attention_bias", True),
        (LLAMA, "mlp_bias", True),
        (QWEN2, "attention_bias", False),
        (LLAMA, "hidden_act", "gelu"),
        (LLAMA, "eos_token_id", None),
    ],
)
def test_what_would_compute_something_else_is_refused(tmp_path, architecture, key, value):
    """Loading silently what is then computed wrongly."""
    write_checkpoint(tmp_path, architecture, **{key: value})
    with pytest.raises(FieldError, match=f"{key} = .* is not supported"):
        load_model(tmp_path)


def test_biases_must_be_those_of_the_architecture(tmp_path):
    def add(config, tensors):
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)

    write_checkpoint(tmp_path, change=add)
    with pytest.raises(FieldError, match=r"unexpected tensors: .*q_proj\.bias"):
        load_model(tmp_path)


def test_an_autoregressive_model_is_not_denoised(tmp_path):
    loaded = load_model(write_checkpoint(tmp_path))
    with pytest.raises(FieldError, match="is autoregressive, not diffusion"):
        DiffusionExecutor(loaded)

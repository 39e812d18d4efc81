"""Checkpoints in both layouts, whole and sharded, and what is said about the others."""

import json

import pytest
import torch
from safetensors.torch import save_file

from stepserve.core.errors import FieldError
from stepserve.engine.architectures import ARCHITECTURES
from stepserve.engine.diffusion_offline import denoise
from stepserve.engine.loader import load_model

LAYOUTS = {
    "LLaDAModelLM": (
        {"tie_embeddings": True, "scale_embeddings": True},
        {
            "d_model": "hidden_size",
            "n_heads": "heads",
            "n_kv_heads": "kv_heads",
            "n_layers": "layers",
            "mlp_hidden_size": "mlp_size",
            "vocab_size": "vocab_size",
            "embedding_size": "vocab_size",
            "max_sequence_length": "max_positions",
            "rope_theta": "rope_theta",
            "rms_norm_eps": "norm_eps",
            "weight_tying": "tie_embeddings",
            "input_emb_norm": "scale_embeddings",
            "mask_token_id": "mask_token_id",
            "eos_token_id": "eos_token_id",
        },
    ),
    "DreamModel": (
        {"shift_logits": True, "qkv_bias": True},
        {
            "hidden_size": "hidden_size",
            "num_attention_heads": "heads",
            "num_key_value_heads": "kv_heads",
            "num_hidden_layers": "layers",
            "intermediate_size": "mlp_size",
            "vocab_size": "vocab_size",
            "max_position_embeddings": "max_positions",
            "rope_theta": "rope_theta",
            "rms_norm_eps": "norm_eps",
            "tie_word_embeddings": "tie_embeddings",
            "mask_token_id": "mask_token_id",
            "eos_token_id": "eos_token_id",
        },
    ),
}


@pytest.fixture
def checkpoint(tiny, tmp_path):
    """Write a checkpoint; ``change`` may edit config and tensors before they are written."""

    def write(architecture, change=lambda config, tensors: None, shards=1, **extra):
        options, keys = LAYOUTS[architecture]
        loaded = tiny(**options)
        config = {ours: getattr(loaded.config, theirs) for ours, theirs in keys.items()}
        config |= {"architectures": [architecture], **extra}
        source = ARCHITECTURES[architecture].source
        tensors = {
            source(name): weight.clone()
            for name, weight in loaded.model.state_dict().items()
            if not (loaded.config.tie_embeddings and name == "head.weight")
        }
        change(config, tensors)
        (tmp_path / "config.json").write_text(json.dumps(config))
        names = sorted(tensors)
        files = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(names)}
        if shards == 1:
            save_file(tensors, tmp_path / "model.safetensors")
            return loaded, tmp_path
        for file in set(files.values()):
            part = {name: tensors[name] for name in names if files[name] == file}
            save_file(part, tmp_path / file)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
        return loaded, tmp_path

    return write


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("architecture", LAYOUTS)
def test_a_loaded_model_is_the_one_that_was_written(
    checkpoint, make, executor, architecture, shards
):
    original, folder = checkpoint(architecture, shards=shards)
    loaded = load_model(folder)
    assert loaded.config == original.config
    weights = loaded.model.state_dict()
    for name, weight in original.model.state_dict().items():
        assert torch.equal(weights[name], weight), name
    row = make(prompt=11)
    expected = denoise(executor(original), [row], 0.6)["r"].token_ids
    assert denoise(executor(loaded), [row], 0.6)["r"].token_ids == expected


def test_public_names_of_both_layouts():
    llada, dream = (ARCHITECTURES[name].source for name in ("LLaDAModelLM", "DreamModel"))
    assert llada("embed.weight") == "model.transformer.wte.weight"
    assert llada("head.weight") == "model.transformer.ff_out.weight"
    assert llada("layers.3.gate_proj.weight") == "model.transformer.blocks.3.ff_proj.weight"
    assert llada("layers.3.down_proj.weight") == "model.transformer.blocks.3.ff_out.weight"
    assert dream("head.weight") == "lm_head.weight"
    assert dream("layers.3.q_proj.bias") == "model.layers.3.self_attn.q_proj.bias"
    assert dream("layers.3.mlp_norm.weight") == "model.layers.3.post_attention_layernorm.weight"


def test_dtype_is_as_asked_and_tied_weights_exist_once(checkpoint):
    _, folder = checkpoint("LLaDAModelLM")
    model = load_model(folder, "cpu", torch.bfloat16).model
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert {weight.device.type for weight in model.buffers()} == {"cpu"}
    assert model.cos.dtype is torch.float32, "positions need the precision"
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()


def test_facts_for_the_server(checkpoint):
    _, folder = checkpoint("DreamModel", pad_token_id=2, bos_token_id=5)
    plain = load_model(folder)
    assert plain.name == folder.name
    assert plain.suppressed_token_ids == (1, 5), "padding is EOS here, which must stay possible"
    assert plain.default_block_length in plain.block_lengths
    facts = {
        "name": "small",
        "block_lengths": [8, 16],
        "default_block_length": 16,
        "default_max_tokens": 96,
        "suppressed_token_ids": [0, 3],
    }
    _, folder = checkpoint("DreamModel", stepserve=facts)
    loaded = load_model(folder)
    assert (loaded.name, loaded.block_lengths) == ("small", (8, 16))
    assert (loaded.default_block_length, loaded.default_max_tokens) == (16, 96)
    assert loaded.suppressed_token_ids == (0, 1, 3)


def drop(*names):
    return lambda config, tensors: [tensors.pop(name) for name in names]


def put(name, shape):
    return lambda config, tensors: tensors.update({name: torch.zeros(shape)})


def setting(key, value):
    return lambda config, tensors: config.update({key: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (setting("architectures", ["MistralForCausalLM"]),
         "MistralForCausalLM is not supported; these are: DreamModel, Fast_dLLM_QwenForCausalLM, "
         "LLaDA2MoeModelLM, .*, Qwen3ForCausalLM, SDARForCausalLM"),
        (setting("architectures", None), r"\(none\) is not supported"),
        (lambda config, tensors: config.pop("d_model"), r"config\.json: lacks 'd_model'"),
        (setting("rope", False), "rope = False is not supported, only True"),
        (drop("model.transformer.ln_f.weight"), "missing tensors: model.transformer.ln_f.weight"),
        (put("model.extra.weight", (2,)), "unexpected tensors: model.extra.weight"),
        (put("model.transformer.ln_f.weight", (31,)), r"ln_f.weight \(31,\) instead of \(32,\)"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(checkpoint, change, message):
    """Refused at start, saying what is supported."""
    _, folder = checkpoint("LLaDAModelLM", change)
    with pytest.raises(FieldError, match=message):
        load_model(folder)


def test_harmless_extras_are_accepted(checkpoint):
    def change(config, tensors):
        tensors["model.transformer.ff_out.weight"] = torch.zeros(40, 32)  # a copy of a tied head
        tensors["model.rotary_emb.inv_freq"] = torch.zeros(4)

    _, folder = checkpoint("LLaDAModelLM", change)
    load_model(folder)


def test_no_checkpoint_is_said_plainly(tmp_path, checkpoint):
    with pytest.raises(FieldError, match=r"cannot read .*config\.json"):
        load_model(tmp_path / "nothing")
    _, folder = checkpoint("DreamModel")
    (folder / "model.safetensors").unlink()
    with pytest.raises(FieldError, match=r"cannot read .*model\.safetensors"):
        load_model(folder)

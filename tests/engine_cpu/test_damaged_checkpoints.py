"""Model folders that are not whole, or not what they say: each is one line that names the file."""

import contextlib
import copy
import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from stepserve.cli.main import main
from stepserve.core.errors import FieldError, StepserveError
from stepserve.engine.loader import load_model
from stepserve.files import LFS_POINTER
from support.checkpoints import VOCAB, write

LLAMA, LLADA, MOE = "LlamaForCausalLM", "LLaDAModelLM", "LLaDA2MoeModelLM"
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"


def shard(folder):
    """Cut a checkpoint into two files with an index."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    files = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in {*files.values()}:
        save_file({n: t for n, t in tensors.items() if files[n] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return files


@pytest.fixture
def sharded(tmp_path):
    write(tmp_path, LLAMA)
    shard(tmp_path)
    load_model(tmp_path)
    return tmp_path


def refused(folder, device="meta"):
    with pytest.raises(FieldError) as caught:
        load_model(folder, device)
    assert caught.value.field == "model"
    assert "\n" not in str(caught.value)
    return caught.value.message


WRONG_FILES = {
    "pointer": (f"{LFS_POINTER}v1\noid sha256:0\nsize 9\n".encode(), "is a git-lfs pointer"),
    "empty": (b"", "is empty, cut off, or no file of safetensors"),
    "html": (b"<html>not found</html>" * 9, "is empty, cut off, or no file of safetensors"),
    "missing": (None, "No such file"),
}


@pytest.mark.parametrize(("content", "said"), WRONG_FILES.values(), ids=WRONG_FILES)
@pytest.mark.parametrize("name", ["model-1.safetensors", WEIGHTS])
def test_a_file_of_weights_that_is_none(tmp_path, name, content, said):
    write(tmp_path, LLAMA)
    if name != WEIGHTS:
        shard(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    message = refused(tmp_path)
    assert str(tmp_path / name) in message
    assert said in message


@pytest.mark.parametrize("keep", [4, 100, -1])
def test_a_file_of_weights_that_is_cut_off(sharded, keep):
    path = sharded / "model-0.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert f"{path} is empty, cut off" in refused(sharded)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({}, "has no weight_map"),
        ({"weight_map": ["a"]}, "has no weight_map"),
        ({"weight_map": {"a": None}}, "weight_map: None is no name of a file"),
        ({"weight_map": {"a": "../x.safetensors"}}, "weight_map: '../x.safetensors' is no name"),
        ({"weight_map": {}}, "but the files hold 0 tensors"),
        ([], "holds no JSON object"),
    ],
)
def test_an_index_that_is_none(sharded, content, said):
    (sharded / INDEX).write_text(json.dumps(content))
    assert said in refused(sharded)


def test_a_tensor_that_the_index_has_elsewhere(sharded):
    files = json.loads((sharded / INDEX).read_text())["weight_map"]
    files["model.norm.weight"] = {"model-0.safetensors": "model-1.safetensors"}.get(
        files["model.norm.weight"], "model-0.safetensors"
    )
    (sharded / INDEX).write_text(json.dumps({"weight_map": files}))
    assert "not in the file of the index: model.norm.weight in" in refused(sharded)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn, torch.uint8])
def test_weights_that_need_scales_are_refused(tmp_path, kind):
    """They would be read as plain numbers: garbage, and no word of it."""
    _, tensors = write(tmp_path, LLAMA)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(kind)}, tmp_path / WEIGHTS)
    assert f"tensors that are no plain floats: {name}" in refused(tmp_path)


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_a_quantized_checkpoint_is_refused(tmp_path, key):
    write(tmp_path, LLAMA, **{key: {"quant_method": "fp8", "scale_fmt": "ue8m0", "x": [1] * 99}})
    message = refused(tmp_path)
    assert f"config.json: {key} = " in message
    assert len(message) < 400


@pytest.mark.parametrize(
    ("architecture", "key", "value", "said"),
    [
        *((LLAMA, "num_hidden_layers", v, "num_hidden_layers = ") for v in (0, -1, "3", 2.0, True)),
        (LLAMA, "num_hidden_layers", None, "lacks 'num_hidden_layers'"),
        (LLAMA, "num_hidden_layers", 10**9, "1000000000 layers, but the files hold"),
        (LLAMA, "hidden_size", 10**30, "hidden_size = "),
        (LLAMA, "vocab_size", None, "lacks 'vocab_size'"),
        (LLAMA, "vocab_size", "44", "vocab_size = '44'"),
        (LLAMA, "num_attention_heads", -1, "num_attention_heads = -1"),
        (LLAMA, "num_key_value_heads", 3, "4 heads of queries, 3 of keys"),
        (LLAMA, "head_dim", 7, "not in pairs"),
        (LLAMA, "max_position_embeddings", 0, "max_position_embeddings = 0"),
        (LLAMA, "max_position_embeddings", 10**9, "max_position_embeddings = 1000000000"),
        (LLAMA, "rms_norm_eps", float("nan"), "rms_norm_eps = nan"),
        (LLAMA, "rope_theta", 0, "rope_theta = 0"),
        (LLAMA, "tie_word_embeddings", "no", "tie_word_embeddings = 'no'"),
        (LLAMA, "rope_scaling", "yarn", "rope_scaling = 'yarn'"),
        (LLAMA, "rope_scaling", {"rope_type": "yarn", "factor": "4"}, "rope_scaling.factor = '4'"),
        (LLAMA, "rope_scaling", {"rope_type": "yarn"}, "lacks 'factor'"),
        (LLAMA, "rope_scaling", {"rope_type": "yarn", "factor": 1e9}, "positions"),
        (LLAMA, "architectures", LLAMA, f"architectures = '{LLAMA}'"),
        (LLAMA, "architectures", [], "architecture (none) is not supported"),
        (LLAMA, "layer_types", [1], "layer_types = [1]"),
        (LLAMA, "eos_token_id", -1, "eos_token_id = -1"),
        (LLAMA, "eos_token_id", VOCAB, f"eos_token_id = {VOCAB}"),
        (LLADA, "mask_token_id", "1", "mask_token_id = '1'"),
        (LLADA, "mask_token_id", -1, "mask_token_id = -1"),
        (LLADA, "pad_token_id", 9999, "pad_token_id = 9999"),
        (LLADA, "stepserve", {"block_lengths": [0]}, "stepserve.block_lengths"),
        (LLADA, "stepserve", {"default_max_tokens": "9"}, "stepserve.default_max_tokens"),
        (LLADA, "stepserve", {"suppressed_token_ids": [99]}, "suppressed_token_ids = 99"),
        (MOE, "num_experts", 10**6, "1000000 experts, but the files hold"),
        (MOE, "n_group", 0, "n_group = 0"),
        (MOE, "moe_intermediate_size", -1, "moe_intermediate_size = -1"),
        (MOE, "first_k_dense_replace", "1", "first_k_dense_replace = '1'"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_named(tmp_path, architecture, key, value, said):
    write(tmp_path, architecture, **{key: value})
    with pytest.raises(FieldError) as caught:
        load_model(tmp_path, "meta")
    assert said in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("generation_config.json", {"eos_token_id": "2"}, "eos_token_id = '2'"),
        ("generation_config.json", {"eos_token_id": [-1]}, "eos_token_id = [-1]"),
        ("generation_config.json", [], "holds no JSON object"),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}, "tokenizer_config.json is no"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {}}}, "tokenizer_config.json is"),
        ("tokenizer.json", {"added_tokens": [1]}, "tokenizer.json is no tokenizer"),
        ("tokenizer.json", {"added_tokens": [{"id": 99, "content": "<|mask|>"}]}, "= 99"),
    ],
)
def test_tokens_that_cannot_be_are_named_with_their_file(tmp_path, name, content, said):
    write(tmp_path, MOE, eos_token_id=2 if name == "tokenizer.json" else None)
    (tmp_path / name).write_text(json.dumps(content))
    message = refused(tmp_path)
    assert str(tmp_path / name) in message
    assert said in message


def test_the_command_says_it_in_one_line(sharded, capsys):
    (sharded / "model-1.safetensors").unlink()
    assert main(["profile", "--model", str(sharded)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("stepserve profile: model: cannot read ")
    assert said.count("\n") == 1


ODD = st.one_of(
    st.sampled_from([None, True, False, "", "x", "1", [], {}, [None], [-1], {"a": None}]),
    st.sampled_from([0, -1, 1, 2, 3, 10**6, 2**31, 2**63, 10**40]),
    st.sampled_from([0.5, -0.5, 1e308, float("nan"), float("inf")]),
)
FILES = ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", INDEX]
CONTENT = {
    "generation_config.json": {"eos_token_id": [2, 7], "pad_token_id": 0},
    "tokenizer_config.json": {
        "eos_token": {"content": "</s>"},
        "added_tokens_decoder": {"2": {"content": "</s>"}, "1": {"content": "<|mask|>"}},
    },
    "tokenizer.json": {"added_tokens": [{"id": 1, "content": "<|mask|>"}]},
}


def places(node, path=()):
    """The path of every value of a JSON document."""
    yield path
    if isinstance(node, dict | list):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in items:
            yield from places(value, (*path, key))


def changed(data, document):
    """The document with some values replaced, or dropped."""
    document = copy.deepcopy(document)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(list(places(document))))
        if not path:
            continue
        node = document
        for key in path[:-1]:
            node = node[key]
        if isinstance(node, dict) and data.draw(st.booleans()):
            del node[path[-1]]
        else:
            node[path[-1]] = copy.deepcopy(data.draw(ODD))
    return document


@given(st.data())
def test_whatever_the_files_say_is_read_or_refused(data):
    """Of a mutated folder nothing but errors made on purpose comes out, and soon."""
    architecture = data.draw(st.sampled_from([LLAMA, LLADA, MOE, "LLaDAMoEModelLM", "DreamModel"]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, architecture)
        shard(folder)
        for file, content in CONTENT.items():
            (folder / file).write_text(json.dumps(content))
        names = st.lists(st.sampled_from(FILES), min_size=1, max_size=2, unique=True)
        for path in (folder / file for file in data.draw(names)):
            if data.draw(st.integers(0, 3)):
                path.write_text(json.dumps(changed(data, json.loads(path.read_text()))))
            else:
                content = path.read_bytes()
                at = data.draw(st.integers(0, len(content)))
                other = data.draw(st.binary(max_size=2))
                path.write_bytes(content[:at] + other + content[at + 1 :])
        with contextlib.suppress(StepserveError):
            load_model(folder, "meta")

"""Every architecture against what its public code computes, written once more and slowly."""

import json
import random
import weakref

import numpy as np
import pytest
import torch
from safetensors import safe_open

from stepserve.core.errors import FieldError
from stepserve.core.ids import RequestId
from stepserve.core.payload import Payload
from stepserve.core.request import CacheMode, DiffusionOptions, Family, Progress, Request
from stepserve.cost.measured_steps import measure_steps
from stepserve.engine import loader
from stepserve.engine.ar_executor import AutoregressiveExecutor
from stepserve.engine.ar_offline import generate
from stepserve.engine.architectures import ARCHITECTURES
from stepserve.engine.diffusion_executor import DiffusionExecutor
from stepserve.engine.diffusion_offline import denoise
from stepserve.engine.loader import load_model
from stepserve.engine.torch_engine import facts_of
from support.checkpoints import CONFIGS, EOS, LLAMA3, MASK, PAD, VOCAB, YARN, write
from support.slow_models import logits

BLOCKS = {"LLaDA2MoeModelLM": 32, "SDARForCausalLM": 4, "Fast_dLLM_QwenForCausalLM": 8}
SHIFTED = ("DreamModel", "Fast_dLLM_QwenForCausalLM")


def mask_of(architecture, block=None):
    """Which key a query sees, by the published code."""
    if ARCHITECTURES[architecture].family is Family.AUTOREGRESSIVE:
        return lambda query, key: key <= query
    block = block or BLOCKS.get(architecture)
    if block is None:
        return lambda query, key: True
    return lambda query, key: key // block <= query // block


def dense(seen):
    """``Attend`` over one whole sequence, with a mask."""

    def attend(layer, q, k, v):
        repeat = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(repeat, dim=1) for x in (k, v))
        hidden = torch.tensor([[not seen(a, b) for b in range(len(q))] for a in range(len(q))])
        scores = torch.einsum("qhd,khd->hqk", q, keys) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values)

    return attend


def drawn(count, seed):
    chance = random.Random(seed)
    return tuple(chance.randrange(3, VOCAB) for _ in range(count))


@pytest.mark.parametrize("architecture", CONFIGS)
def test_logits_are_those_of_the_slow_reference(tmp_path, architecture):
    config, tensors = write(tmp_path, architecture)
    ids, seen = drawn(41, seed=3), mask_of(architecture)
    expected = logits(config, tensors, ids, seen)
    model = load_model(tmp_path).model
    found = model.logits(model.hidden(torch.tensor(ids), torch.arange(len(ids)), dense(seen)))
    assert np.abs(found.numpy() - expected).max() < 2e-4 * np.abs(expected).max()
    assert expected.std() > 0.5, "logits that differ"


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("scaling", [YARN, LLAMA3], ids=lambda scaling: scaling["rope_type"])
def test_rotary_scaling_of_dream_is_that_of_llama(tmp_path, key, scaling):
    """Its code takes it from there, under the key of either age."""
    config, tensors = write(tmp_path, "DreamModel", **{key: scaling})
    ids, seen = drawn(90, seed=4), mask_of("DreamModel")
    plain = logits({**config, "rope_scaling": None}, tensors, ids, seen)
    expected = logits({**config, "rope_scaling": scaling}, tensors, ids, seen)
    model = load_model(tmp_path).model
    found = model.logits(model.hidden(torch.tensor(ids), torch.arange(len(ids)), dense(seen)))
    scale = np.abs(expected).max()
    assert np.abs(found.numpy() - expected).max() < 2e-4 * scale < np.abs(plain - expected).max()


def test_what_the_router_of_llada_moe_does_may_be_said(tmp_path):
    said = {"norm_topk_prob": False, "router_num_group": None, "router_topk_group": 1}
    write(tmp_path, "LLaDAMoEModelLM", **said)
    load_model(tmp_path)


def test_every_architecture_has_a_checkpoint_here():
    assert set(ARCHITECTURES) - set(CONFIGS) == {"LLaDAMoEModel"}, "another name of LLaDAMoEModelLM"


@pytest.mark.parametrize(
    "architecture", [a for a in CONFIGS if ARCHITECTURES[a].family is Family.AUTOREGRESSIVE]
)
def test_an_autoregressive_model_generates_what_the_slow_reference_does(tmp_path, architecture):
    config, tensors = write(tmp_path, architecture, seed=1)
    executor = AutoregressiveExecutor(load_model(tmp_path), page_tokens=4, page_capacity=100)
    rows = []
    for count in (1, 6, 13):
        request = Request(
            RequestId(str(count)), Family.AUTOREGRESSIVE, "tiny", count, 5, arrival_s=0.0
        )
        rows.append((request, Payload(drawn(count, seed=count))))
    results = generate(executor, rows)
    for request, payload in rows:
        ids = list(payload.prompt_ids)
        for token in results[request.id].token_ids:
            row = logits(config, tensors, ids, mask_of(architecture))[-1]
            assert token == row.argmax()
            ids.append(token)


def slow_denoising(architecture, config, tensors, prompt, limit, block, threshold):
    """Tokens and steps of the published sampler of block diffusion: no pages, no cache.

    As ``generate.py`` of JetAstra/SDAR with ``low_confidence_dynamic`` and one token at least:
    blocks are counted from position 0, and one that is complete is never changed again.
    """
    seen = mask_of(architecture, block)
    end = -(-(len(prompt) + limit) // block) * block
    ids, steps = [*prompt, *[MASK] * (end - len(prompt))], 0
    for start in range(len(prompt) // block * block, end, block):
        own = range(max(start, len(prompt)), min(start + block, len(prompt) + limit))
        while any(ids[p] == MASK for p in own):
            table = logits(config, tensors, ids[: start + block], seen)
            steps += 1
            guesses = {}
            ends = [p for p in own if ids[p] == EOS]
            for p in own:
                if ids[p] == MASK and p < min(ends, default=end):
                    row = table[p - (architecture in SHIFTED)].copy()
                    row[[MASK, PAD]] = -np.inf
                    chances = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
                    guesses[p] = (chances.max(), int(chances.argmax()))
            chosen = [p for p, (chance, _) in guesses.items() if chance > threshold]
            for p in chosen or [max(guesses, key=lambda p: guesses[p][0])]:
                ids[p] = guesses[p][1]
            output = ids[len(prompt) : len(prompt) + limit]
            if EOS in output and MASK not in output[: output.index(EOS)]:
                return output[: output.index(EOS) + 1], steps
    return ids[len(prompt) : len(prompt) + limit], steps


@pytest.mark.parametrize("architecture", BLOCKS)
def test_a_block_causal_model_denoises_as_the_published_sampler(tmp_path, architecture):
    """Exactly, though a finished block is executed once more and never again."""
    size = {"LLaDA2MoeModelLM": {"block_size": 8}}.get(architecture, {})
    config, tensors = write(tmp_path, architecture, seed=5, **size)
    loaded = load_model(tmp_path)
    block = loaded.default_block_length
    assert loaded.block_lengths == (block,)
    executor = DiffusionExecutor(loaded, page_tokens=4, page_capacity=100)
    rows = []
    for index, (count, limit) in enumerate([(1, 9), (block, 2 * block), (11, 13), (16, 3)]):
        options = DiffusionOptions(block_tokens=block, cache_mode=CacheMode.BLOCK)
        request = Request(
            RequestId(str(index)), Family.DIFFUSION, "tiny", count, limit, 0.0, diffusion=options
        )
        rows.append((request, Payload(drawn(count, seed=index))))
    together = denoise(executor, rows, 0.3)
    assert executor.used_pages == 0
    tokens_per_step = [len(result.token_ids) / result.steps for result in together.values()]
    assert 1.0 < max(tokens_per_step) < block, "neither one by one nor all at once"
    for request, payload in rows:
        tokens, steps = slow_denoising(
            architecture,
            config,
            tensors,
            payload.prompt_ids,
            request.max_output_tokens,
            block,
            0.3,
        )
        found = together[request.id]
        assert (found.token_ids, found.steps, found.error) == (tokens, steps, None)
        assert found.recomputes == 1
        alone = denoise(executor, [(request, payload)], 0.3)[request.id]
        assert (alone.token_ids, alone.steps) == (tokens, steps)


def config_of(folder, **files):
    """The loaded config of a checkpoint with more JSON files, given by their stems."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return load_model(folder).config


def test_the_mask_and_what_ends_a_text_come_from_wherever_the_checkpoint_has_them(tmp_path):
    write(tmp_path, "SDARForCausalLM", mask_token_id=None, eos_token_id=None)
    added = {"7": {"content": "<|im_end|>"}, "5": {"content": "<|MASK|>"}}
    tokenizer = {"added_tokens_decoder": added, "eos_token": {"content": "<|im_end|>"}}
    config = config_of(tmp_path, tokenizer_config=tokenizer)
    assert (config.mask_token_id, config.eos_token_ids) == (5, (7,)), "by their names"
    generation = {"eos_token_id": [9, 7], "mask_token_id": 6}
    config = config_of(tmp_path, generation_config=generation)
    assert (config.mask_token_id, config.eos_token_ids) == (6, (9, 7))
    write(tmp_path, "SDARForCausalLM", eos_token_id=EOS)
    config = config_of(tmp_path)
    assert (config.mask_token_id, config.eos_token_ids) == (MASK, (9, 7)), "generation outranks"


def test_no_mask_token_is_said(tmp_path):
    write(tmp_path, "LLaDA2MoeModelLM")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(FieldError, match="no mask token"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("SDARForCausalLM", "use_sliding_window", True),
        ("LLaDA2MoeModelLM", "use_bias", True),
        ("LLaDA2MoeModelLM", "score_function", "softmax"),
        ("LLaDAMoEModelLM", "moe_router_enable_expert_bias", True),
        ("LLaDAMoEModelLM", "norm_topk_prob", True),
        ("LLaDAMoEModelLM", "router_num_group", 4),
        ("LLaDAMoEModelLM", "router_topk_group", 2),
        ("LLaDAModelLM", "rope_scaling", YARN),
        ("LLaDAModelLM", "rope_parameters", YARN),
        ("DreamModel", "rope_scaling", {"rope_type": "dynamic", "factor": 2.0}),
        ("Qwen3ForCausalLM", "attention_bias", True),
        ("SDARForCausalLM", "block_size", 0),
        ("Fast_dLLM_QwenForCausalLM", "bd_size", "8"),
        ("LLaDA2MoeModelLM", "n_group", 3),
        ("LLaDA2MoeModelLM", "n_group", 8),
        ("LLaDA2MoeModelLM", "topk_group", 5),
        ("LLaDA2MoeModelLM", "num_experts_per_tok", 5),
        ("LLaDAMoEModelLM", "num_experts_per_tok", 9),
        ("SDARForCausalLM", "eos_token_id", [2, 9999]),
        ("LLaDAModelLM", "eos_token_id", True),
    ],
)
def test_what_would_compute_something_else_is_refused(tmp_path, architecture, key, value):
    write(tmp_path, architecture, **{key: value})
    with pytest.raises(FieldError, match=f"{key} = .* is not supported"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "key", "size"),
    [
        ("SDARForCausalLM", "block_size", 4),
        ("Fast_dLLM_QwenForCausalLM", "bd_size", 32),
        ("LLaDA2MoeModelLM", "block_size", 32),
    ],
)
def test_a_size_of_null_is_the_published_one(tmp_path, architecture, key, size):
    """Not none at all: that would be another attention mask."""
    write(tmp_path, architecture, **{key: None})
    assert load_model(tmp_path).config.attention_block == size


def test_a_fused_projection_must_have_the_right_size(tmp_path):
    write(tmp_path, "LLaDA2MoeModelLM")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 1}))
    with pytest.raises(FieldError, match="query_key_value"):
        load_model(tmp_path)


@pytest.mark.parametrize("architecture", ["LLaDAMoEModelLM", "LLaDA2MoeModelLM"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_read_one_at_a_time(tmp_path, monkeypatch, architecture, dtype):
    """Else a stack is there twice while it is made: in parts, and whole."""
    read, most = weakref.WeakSet(), []

    class File:
        def __init__(self, *given, **more):
            self.file = safe_open(*given, **more)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *why):
            return self.file.__exit__(*why)

        def __getattr__(self, name):
            return getattr(self.file, name)

        def get_tensor(self, name):
            tensor = self.file.get_tensor(name)
            if ".experts." in name:
                read.add(tensor)
                most.append(len(read))
            return tensor

    _, tensors = write(tmp_path, architecture)
    monkeypatch.setattr(loader, "safe_open", File)
    model = load_model(tmp_path, dtype=dtype).model
    assert len(most) >= sum(".experts." in name for name in tensors) > 0
    assert (max(most), len(read)) == (1, 0)
    layer = len(model.layers) - 1
    names = ARCHITECTURES[architecture].source(f"layers.{layer}.experts.up_proj")
    for expert, weight in enumerate(model.layers[layer].experts.up_proj):
        stored = torch.as_tensor(tensors[names.format(expert)])
        assert torch.equal(weight, stored.to(dtype))


def test_blocks_are_the_models_own(tmp_path):
    write(tmp_path, "SDARForCausalLM")
    executor = DiffusionExecutor(load_model(tmp_path))
    payload = Payload(drawn(4, seed=0))

    def add(**options):
        given = DiffusionOptions(**options)
        request = Request(RequestId("r"), Family.DIFFUSION, "tiny", 4, 4, 0.0, diffusion=given)
        executor.add(request, payload, Progress(), {})

    with pytest.raises(FieldError, match=r"dlm\.cache: dual .* a block-causal model"):
        add(block_tokens=4)
    with pytest.raises(FieldError, match=r"dlm\.block_length: is 4"):
        add(block_tokens=8, cache_mode=CacheMode.BLOCK)


def test_a_block_causal_model_is_profiled_with_its_own_steps(tmp_path):
    write(tmp_path, "SDARForCausalLM")
    loaded = load_model(tmp_path)
    executor = DiffusionExecutor(loaded)
    assert {4, 128, 128 * 32} <= set(measure_steps(executor, facts_of(loaded, tmp_path), repeats=1))

"""Every architecture against what its public code computes, written once more and slowly."""

import random

import numpy as np
import pytest
import torch

from stepserve.core.ids import RequestId
from stepserve.core.payload import Payload
from stepserve.core.request import CacheMode, DiffusionOptions, Family, Request
from stepserve.engine.architectures import ARCHITECTURES
from stepserve.engine.causal import AutoregressiveExecutor
from stepserve.engine.causal_offline import generate
from stepserve.engine.executor import DiffusionExecutor
from stepserve.engine.loader import load_model
from stepserve.engine.offline import denoise
from support.checkpoints import CONFIGS, EOS, MASK, PAD, VOCAB, write
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


def test_every_architecture_has_a_checkpoint_here():
    assert set(ARCHITECTURES) - set(CONFIGS) == {"LLaDAMoEModel"}, "another name of LLaDAMoEModelLM"


@pytest.mark.parametrize(
    "architecture", [a for a in CONFIGS if ARCHITECTURES[a].family is Family.AUTOREGRESSIVE]
)
def test_a_causal_model_generates_what_the_slow_reference_does(tmp_path, architecture):
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

"""Tiny random models, and a scripted one that commits the tokens it is told to."""

import random
from collections.abc import Mapping

import pytest
import torch

from stepserve.core.ids import RequestId
from stepserve.core.payload import Payload, SamplingParams
from stepserve.core.request import CacheMode, DiffusionOptions, Family, RefreshScope, Request
from stepserve.engine.diffusion_executor import DiffusionExecutor
from stepserve.engine.loader import LoadedModel
from stepserve.engine.models.transformer import DecoderModel, ModelConfig

PAD, MASK, EOS, VOCAB = 0, 1, 2, 40


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


def _config(**changes):
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "mlp_size": 48,
        "max_positions": 160,
        "mask_token_id": MASK,
        "eos_token_id": EOS,
    }
    return ModelConfig(**(shape | changes))


def _loaded(model, config):
    return LoadedModel(model, config, "tiny", (4, 8), 8, 16, (PAD, MASK))


@pytest.fixture(scope="session")
def tiny():
    """Build a random model whose tokens differ by position and context.

    ``sharpness`` spreads its confidences over (0, 1).
    """

    def build(seed=0, sharpness=1.5, **changes):
        torch.manual_seed(seed)
        config = _config(**changes)
        model = DecoderModel(config).eval().requires_grad_(False)
        for name, weight in model.named_parameters():
            if not name.endswith("norm.weight"):
                weight.normal_(std=0.4)
        if not config.tie_embeddings:
            model.embed.weight.mul_(0.3)
        model.head.weight.mul_(sharpness)
        return _loaded(model, config)

    return build


class ScriptedModel(torch.nn.Module):
    """Its "hidden state" at a position is the row of logits that the script holds for it."""

    def __init__(self, script):
        super().__init__()
        self.embed = torch.nn.Embedding(1, 1)
        self.script = script

    def hidden(self, token_ids, positions, attend):
        q = torch.zeros(len(token_ids), 1, 8)
        attend(0, q, q, q)
        return self.script[positions]

    def logits(self, hidden, ids=slice(None)):
        return hidden[:, ids].clone()


@pytest.fixture(scope="session")
def scripted():
    """Build a model that puts token t with probability p at output offset k of a prompt of 4."""

    def build(tokens: Mapping[int, tuple[int, float]], default=(10, 0.95), prompt=4):
        config = _config(hidden_size=8, layers=1, heads=1, kv_heads=1)
        probs = torch.zeros(config.max_positions, VOCAB)
        for position in range(config.max_positions):
            token, p = tokens.get(position - prompt, default)
            probs[position, :] = (1 - p) / (VOCAB - 3)
            probs[position, [PAD, MASK]] = 0.0
            probs[position, token] = p
        return _loaded(ScriptedModel(probs.log()), config)

    return build


@pytest.fixture(scope="session")
def make():
    """Build a request and its payload; the prompt is drawn from ``seed``."""

    def build(
        name="r",
        prompt=4,
        output=16,
        block=8,
        cache=CacheMode.DUAL,
        refresh=1,
        scope=RefreshScope.FULL,
        max_steps_per_block=None,
        max_forwards=None,
        seed=0,
        **sampling,
    ):
        rng = random.Random(seed)
        ids = tuple(rng.randrange(3, VOCAB) for _ in range(prompt))
        options = DiffusionOptions(
            block_tokens=block,
            cache_mode=cache,
            refresh_blocks=refresh,
            refresh_scope=scope,
            max_steps_per_block=max_steps_per_block,
            max_forwards=max_forwards,
        )
        request = Request(
            RequestId(name), Family.DIFFUSION, "tiny", prompt, output, 0.0, diffusion=options
        )
        return request, Payload(ids, SamplingParams(seed=seed, **sampling))

    return build


@pytest.fixture(scope="session")
def executor():
    """Build an executor with small pages."""

    def build(loaded, page_tokens=4, page_capacity=400, **options):
        return DiffusionExecutor(
            loaded, page_tokens=page_tokens, page_capacity=page_capacity, **options
        )

    return build

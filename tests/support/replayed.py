"""Random models on any device, and runs of them with and without captured passes to compare."""

import random

import torch

from stepserve.core.ids import RequestId
from stepserve.core.payload import Payload, SamplingParams
from stepserve.core.request import CacheMode, DiffusionOptions, Family, Request
from stepserve.engine.ar_executor import AutoregressiveExecutor
from stepserve.engine.ar_offline import generate
from stepserve.engine.diffusion_executor import DiffusionExecutor
from stepserve.engine.diffusion_offline import denoise
from stepserve.engine.loader import LoadedModel
from stepserve.engine.models.transformer import DecoderModel, ModelConfig

MASK, EOS, VOCAB = 1, 2, 40
NEVER = VOCAB - 1
"""A token that no model writes."""
LLADA = {"kv_heads": 4}
DREAM = {"qkv_bias": True, "shift_logits": True}
AUTOREGRESSIVE = {"qkv_bias": True, "mask_token_id": None}
BLOCKS = {"qk_norm": True, "head_dim": 24, "attention_block": 8}
SHIFTED_BLOCKS = {"qkv_bias": True, "shift_logits": True, "attention_block": 8}
SHAPES = {
    "llada": LLADA,
    "dream": DREAM,
    "causal": AUTOREGRESSIVE,
    "blocks": BLOCKS,
    "shifted blocks": SHIFTED_BLOCKS,
}


def random_model(shape, seed=0, device="cpu", dtype=torch.float32):
    """Of one of ``SHAPES``; the weights of a seed are the same on every device."""
    sizes = {"hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_size": 48}
    tokens = {"vocab_size": VOCAB, "mask_token_id": MASK, "eos_token_id": EOS}
    config = ModelConfig(**(sizes | tokens | SHAPES[shape]), max_positions=400)
    torch.manual_seed(seed)
    model = DecoderModel(config).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if not name.endswith("norm.weight"):
            weight.normal_(std=0.3)
    model.embed.weight.mul_(0.3)
    model.head.weight.mul_(1.5)
    family = Family.AUTOREGRESSIVE if shape == "causal" else Family.DIFFUSION
    model = model.to(device=device, dtype=dtype)
    model.set_rotary_tables(torch.device(device))
    return LoadedModel(model, config, shape, (4, 8), 8, 16, (0, MASK, NEVER), family)


def requests(shape, count=5, cache=CacheMode.DUAL, most_prompt=60, **sampling):
    """Requests of unequal contexts that end at different times, each with its payload."""
    chance, rows = random.Random(count), []
    cache = CacheMode.BLOCK if "attention_block" in SHAPES[shape] else cache
    for i in range(count):
        prompt, output = chance.randint(3, most_prompt), 8 * chance.randint(1, 4)
        family = Family.AUTOREGRESSIVE if shape == "causal" else Family.DIFFUSION
        options = DiffusionOptions(block_tokens=8, cache_mode=cache)
        request = Request(RequestId(f"{i}"), family, shape, prompt, output, 0.0, diffusion=options)
        ids = tuple(chance.randrange(3, NEVER) for _ in range(prompt))
        rows.append((request, Payload(ids, SamplingParams(seed=i, **sampling))))
    return rows


def executor(loaded, graphs, **options):
    causal = loaded.family is Family.AUTOREGRESSIVE
    kind = AutoregressiveExecutor if causal else DiffusionExecutor
    return kind(loaded, graphs=graphs, **({"page_tokens": 4, "page_capacity": 400} | options))


def run(engine, rows, threshold=0.95):
    """Every request to its end, together."""
    if engine.FAMILY is Family.AUTOREGRESSIVE:
        return generate(engine, rows)
    return denoise(engine, rows, threshold)


def watched(engine):
    """Told to the list returned, pass by pass: the hidden states of each row."""
    passes, hidden = [], engine._hidden

    def tell(works):
        out = hidden(works)
        passes.append(
            {w.row.request.id: out[w.base : w.base + len(w.span)].float().cpu() for w in works}
        )
        return out

    engine._hidden = tell
    return passes


def assert_same_passes(passes, others, abs_error):
    assert len(passes) == len(others)
    for one, other in zip(passes, others, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=0.0, atol=abs_error)


def assert_replay_changes_nothing(loaded, rows, abs_error):
    """Run rows with and without; returns the results and how often each bucket was run."""
    plain, replaying = executor(loaded, "off"), executor(loaded, "on")
    passes, others = watched(plain), watched(replaying)
    buckets, counts = replaying._replay._bucket, {}

    def count(rows):
        bucket = buckets(rows)
        counts[bucket] = counts.get(bucket, 0) + 1
        return bucket

    replaying._replay._bucket = count
    results, replayed = run(plain, rows), run(replaying, rows)
    assert all(result.error is None for result in results.values())
    assert results == replayed
    assert_same_passes(passes, others, abs_error)
    assert replaying.used_pages == 0
    return results, counts

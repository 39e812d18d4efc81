"""The models that are measured, their rooflines, and requests and batches for them."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from stepserve.core.ids import RequestId
from stepserve.core.payload import Payload, SamplingParams
from stepserve.core.request import CacheMode, DiffusionOptions, Family, Progress, Request
from stepserve.core.step import Batch, Step
from stepserve.engine.ar_executor import AutoregressiveExecutor
from stepserve.engine.ar_offline import generate
from stepserve.engine.diffusion_executor import DiffusionExecutor
from stepserve.engine.diffusion_offline import denoise
from stepserve.engine.loader import LoadedModel
from stepserve.engine.models.transformer import DecoderModel, ModelConfig

Executor = DiffusionExecutor | AutoregressiveExecutor

PEAKS = {  # bytes/s, dense 16-bit flops/s: data sheets; a name may contain a later one
    "GH200": (4.0e12, 989e12),
    "H200": (4.8e12, 989e12),
    "H100 PCIe": (2.0e12, 756e12),
    "H100": (3.35e12, 989e12),
    "B200": (8.0e12, 2250e12),
    "A100": (2.04e12, 312e12),
    "L40S": (0.864e12, 362e12),
}
LLADA = ModelConfig(126_464, 4096, 32, 32, 32, 12_288, 9_216, 126_336, 126_081, rope_theta=5e5)
DREAM = ModelConfig(
    *(152_064, 3584, 28, 28, 4, 18_944, 9_216, 151_666, 151_643),
    rope_theta=1e6,
    norm_eps=1e-6,
    qkv_bias=True,
    shift_logits=True,
)
AUTOREGRESSIVE = dataclasses.replace(DREAM, mask_token_id=None, shift_logits=False)
SHAPES = {"llada-8b": LLADA, "dream-7b": DREAM, "causal-7b": AUTOREGRESSIVE}


class Size(NamedTuple):
    """Of a pass: rows, tokens executed, query-key pairs, context read from pages, tokens asked."""

    rows: int
    tokens: int
    pairs: int
    read: int
    asked: int


def small(config: ModelConfig) -> ModelConfig:
    """The same kind of model, of a size that a CPU runs in no time."""
    return dataclasses.replace(
        config,
        vocab_size=200,
        hidden_size=64,
        layers=2,
        heads=4,
        kv_heads=4 if config.kv_heads == config.heads else 2,
        mlp_size=96,
        max_positions=512,
        mask_token_id=None if config.mask_token_id is None else 1,
        eos_token_id=2,
    )


def build(
    name: str, config: ModelConfig, device: str, dtype: torch.dtype, std: float = 0.02
) -> LoadedModel:
    """A model of random weights, made where they stay."""
    with torch.device("meta"):
        model = DecoderModel(config).to(dtype).eval().requires_grad_(False)
    model.to_empty(device=device)
    torch.manual_seed(0)
    for part, weight in model.named_parameters():
        weight.fill_(1.0) if part.endswith("norm.weight") else weight.normal_(std=std)
    model.set_rotary_tables(torch.device(device))
    family = Family.AUTOREGRESSIVE if config.mask_token_id is None else Family.DIFFUSION
    never = () if config.mask_token_id is None else (config.mask_token_id,)
    return LoadedModel(model, config, name, (8, 32), 32, 256, never, family)


def layer_weights(config: ModelConfig) -> int:
    """Weights of all layers that a pass reads."""
    heads = 2 * config.heads + 2 * config.kv_heads
    layer = config.hidden_size * (heads * config.head_dim + 3 * config.mlp_size)
    return config.layers * layer


def kv_bytes_per_token(config: ModelConfig, value_bytes: int) -> int:
    """Keys and values of a position in all layers."""
    return 2 * config.layers * config.kv_heads * config.head_dim * value_bytes


def roofline(
    config: ModelConfig, value_bytes: int, flops_per_s: float, bytes_per_s: float, size: Size
) -> tuple[float, str]:
    """Seconds that a pass takes at least, and what bounds it: compute or memory.

    All weights but the embedding are read once, keys and values of the context once.
    """
    head = config.hidden_size * config.vocab_size
    flops = 2.0 * (layer_weights(config) * size.tokens + head * size.asked)
    flops += 4.0 * config.layers * config.heads * config.head_dim * size.pairs
    held = kv_bytes_per_token(config, value_bytes) * size.read
    bytes_read = value_bytes * (layer_weights(config) + head) + held
    compute_s, memory_s = flops / flops_per_s, bytes_read / bytes_per_s
    return max((memory_s, "memory"), (compute_s, "compute"))


def shape_name(config: ModelConfig) -> str:
    """Which of ``SHAPES`` a configuration is, in full or small."""
    return next(name for name, shape in SHAPES.items() if config in (shape, small(shape)))


def diffusion_row(index: int, prompt: int, output: int, block: int) -> tuple[Request, Payload]:
    options = DiffusionOptions(block_tokens=block, cache_mode=CacheMode.DUAL)
    name = RequestId(f"{index}")
    request = Request(name, Family.DIFFUSION, "random", prompt, output, 0.0, diffusion=options)
    return request, Payload(tuple(3 + (7 * i + index) % 190 for i in range(prompt)))


def ar_row(index: int, prompt: int, output: int) -> tuple[Request, Payload]:
    name = RequestId(f"{index}")
    request = Request(name, Family.AUTOREGRESSIVE, "random", prompt, output, 0.0)
    ids = tuple(3 + (7 * i + index) % 190 for i in range(prompt))
    return request, Payload(ids, SamplingParams(ignore_eos=True))


def tokens_of(
    loaded: LoadedModel, rows: list[tuple[Request, Payload]], graphs: str
) -> list[list[int]]:
    """Output of requests run together to their ends."""
    if loaded.family is Family.AUTOREGRESSIVE:
        results = generate(AutoregressiveExecutor(loaded, page_capacity=64, graphs=graphs), rows)
    else:
        results = denoise(DiffusionExecutor(loaded, page_capacity=64, graphs=graphs), rows, 0.9)
    failed = [result.error for result in results.values() if result.error]
    if failed:
        raise SystemExit(f"{loaded.name}: {failed[0]}")
    return [result.token_ids for result in results.values()]


@contextmanager
def held(ex: Executor, rows: list[tuple[Request, Payload]]) -> Iterator[None]:
    try:
        for request, payload in rows:
            ex.add(request, payload, Progress(settled=request.prompt_tokens), {})
        yield
    finally:
        for request, _ in rows:
            ex.remove(request.id)


def step_seconds(ex: Executor, steps: list[Step]) -> float:
    """Of a batch in which nothing fails and nothing ends."""
    result = ex.run(Batch(0, tuple(steps)))
    for outcome in result.outcomes:
        if outcome.error or outcome.finished:
            raise RuntimeError(f"row {outcome.request_id} ended: {outcome}")
    return result.seconds

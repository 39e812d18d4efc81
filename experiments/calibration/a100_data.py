"""Measured A100 times of the three Qwen2.5 shapes, summed from public operator profiles.

Needs the full data sets (STEPSERVE_DATA); used by fit_a100.py and by the test of its fit. All
functions return milliseconds of one forward pass of the whole model on its TP group.
"""

import csv
import gzip
from collections.abc import Callable, Iterable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from stepserve.sim.a100 import ModelShape, model_shape
from stepserve.sim.data import data_file

Floats = NDArray[np.float64]
LAYER_OPS = (  # operators of a layer without attention and the two whose width is adapted
    "input_layernorm_ms",
    "attn_post_proj_ms",
    "post_attention_layernorm_ms",
    "add_ms",
)
MLP_OPS = ("mlp_up_proj_ms", "mlp_act_ms", "mlp_down_proj_ms")
STAND_INS = {  # measured model, share of its MLP width, whether its keys are not grouped
    "qwen2.5-14b": ("internlm/internlm-20b", 1.0, True),
    "qwen2.5-32b": ("internlm/internlm-20b", 2.0, True),
    "qwen2.5-72b": ("meta-llama/Llama-2-70b-hf", 29568 / 28672, False),
}
HOST_MODELS = {
    "qwen2.5-14b": ("meta-llama/Llama-2-7b-hf",),
    "qwen2.5-32b": ("internlm/internlm-20b",),
    "qwen2.5-72b": ("meta-llama/Llama-2-70b-hf", "Qwen/Qwen-72B"),
}
HOST_OPS = (
    "schedule_median_ms",
    "sampler_e2e_median_ms",
    "prepare_inputs_e2e_median_ms",
    "process_model_outputs_median_ms",
)
GRAPH_BYTES = 8 << 20  # vLLM's own all-reduce up to here, NCCL above


@cache
def rows(name: str) -> list[dict[str, str]]:
    """A profile file. Raises FileNotFoundError without the data folder."""
    path = data_file(f"profiles/{name}.csv.gz")
    if path is None:
        raise FileNotFoundError(f"profiles/{name}.csv.gz (set STEPSERVE_DATA)")
    with gzip.open(path, "rt", newline="") as file:
        return list(csv.DictReader(file))


def linear_points(model: str) -> dict[int, float]:
    """Projections, MLP, norms, rotation and residual sums by tokens in the batch."""
    shape, (name, mlp, ungrouped) = model_shape(model), STAND_INS[model]
    heads, kv = shape.heads, shape.kv_heads
    qkv = (heads + 2 * kv) / (3 * heads) if ungrouped else 1.0
    rope = (heads + kv) / (2 * heads) if ungrouped else 1.0
    found: dict[int, list[float]] = {}
    for row in rows("vidur_mlp_ops"):
        if (row["gpu"], row["model"], row["tp"]) != ("a100", name, str(shape.tp)):
            continue
        layer = sum(float(row[op]) for op in LAYER_OPS)
        layer += mlp * sum(float(row[op]) for op in MLP_OPS)
        layer += qkv * float(row["attn_pre_proj_ms"]) + rope * float(row["attn_rope_ms"])
        found.setdefault(int(row["num_tokens"]), []).append(layer * shape.layers)
    return {tokens: float(np.median(ms)) for tokens, ms in sorted(found.items())}


@cache
def _gemm_grid() -> tuple[list[int], dict[int, list[int]], dict[tuple[int, int, int], float]]:
    times = {
        (int(r["m"]), int(r["n"]), int(r["k"])): float(r["latency_ms"])
        for r in rows("aic_gemm_bf16")
        if r["system"] == "a100_sxm"
    }
    sizes = {axis: sorted({key[axis] for key in times}) for axis in (1, 2)}
    return sorted({key[0] for key in times}), sizes, times


def gemm_ms(m: int, n: int, k: int) -> float:
    """One matrix product at a measured ``m``, bilinear in the two widths."""
    _, sizes, times = _gemm_grid()
    total = 0.0
    for n_at, n_share in _between(sizes[1], n):
        for k_at, k_share in _between(sizes[2], k):
            total += n_share * k_share * times[m, n_at, k_at]
    return total


def _between(sizes: list[int], size: int) -> Iterable[tuple[int, float]]:
    if size in sizes:
        return [(size, 1.0)]
    above = int(np.searchsorted(sizes, size))
    low, high = sizes[above - 1], sizes[above]
    share = (size - low) / (high - low)
    return [(low, 1.0 - share), (high, share)]


def gemm_points(model: str) -> dict[int, float]:
    """Matrix products only, of a newer stack, by tokens in the batch (profile ``a100-aic``)."""
    s = model_shape(model)
    width, heads = s.hidden, s.heads * s.head_dim // s.tp
    products = (
        ((s.heads + 2 * s.kv_heads) * s.head_dim // s.tp, width),
        (width, heads),
        (2 * s.mlp // s.tp, width),
        (width, s.mlp // s.tp),
    )
    return {m: s.layers * sum(gemm_ms(m, n, k) for n, k in products) for m in _gemm_grid()[0]}


def head_points(model: str) -> dict[int, float]:
    """The output projection by rows: the product of width 65,536, scaled to the vocabulary."""
    s = model_shape(model)
    share = s.vocab / s.tp / 65536
    return {m: share * gemm_ms(m, 65536, s.hidden) for m in _gemm_grid()[0] if m <= 512}


def host_points(model: str) -> list[tuple[int, float]]:
    """Scheduling, inputs, sampling and outputs on the host: (rows, ms)."""
    tp = str(model_shape(model).tp)
    return [
        (int(r["batch_size"]), sum(float(r[op]) for op in HOST_OPS))
        for r in rows("vidur_cpu_overheads_a100")
        if r["model_name"] in HOST_MODELS[model] and r["tensor_parallel_degree"] == tp
    ]


def all_reduce(model: str) -> Callable[[int], float]:
    """Two all-reduces a layer by tokens in the batch; none at TP1."""
    s = model_shape(model)
    if s.tp == 1:
        return lambda _: 0.0
    points: dict[str, list[tuple[int, float]]] = {"vLLM_custom_graph": [], "nccl_2.27.3": []}
    for r in rows("aic_comm"):
        key = (r["system"], r["op"], r["num_gpus"])
        if key == ("a100_sxm", "all_reduce", str(s.tp)) and r["impl"] in points:
            points[r["impl"]].append((int(r["message_bytes"]), float(r["latency_ms"])))
    tables = [np.array(sorted(found)).T for found in points.values()]

    def at(tokens: int) -> float:
        size = tokens * s.hidden * 2
        sizes, ms = tables[size > GRAPH_BYTES]
        return 2 * s.layers * float(np.interp(size, sizes, ms))

    return at


def _attention(kind: str, shape: ModelShape, axis: str) -> dict[tuple[int, int], float]:
    """Milliseconds of all layers by (sequences, length). 20 heads: between 16 and 24."""
    heads, kv = shape.heads // shape.tp, shape.kv_heads // shape.tp
    wanted = (16, 24) if heads == 20 else (heads,)
    tables = [
        {
            (int(r["batch_size"]), int(r[axis])): float(r["latency_ms"])
            for r in rows(f"aic_attention_{kind}_bf16")
            if (r["system"], r["num_heads"], r["num_key_value_heads"])
            == ("a100_sxm", str(h), str(kv))
        }
        for h in wanted
    ]
    keys = set.intersection(*(set(t) for t in tables))
    return {k: shape.layers * float(np.mean([t[k] for t in tables])) for k in sorted(keys)}


def prefill_attention(shape: ModelShape) -> dict[tuple[int, int], float]:
    """By (prompts, tokens of each): whole prompts only."""
    return _attention("context", shape, "isl")


def decode_attention(shape: ModelShape) -> dict[tuple[int, int], float]:
    """By (rows, context of each, the new token included)."""
    found = _attention("generation", shape, "step")
    return {(batch, step + 1): ms for (batch, step), ms in found.items()}

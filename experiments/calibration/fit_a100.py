"""Fits the simulator's A100 times of the three Qwen2.5 models to public operator profiles.

    python experiments/calibration/fit_a100.py          # prints the tables of errors and checks
    python experiments/calibration/fit_a100.py --ship   # also rewrites sim/data/a100.json

Needs the full data sets (STEPSERVE_DATA).
"""

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import a100_data as data
import numpy as np
from numpy.typing import NDArray

from stepserve.core.ids import InstanceId
from stepserve.core.instance import InstanceSpec
from stepserve.core.step import Mix
from stepserve.sim.a100 import A100Truth, ModelShape, model_shape

Floats = NDArray[np.float64]
A100_JSON = Path(__file__).parents[2] / "src/stepserve/sim/data/a100.json"
MODELS = ("qwen2.5-14b", "qwen2.5-32b", "qwen2.5-72b")
KNOTS = (1, 64, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)
HEAD_KNOTS = (1, 128, 256, 512)
MOST_TOKENS = 16384
"""Attention is fitted on batches up to so many prompt tokens: no engine runs larger ones."""
MOST_ROWS = 256
SPEC = InstanceSpec(InstanceId("a100"), 1, 1, 16, 1)


def hats(sizes: Iterable[float], knots: Sequence[int]) -> Floats:
    """Weights of the knots at each size: linear interpolation as a matrix."""
    return np.array([np.interp(list(sizes), knots, row) for row in np.eye(len(knots))]).T


def relative_fit(matrix: Floats, ms: Floats) -> Floats:
    """Least squares of relative errors, no constant below 0 (dropped one after the other)."""
    kept = list(range(matrix.shape[1]))
    while True:
        found = np.linalg.lstsq(matrix[:, kept] / ms[:, None], np.ones(len(ms)), rcond=None)[0]
        if found.min() >= 0.0:
            result = np.zeros(matrix.shape[1])
            result[kept] = found
            return result
        del kept[int(found.argmin())]


def fit_curve(points: dict[int, float], knots: Sequence[int]) -> list[float]:
    """Milliseconds at the knots, never falling."""
    inside = {n: ms for n, ms in points.items() if n <= knots[-1]}
    found = relative_fit(hats(inside, knots), np.array(list(inside.values())))
    return [_round(ms) for ms in np.maximum.accumulate(found)]


def fit_decodes(shape: ModelShape) -> Floats:
    """Floor, milliseconds of a row, milliseconds of a context token; all layers."""
    points = {k: ms for k, ms in data.decode_attention(shape).items() if k[0] <= MOST_ROWS}
    matrix = np.array([(1.0, rows, rows * context) for rows, context in points])
    return relative_fit(matrix, np.array(list(points.values())))


def chunks(shape: ModelShape) -> dict[tuple[int, int], float]:
    """Prefill attention by (tokens, pairs): whole prompts, and chunks as their differences."""
    whole = data.prefill_attention(shape)
    points = {
        (batch * n, batch * n * (n + 1) // 2): ms
        for (batch, n), ms in whole.items()
        if batch * n <= MOST_TOKENS and n >= 64
    }
    alone = {n: ms for (batch, n), ms in whole.items() if batch == 1 and n <= MOST_TOKENS}
    for low, low_ms in alone.items():
        for high, ms in alone.items():
            if low >= 1024 and 512 <= high - low <= 2048:
                q = high - low
                points[(q, q * low + q * (q + 1) // 2)] = ms - low_ms
    return points


def fit_prefills(shape: ModelShape, floor_ms: float) -> Floats:
    """Milliseconds of a token and of a query-key pair beside the floor; all layers."""
    points = {k: ms for k, ms in chunks(shape).items() if ms > 1.5 * floor_ms}
    ms = np.array(list(points.values()))
    matrix = np.array(list(points), dtype=float)
    beside_floor = 1.0 - floor_ms / ms  # relative errors of the whole, with the floor given
    found: Floats = np.linalg.lstsq(matrix / ms[:, None], beside_floor, rcond=None)[0]
    return np.maximum(found, 0.0)


def fit(model: str) -> dict[str, Any]:
    """The constants of profile ``a100``."""
    shape = model_shape(model)
    reduce = data.all_reduce(model)
    reduce_points = {n: reduce(n) for n in data.linear_points(model)}
    floor, row, context = fit_decodes(shape)
    token, pair = fit_prefills(shape, floor)
    host = np.array(data.host_points(model))
    host_base, host_row = relative_fit(np.stack([np.ones(len(host)), host[:, 0]], 1), host[:, 1])
    none = [0.0] * len(KNOTS)
    return {
        "tokens": KNOTS,
        "linear_ms": fit_curve(data.linear_points(model), KNOTS),
        "all_reduce_ms": none if shape.tp == 1 else fit_curve(reduce_points, KNOTS),
        "rows": HEAD_KNOTS,
        "head_ms": fit_curve(data.head_points(model), HEAD_KNOTS),
        "floor_ms": _round(floor),
        "decode_ms": _round(row),
        "context_ms": _round(context),
        "prefill_ms": _round(token),
        "pair_ms": _round(pair),
        "host_ms": _round(host_base),
        "host_row_ms": _round(host_row),
    }


def _round(ms: float) -> float:
    return float(f"{ms:.4g}")


def error(pairs: Iterable[tuple[float, float]]) -> tuple[float, float, float]:
    """Median, 95th percentile and maximum of the relative error, in %."""
    found = 100 * np.array([abs(ours / true - 1.0) for ours, true in pairs])
    median, p95 = np.percentile(found, (50, 95))
    return round(float(median), 1), round(float(p95), 1), round(float(found.max()), 1)


def errors(model: str, constants: dict[str, Any]) -> dict[str, tuple[float, float, float]]:
    """Errors of the parts where they were fitted, and of whole batches."""
    shape, c = model_shape(model), constants
    linear, host = data.linear_points(model), data.host_points(model)
    reduce = data.all_reduce(model)

    def curve(n: float, values: str) -> float:
        return float(np.interp(n, KNOTS, c[values]))

    found = {
        "linear layers": error((curve(n, "linear_ms"), ms) for n, ms in linear.items()),
        "prefill attention": error(
            (c["floor_ms"] + q * c["prefill_ms"] + pairs * c["pair_ms"], ms)
            for (q, pairs), ms in chunks(shape).items()
        ),
        "decode attention": error(
            (c["floor_ms"] + b * c["decode_ms"] + b * n * c["context_ms"], ms)
            for (b, n), ms in data.decode_attention(shape).items()
            if b <= MOST_ROWS
        ),
        "host": error((c["host_ms"] + n * c["host_row_ms"], ms) for n, ms in host),
        "whole batches": error(whole_batches(model)),
    }
    if shape.tp > 1:
        found["all-reduce"] = error((curve(n, "all_reduce_ms"), reduce(n)) for n in linear)
    return found


def whole_batches(model: str) -> list[tuple[float, float]]:
    """Milliseconds by the shipped fit and summed from the data: decodes, prompts, chunks."""
    shape, truth = model_shape(model), A100Truth(model)
    linear, reduce = data.linear_points(model), data.all_reduce(model)
    head, host = data.head_points(model), np.array(data.host_points(model))
    host_fit = np.polyfit(host[:, 0], host[:, 1], 1)

    def measured_ms(tokens: int, rows: int) -> float:
        head_ms = np.interp(rows, list(head), list(head.values()))
        return float(
            np.interp(tokens, list(linear), list(linear.values()))
            + reduce(tokens)
            + head_ms
            + np.polyval(host_fit, rows)
        )

    found = []
    for (rows, context), ms in data.decode_attention(shape).items():
        if rows <= MOST_ROWS:
            mix = Mix(decodes=rows, decode_context=rows * context)
            seconds = truth.step_time_s(rows, rows, SPEC, mix)
            found.append((1e3 * seconds, ms + measured_ms(rows, rows)))
    for (rows, n), ms in data.prefill_attention(shape).items():
        if n >= 64 and rows * n <= KNOTS[-1]:
            mix = Mix(rows * n, rows * n * (n + 1) // 2)
            seconds = truth.step_time_s(rows * n, rows, SPEC, mix)
            found.append((1e3 * seconds, ms + measured_ms(rows * n, rows)))
    for (q, pairs), ms in chunks(shape).items():
        if q <= KNOTS[-1] and pairs > q * q:
            seconds = truth.step_time_s(q, 1, SPEC, Mix(q, pairs))
            found.append((1e3 * seconds, ms + measured_ms(q, 1)))
    return found


def chunk_check() -> tuple[float, tuple[float, float, float]]:
    """Measured chunks after cached tokens: Llama-2-70B at TP2, an older kernel.

    How many times slower the kernel is than the fit to whole prompts (median), and the error of
    the form (floor, tokens, pairs) fitted to the chunks themselves.
    """
    shape = replace(model_shape("qwen2.5-72b"), tp=2, layers=1)
    floor = fit_decodes(shape)[0]
    ours = np.array([floor, *fit_prefills(shape, floor)])
    measured = [
        (int(r["prefill_chunk_size"]), int(r["kv_cache_size"]), float(r["attn_prefill_ms"]))
        for r in data.rows("vidur_attention_a100_llama2_70b_tp2")
        if r["is_prefill"] == "1" and int(r["prefill_chunk_size"]) >= 256
    ]
    matrix = np.array([(1.0, q, q * held + q * (q + 1) / 2) for q, held, _ in measured])
    ms = np.array([ms for _, _, ms in measured])
    form = matrix @ relative_fit(matrix, ms)
    return float(np.median(ms / (matrix @ ours))), error(zip(form, ms, strict=True))


def end_to_end_check() -> list[tuple[str, float, float]]:
    """(batch, our ms, measured ms): Llama-2-70B at TP4 of another engine; Table 1's chunk."""
    truth = A100Truth("qwen2.5-72b")
    found = []
    for r in data.rows("splitwise_e2e_step_times"):
        key = (r["model"], r["hardware"], r["tensor_parallel"], r["token_size"])
        if key != ("llama2-70b", "a100-80gb", "4", "128"):
            continue
        n, batch = int(r["prompt_size"]), int(r["batch_size"])
        prompt = Mix(n * batch, batch * n * (n + 1) // 2)
        if batch == 1:
            ours = 1e3 * truth.step_time_s(n, 1, SPEC, prompt)
            found.append((f"70B prompt {n}", ours, float(r["prompt_time_ms"])))
        if n == 512:
            mix = Mix(decodes=batch, decode_context=batch * (n + 64))
            ours = 1e3 * truth.step_time_s(batch, batch, SPEC, mix)
            found.append((f"70B {batch} decodes at 576", ours, float(r["token_time_ms"])))
    last = Mix(2048, 2048 * 6144 + 2048 * 2049 // 2)
    for profile in ("a100", "a100-aic"):
        ours = 1e3 * A100Truth("qwen2.5-14b", profile).step_time_s(2048, 1, SPEC, last)
        found.append((f"14B last 2048 of 8192, {profile}", ours, 352.93))
    return found


def ship() -> None:
    """Rewrite the constants; shapes of the models stay."""
    old = json.loads(A100_JSON.read_text())
    profiles = {
        "a100": {model: fit(model) for model in MODELS},
        "a100-aic": {
            model: {"linear_ms": fit_curve(data.gemm_points(model), KNOTS)} for model in MODELS
        },
    }
    text = json.dumps(old | {"profiles": profiles}, indent=1)
    A100_JSON.write_text(_short_lists(text) + "\n")


def _short_lists(text: str) -> str:
    """Lists of numbers on one line."""
    parts = text.split("[")
    joined = [parts[0]]
    for part in parts[1:]:
        inside, rest = part.split("]", 1)
        joined.append(" ".join(inside.split()) + "]" + rest)
    return "[".join(joined)


def main() -> None:
    """Print errors and checks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ship", action="store_true")
    if parser.parse_args().ship:
        ship()
    for model in MODELS:
        constants = json.loads(A100_JSON.read_text())["profiles"]["a100"][model]
        for part, (median, p95, most) in errors(model, constants).items():
            print(f"| {model} | {part} | {median} | {p95} | {most} |")
    slower, form = chunk_check()
    print(f"chunks after cached tokens: older kernel {slower:.2f} times slower, form %: {form}")
    for name, ours, measured in end_to_end_check():
        print(f"| {name} | {ours:.1f} | {measured:.1f} | {100 * math.log(ours / measured):+.0f} |")


if __name__ == "__main__":
    main()

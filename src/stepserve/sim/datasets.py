"""The published workloads: lengths and arrivals of requests, latencies their deadlines are of.

Source: DiLaServe B1 and DiLaServe C9 (data sets, bases, multiples), DiLaServe D6 (Poisson
arrivals), DiLaServe D7 (the 2-hour curve). The numbers are in ``data/workloads.json``. Deviations
and estimates:

- Prompt lengths of MMLU-Pro and MBPP are not published: characters of the public texts at 3.2
  per token (2.85 fits GSM8K, full of digits; plain English has about 4). Lengths spread
  log-normally. The number of requests of those runs is a guess (MBPP: the whole set).
- ShareGPT lengths are those of a public set (Llama-2 tokens, prompt + output below 4,096)
  that counts whole conversations as prompts; the published run sends first turns. Prompts are
  scaled by 0.6, with which the simulated baseline survives and breaks in the same windows as
  the published one (experiments/calibration). Its base of 2.5 s is a fifth of the published
  deadline. Without the data folder the set's quantiles stand in.
- ``answer_tokens`` (for the early-stop option; the published system always runs to full
  length) are lengths of reference answers, not of the models' own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepserve.core.errors import FieldError, check_known
from stepserve.sim.data import data_file, facts, rows_of
from stepserve.sim.workload import Arrival, RateCurve, renewal

DATASETS = ("gsm8k", "mmlu-pro", "mbpp", "sharegpt")
BLOCK_TOKENS = 32
POOL_ROWS = 32_768

LENGTHS, ANSWERS, ARRIVALS = range(3)
"""Streams of chance of a workload: changing the load does not change the lengths."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request of a workload.

    ``index`` is its number, by which all chance is drawn. ``answer_tokens``: where the output
    would end by itself, at most ``output_tokens``; ``None`` if not known. ``slo_class`` and
    ``block_hashes`` (of the prompt's blocks; no engine reuses prefixes yet) are those of a file.
    """

    index: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    answer_tokens: int | None = None
    slo_class: str = ""
    block_hashes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """Facts of one model's runs on a data set.

    ``base_s``: unloaded latency at threshold 0.9 and TP1, which SLO multiples are of.
    ``difficulty``: step counts relative to LLaDA-8B on GSM8K, such that the simulated
    unloaded latency is ``base_s``.
    """

    gpu: str
    base_s: float
    multiples: tuple[float, ...]
    rates_per_gpu_per_s: tuple[float, ...]
    difficulty: float


def published_run(model: str, dataset: str) -> PublishedRun:
    """Facts of a model on a data set. Raises FieldError for a pair never run."""
    runs = facts("workloads")["runs"]
    run = runs.get(f"{model}/{dataset}")
    if run is None:
        raise FieldError("dataset", f"no published run of {model} on {dataset}: {', '.join(runs)}")
    multiples, rates = tuple(run["multiples"]), tuple(run["rates_per_gpu_per_s"])
    return PublishedRun(run["gpu"], run["base_s"], multiples, rates, run["difficulty"])


def published_requests(dataset: str) -> int:
    """How many requests a published run on the data set sends (partly guessed, see above)."""
    return int(_shape(dataset)["requests"])


def poisson(
    dataset: str, rate_per_s: float, requests: int, seed: int, cv: float = 1.0
) -> tuple[SimRequest, ...]:
    """A load sweep's requests at a total rate; ``cv`` 0 gives constant gaps (DiLaServe C9.3)."""
    rng = np.random.default_rng([seed, ARRIVALS])
    arrivals = renewal(RateCurve.constant(rate_per_s), cv, rng, requests=requests)
    return requests_of(dataset, arrivals, seed)


def burstgpt_curve(peak_per_s: float, window_s: float = 300.0) -> RateCurve:
    """24 windows with the published relative rates. Raises FieldError for a bad peak."""
    if peak_per_s <= 0.0 or window_s <= 0.0:
        raise FieldError("peak_per_s", "peak and window must be positive")
    counts = facts("workloads")["burstgpt"]["arrivals"]
    starts = tuple(i * window_s for i in range(len(counts)))
    return RateCurve(starts, tuple(peak_per_s * n / max(counts) for n in counts))


def requests_of(dataset: str, arrivals: Sequence[Arrival], seed: int) -> tuple[SimRequest, ...]:
    """Requests of a data set at these times. Lengths depend on seed and number alone."""
    shape, count = _shape(dataset), len(arrivals)
    if dataset == "sharegpt":
        prompts, answers = _sharegpt(count, seed)
        outputs = BLOCK_TOKENS * -(-answers // BLOCK_TOKENS)
    else:
        prompts = _lognormal(shape["prompt_tokens"], shape["prompt_sigma"], count, seed, LENGTHS)
        outputs = np.full(count, shape["output_tokens"])
        known = shape["answer_tokens"]
        answers = np.zeros(count, np.int64)
        if known:
            drawn = _lognormal(known, shape["answer_sigma"], count, seed, ANSWERS)
            answers = np.minimum(outputs, drawn)
    return tuple(
        SimRequest(i, arrival.at_s, p, o, a or None)
        for i, (arrival, p, o, a) in enumerate(
            zip(arrivals, prompts.tolist(), outputs.tolist(), answers.tolist(), strict=True)
        )
    )


def _shape(dataset: str) -> dict[str, Any]:
    shapes = facts("workloads")["datasets"]
    check_known(dataset, shapes, "dataset")
    shape: dict[str, Any] = shapes[dataset]
    return shape


def _lognormal(mean: float, sigma: float, count: int, seed: int, stream: int) -> Ints:
    """Whole numbers from 1 on with this mean."""
    normal = np.random.default_rng([seed, stream]).standard_normal(count)
    drawn = mean * np.exp(sigma * normal - sigma**2 / 2)
    tokens: Ints = np.maximum(1, np.rint(drawn)).astype(np.int64)
    return tokens


def _sharegpt(count: int, seed: int) -> tuple[Ints, Ints]:
    """Prompt and answer tokens, drawn with replacement from the pool."""
    shape = facts("workloads")["datasets"]["sharegpt"]
    path = data_file("lengths/sharegpt8k.csv.gz")
    if path is not None:
        with rows_of(path) as table:
            rows = [(int(r["input_tokens"]), int(r["output_tokens"])) for r in table]
            inputs, answers = (np.array(column) for column in zip(*rows, strict=True))
    else:
        rng = np.random.default_rng(0)  # the pool is the same for every seed
        inputs, answers = (
            np.rint(np.interp(rng.random(POOL_ROWS), shape["levels"], shape[name])).astype(np.int64)
            for name in ("prompt_quantiles", "answer_quantiles")
        )
    padded = BLOCK_TOKENS * -(-answers // BLOCK_TOKENS)
    usable = (inputs > 0) & (answers > 0) & (inputs + padded < shape["max_tokens"])
    prompts = np.maximum(1, np.rint(inputs[usable] * shape["prompt_scale"])).astype(np.int64)
    drawn = np.random.default_rng([seed, LENGTHS]).integers(len(prompts), size=count)
    lengths: tuple[Ints, Ints] = prompts[drawn], answers[usable][drawn]
    return lengths

"""The workloads of autoregressive models: prompt and output lengths, and Poisson arrivals.

Source: DynaServe 1.7, DynaServe 3.10.2 and DynaServe 3.10.3. The published statistics of lengths
are unknown; ours are in docs/simulator.md. What is not what its name says:

- ``burstgpt`` is composed: rows of BurstGPT were not obtainable, so lengths are those of Azure's
  2023 conversation trace, scaled to BurstGPT's mean total (853 tokens a request) and to the
  mean output with which ``hybrid`` emits the published 65 tokens a request. ``azure-conv`` is
  the same without scaling, ``hybrid-conv`` the hybrid with it.
- ``mini-reasoning`` is composed: log-normal around a published fixed shape (219/1467).
- By default lengths come from our own generator: quantiles of the prompt, and quantiles of the
  output for eight equally frequent classes of prompt length, fitted to the traces by
  ``experiments/calibration/fit_lengths.py`` (which prints its distance). Results so do not
  depend on the data folder. ``source="recorded"`` draws rows of the traces instead.
- Rows are drawn independently: the order of a trace, and what follows from it, is lost.
"""

from functools import cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepserve.core.errors import FieldError, check_known
from stepserve.sim.data import data_file, facts, rows_of
from stepserve.sim.datasets import LENGTHS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Source = Literal["fitted", "recorded"]

COIN = 3
"""Stream of chance that says which part of a mixed workload a request is of."""

FIXED = {"fixed-8192-32": (8192, 32), "fixed-2048-512": (2048, 512), "fixed-219-1467": (219, 1467)}
MIXED = {"hybrid": ("burstgpt", "azure-code"), "hybrid-conv": ("azure-conv", "azure-code")}
TRACES = {
    "azure-code": "traces/azure2023_code.csv.gz",
    "azure-conv": "traces/azure2023_conv.csv.gz",
    "arxiv": "lengths/arxiv_summarization.csv.gz",
}
REASONING_MEANS, REASONING_CV = (219.0, 1467.0), 0.5
REASONING_RANGE = 16, 4096
TOKEN_WORKLOADS = (*TRACES, "burstgpt", "mini-reasoning", *MIXED, *FIXED)


class TokenLengths(NamedTuple):
    """Tokens of one request: its prompt, and its output at which it ends by itself."""

    prompt_tokens: int
    output_tokens: int


def token_lengths(
    workload: str, count: int, seed: int, source: Source = "fitted"
) -> tuple[TokenLengths, ...]:
    """Lengths of a workload's first ``count`` requests; each depends on seed and number alone.

    Raises FieldError for an unknown ``workload``, and for a ``source`` of which there is no file.
    """
    check_known(workload, TOKEN_WORKLOADS, "workload")
    pairs = _pairs(workload, count, seed, source)
    return tuple(TokenLengths(prompt, output) for prompt, output in pairs.tolist())


def _pairs(workload: str, count: int, seed: int, source: Source) -> Ints:
    """Prompt and output tokens, a row a request; the first rows do not depend on ``count``."""
    if workload in FIXED:
        return np.tile(np.array(FIXED[workload]), (count, 1))
    if workload in MIXED:
        heads = np.random.default_rng([seed, COIN]).random(count) < 0.5
        one, other = (_pairs(part, count, seed, source) for part in MIXED[workload])
        return np.where(heads[:, None], one, other)
    if workload == "burstgpt":
        scaled = _pairs("azure-conv", count, seed, source) * facts("lengths")["burstgpt"]["scale"]
        return _whole(scaled)
    rng = np.random.default_rng([seed, LENGTHS])
    if workload == "mini-reasoning":
        variance = np.log(1.0 + REASONING_CV**2)
        normal = rng.standard_normal((count, 2))
        drawn = np.array(REASONING_MEANS) * np.exp(np.sqrt(variance) * normal - variance / 2)
        return _whole(np.clip(drawn, *REASONING_RANGE))
    if source == "recorded":
        rows = recorded(workload)
        return rows[rng.integers(len(rows), size=count)]
    return _fitted(workload, rng.random((count, 2)))


def _fitted(workload: str, chance: Floats) -> Ints:
    """Own generator: log-linear between quantiles, the output's by class of prompt."""
    shape = facts("lengths")[workload]
    prompt_at, output_at = shape["prompt_levels"], shape["output_levels"]
    prompts = np.exp(np.interp(chance[:, 0], prompt_at, np.log(shape["prompt_quantiles"])))
    classes = shape["output_quantiles"]
    chosen = (chance[:, 0] * len(classes)).astype(np.int64)
    outputs = np.empty(len(chance))
    for i, quantiles in enumerate(classes):
        of_class = chosen == i
        outputs[of_class] = np.exp(np.interp(chance[of_class, 1], output_at, np.log(quantiles)))
    most = np.minimum(outputs, shape["max_tokens"] - np.rint(prompts))
    return _whole(np.stack([prompts, most], axis=1))


def _whole(tokens: Floats) -> Ints:
    whole: Ints = np.maximum(1, np.rint(tokens)).astype(np.int64)
    return whole


@cache
def recorded(workload: str) -> Ints:
    """All rows of a workload's trace, for distances and for ``source="recorded"``."""
    path = data_file(TRACES[workload])
    if path is None:
        raise FieldError("source", f"recorded, but {TRACES[workload]} is not in the data folder")
    with rows_of(path) as table:
        rows = [(int(r["input_tokens"]), int(r["output_tokens"])) for r in table]
    return np.array(rows)

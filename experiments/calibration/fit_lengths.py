"""Fits the generators of lengths to the traces, and prints what they generate.

    python experiments/calibration/fit_lengths.py          # statistics, distance to the traces
    python experiments/calibration/fit_lengths.py --ship   # also rewrites sim/data/lengths.json

Needs the full data sets (STEPSERVE_DATA).
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepserve.sim.lengths import TOKEN_WORKLOADS, TRACES, recorded, token_lengths

Ints = NDArray[np.int64]
LENGTHS_JSON = Path(__file__).parents[2] / "src/stepserve/sim/data/lengths.json"
PROMPT_LEVELS = (0, 0.01, 0.03, *(i / 16 for i in range(1, 16)), 0.95, 0.975, 0.99, 0.999, 1)
OUTPUT_LEVELS = (0, 0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 1)
CLASSES = 8
BURSTGPT_TOTAL, BURSTGPT_OUTPUT = 853.0, 102.0
DRAWS = 40_000


def fit(workload: str) -> dict[str, Any]:
    """Quantiles of the prompt, and of the output by class of prompt length."""
    rows = recorded(workload)
    by_prompt = rows[np.argsort(rows[:, 0], kind="stable")]
    return {
        "rows": len(rows),
        "max_tokens": int(rows.sum(axis=1).max()),
        "prompt_levels": PROMPT_LEVELS,
        "prompt_quantiles": _quantiles(rows[:, 0], PROMPT_LEVELS),
        "output_levels": OUTPUT_LEVELS,
        "output_quantiles": [
            _quantiles(part[:, 1], OUTPUT_LEVELS) for part in np.array_split(by_prompt, CLASSES)
        ],
    }


def _quantiles(values: Ints, levels: tuple[float, ...]) -> list[int]:
    return [max(1, round(v)) for v in np.quantile(values, levels).tolist()]


def fit_burstgpt() -> dict[str, Any]:
    """Factors of the conversation trace that give the published means."""
    prompt, output = recorded("azure-conv").mean(axis=0)
    scale = (BURSTGPT_TOTAL - BURSTGPT_OUTPUT) / prompt, BURSTGPT_OUTPUT / output
    return {"scale": [round(float(s), 4) for s in scale]}


def distance(ours: Ints, theirs: Ints) -> float:
    """Largest distance of the two distribution functions (Kolmogorov-Smirnov)."""
    at = np.union1d(ours, theirs)
    shares = [np.searchsorted(np.sort(v), at, side="right") / len(v) for v in (ours, theirs)]
    return float(np.abs(shares[0] - shares[1]).max())


def statistics(values: Ints) -> str:
    """Mean, median and 99th percentile."""
    return f"{values.mean():.0f} / {np.median(values):.0f} / {np.quantile(values, 0.99):.0f}"


def main() -> None:
    """Print the tables of docs/simulator.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ship", action="store_true")
    if parser.parse_args().ship:
        source = "quantiles of public traces, by experiments/calibration/fit_lengths.py"
        shapes = {name: fit(name) for name in TRACES} | {"burstgpt": fit_burstgpt()}
        lines = [f' "{name}": {json.dumps(value)}' for name, value in shapes.items()]
        text = ",\n".join([f' "source": "{source}"', *lines])
        LENGTHS_JSON.write_text("{\n" + text + "\n}\n")
    for name in TOKEN_WORKLOADS:
        ours = np.array(token_lengths(name, DRAWS, 0))
        cells = [name, *(statistics(ours[:, i]) for i in (0, 1))]
        if name in TRACES:
            rows = recorded(name)
            cells += [statistics(rows[:, i]) for i in (0, 1)]
            cells += [f"{distance(ours[:, i], rows[:, i]):.3f}" for i in (0, 1)]
            cells.append(f"{distance(ours.sum(axis=1), rows.sum(axis=1)):.3f}")
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()

"""Rows 1 to 4 of DynaServe's published numbers: what it carries over either baseline."""

from collections.abc import Sequence
from pathlib import Path

from lib.dynaserve import BASELINES, OURS, Fact, Judge, Judged
from lib.markdown import DASH, ranged
from lib.results import Spread, rows_of

CAPACITIES = {
    "azure-code": "ar-capacity/14b",
    "burstgpt": "ar-capacity/14b",
    "arxiv": "ar-capacity/14b",
    "mini-reasoning": "ar-capacity/14b-reasoning",
}
"""Workload -> experiment with the 14B model."""
LARGER = ("ar-capacity/32b", "ar-capacity/72b")
"""Experiments with all of these workloads and one other model."""
TIED = 0.98
"""Share of the best goodput from which a system counts as tied with it."""


def gain(root: Path, experiment: str, workload: str, base: str, column: str) -> Spread | None:
    """What DynaServe has more than a baseline, each at its capacity."""
    rows = rows_of(experiment, root, kind="capacity", workload=workload)
    return rows.ratio(OURS, base, column)


def gains(root: Path, base: str) -> dict[str, Spread]:
    """Workload -> how much more load DynaServe carries, with the 14B model."""
    found = {w: gain(root, e, w, base, "capacity_per_s") for w, e in CAPACITIES.items()}
    return {workload: spread for workload, spread in found.items() if spread}


def _all_run(found: Sequence[dict[str, Spread]]) -> bool:
    return all(len(workloads) == len(CAPACITIES) for workloads in found)


def gain_range(root: Path, fact: Fact) -> Judged | None:
    """Row 1."""
    found = [gains(root, base) for base in BASELINES]
    means = [sorted(spread.mean for spread in by_workload.values()) for by_workload in found]
    if not all(means):
        return None
    cells = [f"{some[0]:.2f}x..{some[-1]:.2f}x" for some in means]
    enough = zip(means, fact["largest"], strict=True)
    inside = all(some[0] > 1.0 and some[-1] >= largest for some, largest in enough)
    remark = f"{len(means[0])} of {len(CAPACITIES)} workloads"
    return Judged((cells[0], cells[1], "1"), inside if _all_run(found) else None, remark)


def mean_gain(root: Path, fact: Fact) -> Judged | None:
    """Row 2."""
    found = [gains(root, base) for base in BASELINES]
    if not all(found):
        return None
    means = [sum(s.mean for s in some.values()) / len(some) for some in found]
    inside = all(mean >= least for mean, least in zip(means, fact["least"], strict=True))
    cells = (f"{means[0]:.2f}x", f"{means[1]:.2f}x", "1")
    return Judged(cells, inside if _all_run(found) else None)


def azure_gain(root: Path, fact: Fact) -> Judged | None:
    """Row 3."""
    found = gains(root, "colocated")
    if "azure-code" not in found:
        return None
    largest = max(found, key=lambda workload: found[workload].mean)
    inside = largest == "azure-code" if _all_run([found]) else None
    return Judged(
        (ranged(found["azure-code"], "{:.2f}x"), DASH, "1"), inside, f"largest: {largest}"
    )


def goodput_gain(root: Path, fact: Fact) -> Judged | None:
    """Row 4: at the capacity of each, all models."""
    cells = [*CAPACITIES.items(), *((w, e) for e in LARGER for w in CAPACITIES)]
    pairs = [
        [gain(root, experiment, workload, base, "goodput_tokens_per_s") for base in BASELINES]
        for workload, experiment in cells
    ]
    found = [(one.mean, other.mean) for one, other in pairs if one and other]
    if not found:
        return None
    best = sum(min(means) >= TIED for means in found)
    largest = [f"{max(column):.2f}x" for column in zip(*found, strict=True)]
    inside = best >= fact["least_share"] * len(found) if len(found) == len(cells) else None
    return Judged((largest[0], largest[1], f"{best} of {len(found)}"), inside)


ROWS: dict[int, Judge] = {1: gain_range, 2: mean_gain, 3: azure_gain, 4: goodput_gain}

"""The load that each system carries at 95 % attainment, and its accuracy there."""

from dataclasses import dataclass
from pathlib import Path

from lib.markdown import DASH, Lines, table
from lib.results import Rows, Spread, read

from stepserve.metrics.slo import serving_capacity

TARGET = 0.95
BASE = "dilaserve"


@dataclass(frozen=True, slots=True)
class Capacity:
    """Load at which a system of one seed attains ``TARGET``, between two tried loads.

    ``exact`` is false if it still attains it at the highest load tried: the load is a bound.
    """

    rate: float
    accuracy: float | None
    exact: bool


def capacity(rows: Rows) -> Capacity | None:
    """Of rows of one system and seed. Linear between the last load that attains the target (see
    ``metrics.slo.serving_capacity``) and the next; ``None`` if the lowest load misses it.
    """
    by_rate = {row["rate_per_gpu_per_s"]: row for row in rows}
    attained = {rate: row["attainment"] for rate, row in by_rate.items()}
    low = serving_capacity(attained, TARGET)
    if low is None:
        return None
    higher = [rate for rate in attained if rate > low]
    if not higher:
        return Capacity(low, by_rate[low]["accuracy"], exact=False)
    high = min(higher)
    share = (attained[low] - TARGET) / (attained[low] - attained[high])
    ends = by_rate[low]["accuracy"], by_rate[high]["accuracy"]
    accuracy = None if None in ends else ends[0] + share * (ends[1] - ends[0])
    return Capacity(low + share * (high - low), accuracy, exact=True)


def capacities(rows: Rows, system: str) -> dict[int, Capacity | None]:
    """By seed."""
    own = rows.where(system=system)
    return {seed: capacity(own.where(seed=seed)) for seed in sorted(own.distinct("seed"))}


def tables(root: Path) -> Lines:
    """Per system: the load that it carries at 95 % attainment, at what accuracy."""
    results = read("headline/headline", root)
    head = [
        "system",
        "load at 95 % attainment, requests/s per GPU (simulated)",
        "accuracy there, % (proxy)",
        f"over {BASE}, same seed",
    ]
    if results is None:
        return table(head, [[DASH] * len(head)])
    rows = results.rows
    base = capacities(rows, BASE)
    body = []
    for system in rows.distinct("system"):
        found = capacities(rows, system)
        known = [one for one in found.values() if one]
        if not known or len(known) < len(found):
            lowest = min(rows.numbers("rate_per_gpu_per_s"))
            body.append([system, f"below {lowest:g}", DASH, DASH])
            continue
        bound = "" if all(one.exact for one in known) else "at least "
        accuracies = tuple(one.accuracy for one in known if one.accuracy is not None)
        ratios = tuple(
            own.rate / other.rate
            for seed, own in found.items()
            if own and (other := base.get(seed)) and other.exact
        )
        body.append(
            [
                system,
                bound + Spread(tuple(one.rate for one in known)).text("{:.2f}"),
                Spread(accuracies).text("{:.1f}", 100.0) if accuracies else DASH,
                bound + Spread(ratios).text("{:.2f}") + "x" if ratios else DASH,
            ]
        )
    first, requests = rows.all[0], rows.numbers("requests")
    basis = (
        f"Simulated: {first['model']} on {first['workload']}, {first['gpus']} GPUs, "
        f"{requests[0]:g} to {requests[-1]:g} requests a run, "
        f"seeds {', '.join(map(str, results.seeds))}; mean [smallest..largest] over seeds, "
        f"linear between the loads tried. `{results.command}`"
    )
    return [*table(head, body), "", basis]

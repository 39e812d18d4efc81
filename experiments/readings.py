"""Results of experiments, and the published numbers beside them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from stepserve.metrics.slo import serving_capacity

HERE = Path(__file__).parent
SWEPT = ("rate_per_gpu_per_s", "slo_multiple")
TOLERANCE = 1e-3
"""Relative difference up to which two rates or SLO multiples are the same."""

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Spread:
    """Values over seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Of all seeds alike."""
        return sum(self.values) / len(self.values)

    @property
    def low(self) -> float:
        """The smallest."""
        return min(self.values)

    @property
    def high(self) -> float:
        """The largest."""
        return max(self.values)


@dataclass(frozen=True, slots=True)
class Study:
    """A published sweep: single runs, at ``xs`` of ``x_name``, with all else as in ``fixed``.

    ``series``: system -> name of a column of the results -> a value per x.
    """

    name: str
    experiment: str
    what: str
    x_name: str
    xs: tuple[float, ...]
    fixed: Mapping[str, float]
    series: Mapping[str, Mapping[str, Sequence[float | None]]]

    def metrics(self) -> list[str]:
        """Columns with any published value."""
        return list(dict.fromkeys(name for columns in self.series.values() for name in columns))

    def value(self, system: str, metric: str, x: float) -> float | None:
        """The published value, if there is one."""
        column = self.series.get(system, {}).get(metric)
        if column is None:
            return None
        return next((v for at, v in zip(self.xs, column, strict=True) if same(at, x)), None)


@cache
def published() -> Mapping[str, Any]:
    """The content of ``published.json``."""
    content: Mapping[str, Any] = json.loads((HERE / "published.json").read_text())
    return content


def studies() -> list[Study]:
    """All published sweeps that an experiment repeats."""
    return [
        Study(
            name,
            table["experiment"],
            table["what"],
            table["x_name"],
            tuple(table["x"]),
            table["fixed"],
            table["series"],
        )
        for name, table in published()["studies"].items()
    ]


def results(name: str, folder: Path = HERE) -> Mapping[str, Any] | None:
    """``results.json`` of an experiment; ``None`` if it was not run."""
    path = folder / name / "results.json"
    return json.loads(path.read_text()) if path.exists() else None


def same(a: float, b: float) -> bool:
    """Whether two swept values are one."""
    return abs(a - b) <= TOLERANCE * max(abs(a), abs(b))


def select(rows: Rows, **values: Any) -> list[Mapping[str, Any]]:
    """The rows with these values; numbers need to be ``same`` only."""

    def fits(row: Mapping[str, Any]) -> bool:
        return all(
            same(row[name], value) if isinstance(value, float) else row[name] == value
            for name, value in values.items()
        )

    return [row for row in rows if fits(row)]


def swept(rows: Rows, name: str) -> list[float]:
    """The values of a swept setting, in order."""
    return sorted({float(row[name]) for row in rows})


def systems(rows: Rows) -> list[str]:
    """In the order of the rows."""
    return list(dict.fromkeys(row["system"] for row in rows))


def spread(rows: Rows, metric: str) -> Spread | None:
    """A column over seeds; ``None`` without a value."""
    values = tuple(row[metric] for row in rows if row.get(metric) is not None)
    return Spread(values) if values else None


@dataclass(frozen=True, slots=True)
class Capacity:
    """Load at which a system of one seed attains ``target``, between the two tried loads.

    ``exact`` is false if it still attains it at the highest load tried: the load is a bound.
    """

    rate: float
    accuracy: float | None
    exact: bool


def capacity(rows: Rows, target: float) -> Capacity | None:
    """Of rows of one system and seed. Linear between the last load that attains the target (see
    ``metrics.slo.serving_capacity``) and the next; ``None`` if the lowest load misses it.
    """
    by_rate = {row["rate_per_gpu_per_s"]: row for row in rows}
    attained = {rate: row["attainment"] for rate, row in by_rate.items()}
    low = serving_capacity(attained, target)
    if low is None:
        return None
    higher = [rate for rate in attained if rate > low]
    if not higher:
        return Capacity(low, by_rate[low]["accuracy"], exact=False)
    high = min(higher)
    share = (attained[low] - target) / (attained[low] - attained[high])
    ends = by_rate[low]["accuracy"], by_rate[high]["accuracy"]
    accuracy = None if None in ends else ends[0] + share * (ends[1] - ends[0])
    return Capacity(low + share * (high - low), accuracy, exact=True)


def capacities(rows: Rows, system: str, target: float) -> dict[int, Capacity | None]:
    """By seed."""
    own = select(rows, system=system)
    seeds = sorted({row["seed"] for row in own})
    return {seed: capacity(select(own, seed=seed), target) for seed in seeds}

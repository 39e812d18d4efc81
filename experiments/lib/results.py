"""Results of experiments: rows, chosen and averaged over seeds.

``experiments/FOLDER/NAME.toml`` says what runs, ``NAME.json`` beside it what came of it. The
columns of rows are those of docs/simulator.md; ``file`` (``FOLDER/NAME``) is added here.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TOLERANCE = 1e-3
"""Relative difference up to which two rates or deadlines are the same."""

Row = Mapping[str, Any]


def same(a: float, b: float) -> bool:
    """Whether two swept values are one."""
    return math.isclose(a, b, rel_tol=TOLERANCE)


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

    def text(self, form: str, factor: float = 1.0) -> str:
        """Mean [smallest..largest]."""
        mean, low, high = (form.format(factor * v) for v in (self.mean, self.low, self.high))
        return mean if len(self.values) == 1 else f"{mean} [{low}..{high}]"


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of results, in their order."""

    all: tuple[Row, ...] = ()

    def __iter__(self) -> Iterator[Row]:
        """One by one."""
        return iter(self.all)

    def __len__(self) -> int:
        """How many."""
        return len(self.all)

    def where(self, **values: Any) -> "Rows":
        """The rows with these values; floats need to be ``same`` only, lists offer a choice."""

        def fits(found: Any, wanted: Any) -> bool:
            if isinstance(wanted, list):
                return any(fits(found, one) for one in wanted)
            if isinstance(wanted, float) and found is not None:
                return same(found, wanted)
            return bool(found == wanted)

        chosen = (r for r in self.all if all(fits(r[name], v) for name, v in values.items()))
        return Rows(tuple(chosen))

    def distinct(self, column: str) -> list[Any]:
        """The values of a column, in order of appearance."""
        return list(dict.fromkeys(row[column] for row in self.all))

    def numbers(self, column: str) -> list[float]:
        """The numbers of a column, rising."""
        return sorted({float(row[column]) for row in self.all if row[column] is not None})

    def spread(self, column: str) -> Spread | None:
        """A column over the seeds; ``None`` without a value."""
        values = tuple(row[column] for row in self.all if row[column] is not None)
        return Spread(values) if values else None

    def ratio(self, better: str, worse: str, column: str) -> Spread | None:
        """Of a column, between two systems with the same seed."""
        one, other = (
            {r["seed"]: r[column] for r in self.where(system=s) if r[column] is not None}
            for s in (better, worse)
        )
        found = tuple(one[s] / other[s] if other[s] else math.inf for s in one if s in other)
        return Spread(found) if found else None


@dataclass(frozen=True, slots=True)
class Results:
    """What an experiment came to."""

    name: str
    command: str
    seeds: tuple[int, ...]
    rows: Rows
    timelines: tuple[Row, ...]

    @property
    def quick(self) -> bool:
        """Whether the runs were shortened."""
        return "--quick" in self.command


def read(name: str, root: Path = ROOT) -> Results | None:
    """The results of ``FOLDER/NAME``; ``None`` if it was not run."""
    path = root / f"{name}.json"
    if not path.exists():
        return None
    content = _content(path, path.stat().st_mtime_ns)
    rows = Rows(tuple({**row, "file": name} for row in content["rows"]))
    timelines = tuple(content.get("timelines", ()))
    return Results(name, content["command"], tuple(content["seeds"]), rows, timelines)


@cache
def _content(path: Path, changed_ns: int) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def rows_of(name: str, root: Path = ROOT, **values: Any) -> Rows:
    """The rows of an experiment with these values; none if it was not run."""
    results = read(name, root)
    return results.rows.where(**values) if results else Rows()


def experiments() -> list[str]:
    """Every experiment there is, as ``FOLDER/NAME``."""
    return sorted(f"{path.parent.name}/{path.stem}" for path in ROOT.glob("*/*.toml"))

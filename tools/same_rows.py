"""Shows that result rows are the same bytes as those of an older revision.

    python tools/same_rows.py BEFORE AFTER [BEFORE AFTER ...] [--run "COMMAND" ...]

Each is a folder with a ``results.json``, or that file. Commands are run first: they make what is
compared. Rows are matched by what run they are of, and timelines with them; columns that were
renamed since version 0.3 are mapped. Every value that existed before is compared as JSON text.
Where a sweep has several rows that could be meant, one of them must be the same. Prints counts and
differences, and exits with 1 if there is any.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]

IDENTITY = ("kind", "system", "model", "workload", "seed", "slo_multiple")
DIFFUSION = {"dataset": "workload"}
AUTOREGRESSIVE = {"attainment": "tbt_attainment", "e2e_mean_s": "latency_mean_s"}
"""Renamed columns of version 0.3, by the family that a row shows to be of."""

SYSTEMS = {"stepserve-all-resident": "stepserve-all-running"}
"""Renamed systems of version 0.3."""


def renamed(row: Row) -> Row:
    """A row with today's names of columns; one of today as it is."""
    if "family" in row or "swept" in row:
        return row
    names = AUTOREGRESSIVE if "workload" in row else DIFFUSION
    renames = {"system": SYSTEMS.get(row["system"], row["system"])} if "system" in row else {}
    now = {names.get(name, name): value for name, value in row.items()}
    return {"kind": "run"} | now | renames


def read(path: Path) -> list[Row]:
    """The rows of results, and a row for each timeline. Numbers stay as they are written."""
    file = path / "results.json" if path.is_dir() else path
    content = json.loads(file.read_text(), parse_float=str, parse_int=str)
    rows = [renamed(row) for row in content["rows"]]
    timelines = [renamed(row) for row in content.get("timelines", ())]
    return rows + [{**row, "kind": f"timeline of {row['kind']}"} for row in timelines]


def same_run(before: Row, after: Row) -> bool:
    """Whether two rows are of the same run. The rate of a capacity is a result."""
    if any(before.get(name) != after.get(name) for name in IDENTITY if name in before):
        return False
    rates = [name for name in ("rate_per_s", "rate_per_gpu_per_s") if name in before]
    return before["kind"] == "capacity" or all(before[n] == after.get(n) for n in rates)


def differences(before: Row, after: Row) -> dict[str, tuple[Any, Any]]:
    """What is not the same of what existed before, by column."""
    absent = object()
    return {
        name: (value, after.get(name))
        for name, value in before.items()
        if after.get(name, absent) != value
    }


def compare(before: Sequence[Row], after: Sequence[Row]) -> list[str]:
    """A line for every row that is missing, and for every value that differs."""
    lines = []
    for row in before:
        name = " ".join(
            f"{row[n]}" for n in (*IDENTITY, "rate_per_s", "rate_per_gpu_per_s") if n in row
        )
        found = [differences(row, other) for other in after if same_run(row, other)]
        if not found:
            lines.append(f"{name}: no such row")
        elif {} not in found:
            nearest = min(found, key=len)
            lines += [f"{name}: {n} was {a}, is {b}" for n, (a, b) in nearest.items()]
    return lines


def main() -> int:
    """Compare all pairs; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+", help="pairs of before and after")
    parser.add_argument("--run", action="append", default=[], help="a command that makes results")
    parser.add_argument("--partly", action="store_true", help="rows may be missing: part was run")
    args = parser.parse_args()
    if len(args.folders) % 2:
        parser.error("folders come in pairs: BEFORE AFTER")
    for command in args.run:
        subprocess.run(shlex.split(command), check=True)
    different = 0
    for old, new in zip(args.folders[::2], args.folders[1::2], strict=True):
        before, after = read(old), read(new)
        if args.partly:
            before = [row for row in before if any(same_run(row, other) for other in after)]
        values = sum(map(len, before))
        lines = compare(before, after)
        different += len(lines)
        print(f"{old} -> {new}: {len(before)} rows, {values} values, {len(lines)} differences")
        print(
            *(f"  {line}" for line in lines), sep="\n" if lines else "", end="\n" if lines else ""
        )
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())

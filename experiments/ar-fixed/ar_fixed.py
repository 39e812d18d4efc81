"""Rows 8 to 13 of DynaServe's published numbers: three fixed shapes."""

from functools import partial
from pathlib import Path

from lib.dynaserve import OURS, Fact, Judge, Judged
from lib.markdown import ranged
from lib.results import Rows, rows_of

SYSTEMS = ["colocated-2048", "disaggregated-1p1d", OURS]
KEPT = 0.99
"""Share of requests cut at the prompt's end from which roles count as kept."""


def shaped(root: Path, workload: str) -> list[Rows]:
    """Rows of a fixed shape: colocated, disaggregated, DynaServe; none if one was not run.

    At the highest rate at which roles are kept, or else the lowest: beyond it requests for which
    one role has no room stay with the other, which is disaggregation no more.
    """
    rows = rows_of("ar-fixed/ar-fixed", root, kind="run", workload=workload, system=SYSTEMS)
    if len(rows.distinct("system")) < len(SYSTEMS):
        return []
    split = rows.where(system=SYSTEMS[1])
    mixed = {row["rate_per_s"] for row in split if row["splits"]["at"] < KEPT}
    rates = rows.numbers("rate_per_s")
    rate = max((rate for rate in rates if rate not in mixed), default=rates[0])
    return [rows.where(system=system, rate_per_s=rate) for system in SYSTEMS]


def _at(shape: list[Rows]) -> str:
    return f"at {shape[0].numbers('rate_per_s')[0]:.2f}/s"


def busy(workload: str, root: Path, fact: Fact) -> Judged | None:
    """Rows 8, 10, 12: MFU by instance."""
    shape = shaped(root, workload)
    if not shape:
        return None
    mfus = [
        [100.0 * sum(c) / len(rows) for c in zip(*(r["mfu"] for r in rows), strict=True)]
        for rows in shape
    ]
    (one, other), split = mfus[0], mfus[1]
    level = abs(one - other) < 0.2 * max(one, other)
    first, second = (float(text) for text in fact["published"][1].split("/"))
    inside = level and (split[0] > split[1]) == (first > second)
    if second < 1.0:
        inside = inside and split[1] < 0.1 * split[0]
    cells = ["/".join(f"{mfu:.2f}" for mfu in some) for some in mfus]
    return Judged((cells[0], cells[1], cells[2]), inside, _at(shape))


def gaps(workload: str, root: Path, fact: Fact) -> Judged | None:
    """Rows 9, 11, 13: 99th percentile of the gaps, and attainment."""
    shape = shaped(root, workload)
    both = [(rows.spread("tbt_p99_s"), rows.spread("tbt_attainment")) for rows in shape]
    found = [(p99, met) for p99, met in both if p99 and met]
    if len(found) < len(SYSTEMS):
        return None
    (p99, met), (split_p99, split_met), _ = found
    inside = p99.mean > split_p99.mean and met.mean < split_met.mean
    cells = [f"{ranged(a, '{:.0f}', 1e3)}; {ranged(b, '{:.2f}', 100.0)}" for a, b in found]
    return Judged((cells[0], cells[1], cells[2]), inside, _at(shape))


ROWS: dict[int, Judge] = {
    number: partial(judge, workload)
    for first, workload in ((8, "fixed-8192-32"), (10, "fixed-2048-512"), (12, "fixed-219-1467"))
    for number, judge in ((first, busy), (first + 1, gaps))
}

"""Rows 5 to 7 of DynaServe's published numbers: the hybrid load at the capacity of each system."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lib.dynaserve import BASELINES, OURS, Fact, Judge, Judged
from lib.markdown import DASH, ranged
from lib.results import Rows, Spread, rows_of

CAPACITY = "capacity_per_s"


def ratios(rows: Rows, column: str) -> list[Spread]:
    """What DynaServe has more than each baseline; none if one was not run."""
    found = [rows.ratio(OURS, base, column) for base in BASELINES]
    known = [spread for spread in found if spread]
    return known if len(known) == len(found) else []


def near(found: Sequence[Spread], fact: Fact) -> bool:
    """Whether the means are within the band around the published ratios."""
    pairs = zip(found, fact["ratios"], strict=True)
    return all(abs(spread.mean / ratio - 1.0) <= fact["within"] for spread, ratio in pairs)


def level(column: str, form: str, root: Path, fact: Fact) -> Judged | None:
    """Rows 5 and 6: a column at the capacity of each, and its ratios."""
    rows = rows_of("hybrid/hybrid", root, kind="capacity")
    found = ratios(rows, column)
    if not found:
        return None
    one, other, ours = (
        ranged(rows.where(system=system).spread(column), form) for system in (*BASELINES, OURS)
    )
    remark = "gains " + ", ".join(spread.text("{:.2f}x") for spread in found)
    return Judged((one, other, ours), near(found, fact), remark)


def gain(root: Path, fact: Fact) -> Judged | None:
    """Row 7."""
    found = ratios(rows_of("hybrid/hybrid", root, kind="capacity"), CAPACITY)
    if not found:
        return None
    more = [Spread(tuple(v - 1.0 for v in spread.values)) for spread in found]
    one, other = (spread.text("{:.0f}", 100.0) + " %" for spread in more)
    return Judged((one, other, DASH), near(found, fact))


ROWS: dict[int, Judge] = {
    5: partial(level, CAPACITY, "{:.2f}"),
    6: partial(level, "goodput_tokens_per_s", "{:.0f}"),
    7: gain,
}

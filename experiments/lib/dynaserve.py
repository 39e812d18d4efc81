"""The published numbers of DynaServe (``published/dynaserve.json``, DynaServe 3.11) beside ours.

Each of its rows is judged by a function in the folder of the experiment that repeats it: ``ROWS``
of ``ar-capacity``, ``hybrid``, ``ar-fixed`` and ``ar-parts``.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .markdown import DASH, Lines, table
from .results import ROOT

BASELINES = ("colocated", "disaggregated")
OURS = "dynaserve"
_COMPUTES = "tuned colocation computes nearly all that fits 100 ms already"
REASONS = {
    **dict.fromkeys((1, 2, 3, 5, 6, 7), _COMPUTES),
    8: "at half load ties go to the first instance; level nearer to capacity",
    13: "a prompt of 219 tokens adds 20 ms; 163 ms need several at once, so burstier arrivals",
    17: "grows with what instances hold",
}
"""Row -> why it is out of its band; what is behind it: docs/simulator-fidelity.md."""

Fact = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Judged:
    """Simulated cells (colocated, disaggregated, DynaServe), and whether they are in the band.

    ``inside`` is ``None`` where too little was run to tell.
    """

    cells: tuple[str, str, str]
    inside: bool | None
    remark: str = ""


Judge = Callable[[Path, Fact], Judged | None]
"""(folder of the results, published row) -> ours; ``None`` if it was not run."""


@cache
def facts() -> dict[int, Fact]:
    """The published rows, by number."""
    content = json.loads((ROOT / "published" / "dynaserve.json").read_text())
    return {fact["row"]: fact for fact in content["rows"]}


def published_rows(root: Path, judges: Mapping[int, Judge]) -> Lines:
    """The table of DynaServe 3.11. Cells: published / simulated."""
    head = ["#", "experiment", *BASELINES, "DynaServe", "band", "in it?", "remark"]
    body = []
    for number, fact in facts().items():
        ours = judges[number](root, fact)
        cells = ours.cells if ours else ("not run",) * 3
        both = [
            DASH if theirs == own == DASH or (theirs == DASH and ours is None) else
            f"{theirs} / {own}"
            for theirs, own in zip(fact["published"], cells, strict=True)
        ]  # fmt: skip
        inside = {None: DASH, True: "in", False: "out"}[ours.inside] if ours else "not run"
        reason = REASONS.get(number, "") if ours and ours.inside is False else ""
        remark = "; ".join(filter(None, [ours.remark if ours else "", reason]))
        body.append([str(number), fact["what"], *both, fact["band"], inside, remark])
    return table(head, body)

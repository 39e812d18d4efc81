"""The numbers that DiLaServe's authors published (``published/dilaserve.json``), beside ours."""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .columns import COLUMNS, NAMES
from .markdown import DASH, Lines, table
from .results import ROOT, Rows, Spread, rows_of, same

CLEAR_POINTS = 3.0
"""Published differences between systems that are larger than chance, in points."""
BASES = ("infaas", "llumnix", "dilaserve")


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A published sweep: single runs, at ``x`` of ``x_name``, with all else as in ``fixed``.

    ``series``: system -> column of the results -> a value per x. ``requests`` of each run are ours
    where ``requests_published`` is false: theirs are not known.
    """

    experiment: str
    what: str
    x_name: str
    x: Sequence[float]
    fixed: Mapping[str, float]
    series: Mapping[str, Mapping[str, Sequence[float | None]]]
    requests: int
    requests_published: bool = True

    def metrics(self) -> list[str]:
        """Columns with any published value."""
        return list(dict.fromkeys(name for columns in self.series.values() for name in columns))

    def value(self, system: str, metric: str, x: float) -> float | None:
        """The published value, if there is one."""
        column = self.series.get(system, {}).get(metric, ())
        return next((v for at, v in zip(self.x, column, strict=False) if same(at, x)), None)

    def ours(self, root: Path, system: str, metric: str, x: float) -> Spread | None:
        """What we simulated of it, over seeds, in runs of as many requests."""
        fixed = {**self.fixed, self.x_name: x, "requests": self.requests}
        return rows_of(self.experiment, root, system=system, **fixed).spread(metric)


@cache
def content() -> Mapping[str, Any]:
    """The published numbers."""
    found: Mapping[str, Any] = json.loads((ROOT / "published" / "dilaserve.json").read_text())
    return found


@cache
def studies() -> Mapping[str, Study]:
    """All published sweeps that an experiment repeats, by name."""
    return {name: Study(**one) for name, one in content()["studies"].items()}


def beside(rows: Rows, metric: str) -> float | None:
    """The published value of these runs, of one system at one point, if they are as long."""
    for study in studies().values():
        own = rows.where(file=study.experiment, requests=study.requests, **study.fixed)
        if own.all:
            return study.value(own.all[0]["system"], metric, own.all[0][study.x_name])
    return None


def length(rows: Rows) -> str:
    """What a figure with published values says of their length."""
    unknown = [s.experiment for s in studies().values() if not s.requests_published]
    guessed = rows.where(file=unknown).distinct("workload")
    if guessed == rows.distinct("workload"):
        return "hollow: published single runs, whose number of requests is not known"
    known = "hollow: published single runs of as many requests"
    names = " and ".join(NAMES[name] for name in guessed)
    return f"{known} (not known for {names}: ours is a guess)" if guessed else known


def fidelity(root: Path) -> Lines:
    """Summary, claims, and all values."""
    lines = [
        "Mean absolute difference of SLO attainment in points, simulated mean over seeds less",
        "published single run. Order: pairs of systems at one load or deadline whose published",
        f"attainments differ by more than {CLEAR_POINTS:g} points, and how many of them come out",
        "in that order. Quick runs are too short to compare: they have dashes.",
        "",
        *summary(root),
        "",
        *claims(root),
        "",
        "Every published value beside the simulated one. Cells: published / simulated mean",
        "[smallest..largest over seeds] (simulated mean less published).",
        "",
    ]
    for study in studies().values():
        for metric in study.metrics():
            lines += details(root, study, metric)
    return lines


def differences(root: Path, study: Study, system: str, metric: str) -> list[float]:
    """Simulated mean less published, at every load or deadline that has both."""
    found = []
    for x in study.x:
        theirs, ours = study.value(system, metric, x), study.ours(root, system, metric, x)
        if theirs is not None and ours is not None:
            found.append(ours.mean - theirs)
    return found


def order(root: Path, study: Study) -> tuple[int, int, Lines]:
    """(pairs in the published order, pairs checked, those that are not), by attainment.

    Checked are pairs whose published attainments differ by more than ``CLEAR_POINTS``.
    """
    agreed, checked, wrong = 0, 0, []
    for x in study.x:
        for a, b in itertools.combinations(study.series, 2):
            one, other = (study.value(system, "attainment", x) for system in (a, b))
            ours, others = (study.ours(root, system, "attainment", x) for system in (a, b))
            if one is None or other is None or ours is None or others is None:
                continue
            gap, own_gap = 100 * (one - other), 100 * (ours.mean - others.mean)
            if abs(gap) <= CLEAR_POINTS:
                continue
            checked += 1
            agreed += gap * own_gap > 0
            if gap * own_gap <= 0:
                wrong.append(
                    f"- {study.what}, {x:g}: {a} against {b}, published {gap:+.1f} points, "
                    f"simulated {own_gap:+.1f}"
                )
    return agreed, checked, wrong


def summary(root: Path) -> Lines:
    """Mean absolute differences and order, per published sweep."""
    head = ["published sweep", *BASES, "variants", "order of systems", "accuracy proxy, all"]
    body, wrong = [], []
    for study in studies().values():
        if "attainment" not in study.metrics():
            continue
        by_system = {s: differences(root, study, s, "attainment") for s in study.series}
        variants = [d for s, found in by_system.items() if s not in BASES for d in found]
        accuracy = [d for s in study.series for d in differences(root, study, s, "accuracy")]
        agreed, checked, failed = order(root, study)
        wrong += failed
        body.append(
            [
                study.what,
                *(_mean_absolute(by_system.get(s, [])) for s in BASES),
                _mean_absolute(variants),
                f"{agreed} of {checked}" if checked else DASH,
                _mean_absolute(accuracy),
            ]
        )
    lines = table(head, body)
    return [*lines, "", "Not in the published order:", "", *wrong] if wrong else lines


def _mean_absolute(values: Sequence[float]) -> str:
    return f"{100 * sum(map(abs, values)) / len(values):.1f}" if values else DASH


def details(root: Path, study: Study, metric: str) -> Lines:
    """Every published value of a sweep beside ours."""
    column = COLUMNS[metric]
    systems = [name for name, columns in study.series.items() if metric in columns]

    def cell(system: str, x: float) -> str:
        theirs, ours = study.value(system, metric, x), study.ours(root, system, metric, x)
        if theirs is None:
            return DASH
        text = column.form.format(column.factor * theirs) + " / "
        if ours is None:
            return text + DASH
        more = column.form.replace(":", ":+").format(column.factor * (ours.mean - theirs))
        return f"{text}{ours.text(column.form, column.factor)} ({more})"

    body = [[f"{x:g}", *(cell(system, x) for system in systems)] for x in study.x]
    proxy = " (simulated: proxy)" if metric == "accuracy" else ""
    head = COLUMNS[study.x_name].unit
    return [f"{study.what}. {column.heading}{proxy}:", "", *table([head, *systems], body), ""]


def claims(root: Path) -> Lines:
    """The published claims (DiLaServe C10) that a simulation can answer.

    Differences in points at one load, or the range of relative differences over all loads.
    """
    points, shares = [], []
    for claim in content()["claims"]:
        study, metric = studies()[claim["study"]], claim["metric"]
        both = {
            x: [study.ours(root, claim[which], metric, x) for which in ("better", "worse")]
            for x in study.x
        }
        pairs = {x: (a.mean, b.mean) for x, (a, b) in both.items() if a and b}
        if "x" in claim:
            found = {x: 100 * (a - b) for x, (a, b) in pairs.items()}
            here = next((f"{d:+.1f}" for x, d in found.items() if same(x, claim["x"])), DASH)
            most = max(found.items(), key=lambda pair: abs(pair[1]), default=None)
            largest = f"{most[1]:+.1f} at {most[0]:g}" if most else DASH
            points.append([claim["what"], claim["published"], here, largest])
        else:
            more = sorted((100 * (a / b - 1) for a, b in pairs.values()), key=abs)
            cell = f"{more[0]:+.0f} to {more[-1]:+.0f} %" if more else DASH
            shares.append([claim["what"], claim["published"], cell])
    head = ["difference in points", "published", "simulated, same run", "simulated, largest"]
    return [*table(head, points), "", *table(["claim", "published", "simulated"], shares)]

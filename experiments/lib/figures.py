"""Figures, as the ``[figure.NAME]`` tables of experiment files describe them.

Keys of such a table:

- ``kind``: ``lines`` (over ``x``, a column; a panel for each column of ``y``), ``dots`` (by ``y``,
  a column; a panel for each column of ``x``), or a function of the folder's own module.
- ``title``; ``files``: whose rows (of this folder; default: this file's); ``where``: which rows.
- ``series``: the column whose values are told apart by style; ``names``: what to call values.
- ``rows``, ``columns``: a row or column of panels for each value of this column.
- ``labels`` of axes, ``limits``, ``target`` (a dashed line): by column; ``log``: columns on a
  logarithmic axis.
- ``published``: whether published values stand beside ours. They do so only where a run of ours
  has as many requests as the published one.
- ``numbers``: whether dots say their value; ``note``: a sentence for the foot.
"""

import importlib.util
import textwrap
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from . import panels, published
from .columns import NAMES, column
from .results import ROOT, Rows, read
from .styles import Style, styles

PANEL_IN = (3.4, 2.5)
"""Width and height of a panel with lines, in inches."""
LOOK: dict[Any, Any] = {
    "font.size": 9.0,
    "font.sans-serif": ["DejaVu Sans", "Verdana"],
    "axes.titlesize": 9.0,
    "svg.fonttype": "none",
    "svg.hashsalt": "stepserve",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One figure; see the head of this file. ``folder/name`` is where it goes."""

    folder: str
    name: str
    kind: str
    title: str
    files: tuple[str, ...]
    where: Mapping[str, Any] = field(default_factory=dict)
    x: tuple[str, ...] = ()
    y: tuple[str, ...] = ()
    series: str = "system"
    series_label: str = "{}"
    names: Mapping[str, str] = field(default_factory=dict)
    rows: str = ""
    columns: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    log: tuple[str, ...] = ()
    target: Mapping[str, float] = field(default_factory=dict)
    published: bool = False
    numbers: bool = False
    note: str = ""

    def called(self, value: Any) -> str:
        """What to call a value of a column."""
        text = f"{value:.3g}" if isinstance(value, float) else str(value)
        return self.names.get(text) or NAMES.get(text, text)

    def label(self, name: str) -> str:
        """Of the axis of a column."""
        return self.labels.get(name) or column(name).label


def plan(folder: str, file: str, name: str, table: Mapping[str, Any]) -> Plan:
    """A figure's table. Raises ValueError naming a key that is none."""
    known = {f.name for f in fields(Plan)} - {"folder", "name"}
    unknown = set(table) - known
    if unknown:
        raise ValueError(f"{folder}/{file}.toml: figure.{name}.{min(unknown)} is no key")
    lists = {k: tuple([v] if isinstance(v, str) else v) for k, v in table.items() if k in LISTS}
    files = tuple(f"{folder}/{one}" for one in table.get("files", [file]))
    return Plan(**{**table, **lists, "folder": folder, "name": name, "files": files})


LISTS = ("x", "y", "log")


def plans() -> list[Plan]:
    """Every figure of every experiment file."""
    return [
        plan(path.parent.name, path.stem, name, table)
        for path in sorted(ROOT.glob("*/*.toml"))
        for name, table in tomllib.loads(path.read_text()).get("figure", {}).items()
    ]


def module(folder: str) -> ModuleType | None:
    """The folder's own code, if it has any: ``ar-parts/ar_parts.py``."""
    path = ROOT / folder / f"{folder.replace('-', '_')}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path) if path.exists() else None
    if spec is None or spec.loader is None:
        return None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def draw(plan: Plan, root: Path = ROOT) -> Figure | None:
    """The figure; ``None`` where none of its files was run."""
    results = [found for name in plan.files if (found := read(name, root))]
    rows = Rows(tuple(row for one in results for row in one.rows)).where(**plan.where)
    if not rows.all:
        return None
    with matplotlib.rc_context(LOOK):
        if plan.kind in ("lines", "dots"):
            return _panels(plan, rows)
        own = getattr(module(plan.folder), plan.kind, None)
        if own is None:
            raise ValueError(f"{plan.folder}: figure.{plan.name}.kind {plan.kind!r} is none")
        drawn: Figure = own(plan, results)
        return drawn


def save(figure: Figure, path: Path) -> None:
    """As ``path`` with .png and .svg; the same bytes for the same figure."""
    with matplotlib.rc_context(LOOK):
        figure.savefig(path.with_suffix(".png"), dpi=200, metadata={"Software": None})
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None, "Creator": None})
    pyplot.close(figure)


def _panels(plan: Plan, rows: Rows) -> Figure:
    metrics = [m for m in (plan.y if plan.kind == "lines" else plan.x) if rows.spread(m)]
    across = [{plan.columns: v} for v in rows.distinct(plan.columns)] if plan.columns else []
    down = [{plan.rows: v} for v in rows.distinct(plan.rows)] if plan.rows else [{}]
    lines = [(facet, m) for facet in down for m in (metrics if across else [""])]
    columns = [(facet, "") for facet in across] or [({}, m) for m in metrics]
    height = PANEL_IN[1]
    if plan.kind == "dots":
        (category,) = plan.y
        by_category = [rows.where(**{category: v}) for v in rows.distinct(category)]
        most = max(len(own.distinct(plan.series)) for own in by_category)
        many = max(len(rows.where(**facet).distinct(category)) for facet in (*down, *across))
        height = 0.75 + (0.16 + 0.11 * most) * many
    size = (max(7.0, 0.6 + PANEL_IN[0] * len(columns)), height * len(lines))
    frame = Frame(plan, size, styles_of(plan, rows))
    hollow = False
    for i, (row, row_metric) in enumerate(lines):
        for j, (across_value, metric) in enumerate(columns):
            axes = frame.figure.add_subplot(len(lines), len(columns), i * len(columns) + j + 1)
            facets = {**row, **across_value}
            axes.set_title(", ".join(plan.called(value) for value in facets.values()))
            own = rows.where(**facets)
            hollow |= _panel(axes, plan, own, metric or row_metric, frame.series, first=j == 0)
            if across and j > 0 and plan.kind == "lines":
                axes.set_ylabel("")
            if i + 1 < len(lines):
                axes.set_xlabel("")
    return frame.finished(rows, hollow=hollow)


def _panel(
    axes: Axes, plan: Plan, rows: Rows, metric: str, by_series: Mapping[Any, Style], *, first: bool
) -> bool:
    """One panel; whether it shows published values."""
    shown = {value: s for value, s in by_series.items() if rows.where(**{plan.series: value}).all}
    hollow = False
    if plan.kind == "lines":
        beside = published.beside if plan.published else lambda rows, metric: None
        hollow = panels.lines(axes, rows, plan.x[0], metric, plan.series, shown, beside)
        axes.set_xlabel(plan.label(plan.x[0]))
        axes.set_ylabel(plan.label(metric))
        if plan.x[0] in plan.limits:
            axes.set_xlim(*plan.limits[plan.x[0]])
    else:
        (category,) = plan.y
        panels.dots(axes, rows, metric, category, plan.series, shown, numbers=plan.numbers)
        labels = [plan.called(value) for value in rows.distinct(category)]
        axes.set_yticklabels(labels if first or plan.columns else [])
        axes.set_xlabel(plan.label(metric))
        if first and rows.all and isinstance(rows.all[0][category], float):
            axes.set_ylabel(plan.label(category))
    _adjust(axes, plan, metric)
    return hollow


def _adjust(axes: Axes, plan: Plan, metric: str) -> None:
    """What the plan says of this column's axis."""
    upright = plan.kind == "lines"
    if metric in plan.log:
        axis = axes.yaxis if upright else axes.xaxis
        (axes.set_yscale if upright else axes.set_xscale)("log")
        axes.autoscale(axis="y" if upright else "x")
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
    if metric in plan.limits:
        (axes.set_ylim if upright else axes.set_xlim)(*plan.limits[metric])
    if metric in plan.target:
        draw_line = axes.axhline if upright else axes.axvline
        at = column(metric).factor * plan.target[metric]
        draw_line(at, color=panels.DARK, linewidth=0.9, linestyle=(0, (4, 3)))


def styles_of(plan: Plan, rows: Rows) -> dict[Any, Style]:
    """Style by value of the series."""
    values = rows.distinct(plan.series)
    known = styles(str(value) for value in values)
    return {value: known[str(value)] for value in values}


class Frame:
    """A figure with a title above its panels, a legend and a foot below them."""

    def __init__(
        self, plan: Plan, size: tuple[float, float], by_series: Mapping[Any, Style]
    ) -> None:
        """Panels take ``size`` inches."""
        self._plan = plan
        self._size = size
        self.series = by_series
        self.figure = pyplot.figure(layout="constrained")

    def finished(self, rows: Rows, *, hollow: bool = False, length: str = "") -> Figure:
        """The figure, with all that is around its panels."""
        plan, (width, height) = self._plan, self._size
        handles = self._handles(hollow)
        longest = max((len(str(handle.get_label())) for handle in handles), default=0)
        columns = max(1, min(len(handles) or 1, int((width - 0.3) / (0.7 + 0.07 * longest))))
        foot = textwrap.wrap(caption(plan, rows, hollow, length), int((width - 0.4) / 0.0585))
        legend_in = 0.19 * -(-len(handles) // columns) + (0.12 if handles else 0.0)
        foot_in, head_in = 0.1 + 0.14 * len(foot), 0.36
        total = height + legend_in + foot_in + head_in
        figure = self.figure
        figure.set_size_inches(width, total)
        below = (legend_in + foot_in) / total
        figure.get_layout_engine().set(rect=(0.0, below, 1.0, height / total))  # type: ignore[union-attr, call-arg]
        figure.text(0.5, 1.0 - 0.1 / total, plan.title, ha="center", va="top", fontsize=11)
        figure.text(
            0.15 / width, 0.07 / total, "\n".join(foot), ha="left", va="bottom", fontsize=7.5,
            color=panels.DARK, linespacing=1.25,
        )  # fmt: skip
        if not handles:
            return figure
        legend = figure.legend(
            handles=handles, loc="center", bbox_to_anchor=(0.5, (foot_in + legend_in / 2) / total),
            ncols=columns, frameon=False, handlelength=3.2, columnspacing=1.4,
        )  # fmt: skip
        legend.set_in_layout(False)
        return figure

    def _handles(self, hollow: bool) -> list[Line2D]:
        joined = self._plan.kind != "dots"
        if self._plan.y == (self._plan.series,):
            return []  # named beside their dots
        found = [
            panels.handle(style, self._label(value), joined=joined)
            for value, style in self.series.items()
        ]
        return [*found, panels.hollow()] if hollow else found

    def _label(self, value: Any) -> str:
        return self._plan.series_label.format(self._plan.called(value))


def caption(plan: Plan, rows: Rows, hollow: bool, length: str = "") -> str:
    """What ran, how many requests for how long, with which seeds, and how it is drawn."""
    who = [", ".join(NAMES.get(n, n) for n in rows.distinct(c)) for c in ("model", "workload")]
    who = list(dict.fromkeys(who))  # the bundled model has its own workload
    gpus = "/".join(f"{n:g}" for n in rows.numbers("gpus"))
    measured = "measured" in rows.distinct("accuracy_kind")
    seconds = [r["requests"] / r["rate_per_s"] for r in rows if r["requests"] and r["rate_per_s"]]
    length = length or f"arriving over {_range(seconds, '{:.0f}')} s"
    seeds = sorted(set(rows.distinct("seed")))
    kind = "Time simulated, accuracy measured" if measured else "Simulated"
    words = [
        f"{kind}: {' on '.join(who)}, {gpus} GPUs; "
        f"n = {_range(rows.numbers('requests'), '{:,.0f}')} requests a run, "
        f"{length}; {'seeds' if len(seeds) > 1 else 'seed'} {', '.join(map(str, seeds))}"
    ]
    if not measured and {"accuracy", "accuracy_weighted"} & {*plan.x, *plan.y}:
        words.append("accuracy is a proxy")
    drawn = "points are means over seeds, with their range; lines join neighbours of the sweep only"
    words += [drawn if plan.kind == "lines" and len(seeds) > 1 else ""]
    words += ["dots are means over seeds, with their range"] if plan.kind == "dots" else []
    words += ["dashed: the target"] if plan.target else []
    if hollow:
        words.append(published.length(rows))
    return ". ".join(word[0].upper() + word[1:] for word in [*words, plan.note] if word) + "."


def _range(values: list[float], form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"

"""What is drawn in one panel: lines over a swept setting, or dots by category."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from .columns import Column, column
from .results import Rows, Spread
from .styles import Style

JOINED = 2.0
"""Neighbours are joined up to this many times the usual (median) distance of those swept."""
DARK = "#333333"
NOTHING = (math.nan, math.nan, math.nan)

Published = Callable[[Rows, str], float | None]
"""(rows of one point, column) -> the published value beside it."""


def gaps(xs: Sequence[float]) -> set[float]:
    """The values after which nothing was swept for long: no line goes from there to the next."""
    steps = [high - low for low, high in itertools.pairwise(xs)]
    usual = sorted(steps)[len(steps) // 2] if len(steps) > 1 else 0.0
    near = JOINED * usual * (1.0 + 1e-9)
    return {x for x, step in zip(xs, steps, strict=False) if step > near}


def line(
    axes: Axes, swept: Sequence[float], found: Mapping[float, Spread], style: Style, factor: float,
    shade: float = 0.15,
) -> None:  # fmt: skip
    """Means over seeds, joined where all between was run; bands and bars are the range."""
    far = gaps(swept)
    xs: list[float] = []
    bands: list[tuple[float, float, float]] = []
    for x in swept:
        spread = found.get(x)
        band = (spread.mean, spread.low, spread.high) if spread else NOTHING
        xs += [x, x] if x in far else [x]
        bands += [band, NOTHING] if x in far else [band]
    means, lows, highs = ([factor * band[i] for band in bands] for i in range(3))
    color, dash, marker = style
    axes.plot(
        xs, means, color=color, dashes=dash or (None, None), marker=marker, markersize=4.5,
        linewidth=1.6, markeredgewidth=0.0,
    )  # fmt: skip
    axes.fill_between(xs, lows, highs, color=color, alpha=shade, linewidth=0)
    around = [math.nan, *means, math.nan]
    alone = [i for i in range(len(xs)) if math.isnan(around[i]) and math.isnan(around[i + 2])]
    at, low, high = ([values[i] for i in alone] for values in (xs, lows, highs))
    axes.vlines(at, low, high, color=color, linewidth=1.0, alpha=0.6)  # no band to see


def lines(
    axes: Axes, rows: Rows, x: str, metric: str, series: str, styles: Mapping[Any, Style],
    published: Published,
) -> bool:  # fmt: skip
    """A column over a setting, a line per series; whether a published value stands beside."""
    shown, swept, beside_ours = column(metric), rows.numbers(x), False
    for value, style in styles.items():
        own = rows.where(**{series: value})
        at = {point: own.where(**{x: point}) for point in swept}
        found = {point: s for point, some in at.items() if (s := some.spread(metric))}
        if not found:
            continue
        line(axes, swept, found, style, shown.factor, min(0.15, 0.5 / len(styles)))
        beside = {point: published(at[point], metric) for point in found}
        known = [(point, shown.factor * v) for point, v in beside.items() if v is not None]
        if known:
            xs, ys = zip(*known, strict=True)
            axes.add_line(hollow(xs, ys, style.color, style.marker))
            beside_ours = True
    margin = 0.05 * (swept[-1] - swept[0]) or 1.0
    axes.set_xlim(swept[0] - margin, swept[-1] + margin)
    grid(axes)
    scale(axes, shown, "y")
    return beside_ours


def dots(
    axes: Axes, rows: Rows, metric: str, category: str, series: str, styles: Mapping[Any, Style],
    *, numbers: bool,
) -> None:  # fmt: skip
    """Categories from top to bottom, a mean with its range per series."""
    shown, categories = column(metric), rows.distinct(category)
    for at, name in enumerate(categories):
        own = rows.where(**{category: name})
        spreads = {v: own.where(**{series: v}).spread(metric) for v in styles}
        present = [(styles[v], spread) for v, spread in spreads.items() if spread]
        for i, ((color, _, marker), spread) in enumerate(present):
            y = at + (i - (len(present) - 1) / 2) * 0.8 / max(len(present), 2)
            mean, low, high = (shown.factor * v for v in (spread.mean, spread.low, spread.high))
            axes.errorbar(
                mean, y, xerr=[[mean - low], [high - mean]], fmt=marker, color=color,
                capsize=2.5, markersize=5.5, linewidth=1.2, markeredgewidth=0.0,
            )  # fmt: skip
            if numbers:
                axes.annotate(
                    shown.form.format(mean), (high, y), (7, 0), textcoords="offset points",
                    va="center", fontsize=7.5,
                )  # fmt: skip
    axes.set_ylim(len(categories) - 0.4, -0.6)
    axes.set_yticks(range(len(categories)))
    grid(axes, "x")
    for edge in range(1, len(categories)):
        axes.axhline(edge - 0.5, color="#eeeeee", linewidth=0.6)
    scale(axes, shown, "x")
    if numbers:
        low, high = axes.get_xlim()
        axes.set_xlim(low, high + 0.12 * (high - low))


def grid(axes: Axes, along: str = "both") -> None:
    """Grid and frame."""
    axes.grid(color="#dddddd", linewidth=0.6, axis=along)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def scale(axes: Axes, shown: Column, along: str) -> None:
    """The limits of an axis with this column, as the column says."""
    low, high = axes.get_ylim() if along == "y" else axes.get_xlim()
    if shown.limits:
        low, high = shown.limits
    elif shown.span:
        middle, half = (low + high) / 2, max(shown.span * 1.05, high - low) / 2
        low, high = middle - half, middle + half
    elif shown.from_zero:
        low = 0.0
    (axes.set_ylim if along == "y" else axes.set_xlim)(low, high)


def handle(style: Style, label: str, *, joined: bool = True) -> Line2D:
    """Of a series, for a legend."""
    color, dash, marker = style
    shown = Line2D([], [], color=color, marker=marker, markersize=5, linewidth=1.6, label=label)
    shown.set_markeredgewidth(0.0)
    if not joined:
        shown.set_linestyle("none")
    elif dash:
        shown.set_dashes(dash)
    return shown


def hollow(
    xs: Sequence[float] = (), ys: Sequence[float] = (), color: str = DARK, marker: str = "o",
    size: float = 6.0,
) -> Line2D:  # fmt: skip
    """Published values; without any, their handle for a legend."""
    return Line2D(
        xs, ys, linestyle="none", marker=marker, markersize=size, markerfacecolor="none",
        markeredgewidth=1.1, markeredgecolor=color, label="published",
    )  # fmt: skip

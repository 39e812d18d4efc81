"""Draws experiments with autoregressive models: capacities, and what clients see over the load.

Bars and lines are means over seeds, whiskers and bands their range. Hollow markers are published
values (single runs).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import readings
import token_tables
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from readings import Rows
from styles import styles

PANELS = {  # column: label, factor
    "goodput_tokens_per_s": ("goodput (tokens/s)", 1.0),
    "tbt_p99_s": ("TBT, 99th percentile (ms)", 1e3),
    "ttft_p99_s": ("TTFT, 99th percentile (s)", 1.0),
    "e2e_mean_s": ("E2E, mean (s)", 1.0),
    "exposed_transfer_mean_s": ("exposed transfer, mean (ms)", 1e3),
}
OVER_RATE = ("goodput_tokens_per_s", "tbt_p99_s", "ttft_p99_s")
WIDE = 12.5


def picture(name: str, result: Mapping[str, Any]) -> Figure:
    """Capacities, if they were searched, above runs over the rate, or by system at one rate."""
    rows = result["rows"]
    searched, runs = (readings.select(rows, kind=kind) for kind in ("capacity", "run"))
    compared = len(readings.systems(searched)) > 1
    workloads = list(dict.fromkeys(row["workload"] for row in runs))
    order = list(dict.fromkeys(row["system"] for row in rows))
    by_system = styles(order)
    if runs and len(readings.swept(runs, "rate_per_s")) == 1:
        return at_one_rate(name, result, by_system)
    lines = compared + len(workloads)
    figure = pyplot.figure(figsize=(WIDE, 1.1 + 3.3 * lines), layout="constrained")
    grid = figure.add_gridspec(lines, len(OVER_RATE))
    if compared:
        bars(figure.add_subplot(grid[0, :]), searched, by_system, name)
    for line, workload in enumerate(workloads, int(compared)):
        own = readings.select(runs, workload=workload)
        for column, metric in enumerate(OVER_RATE):
            axes = figure.add_subplot(grid[line, column])
            over_rate(axes, own, metric, by_system)
            if metric == "tbt_p99_s":
                target(axes, result)
            if len(workloads) > 1:
                axes.set_title(workload, fontsize=10)
    figure.suptitle(title(name, result))
    handles = [
        Line2D([], [], color=color, marker=marker, markersize=5, label=system)
        for system, (color, marker) in by_system.items()
    ]
    if name == "hybrid" and compared:
        handles.append(published_handle())
    columns = len(handles) if len(handles) <= 5 else 4
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
    return figure


def title(name: str, result: Mapping[str, Any]) -> str:
    """Who ran on what, and that it is simulated."""
    config, seeds = result["config"], len(result["seeds"])
    models, tbt_s = ", ".join(config["models"]), config["tbt_s"]
    limit = f"{1e3 * tbt_s:g} ms" if tbt_s < 60.0 else "no limit"
    return (
        f"{name}: {models}, {config['instances']} instances on {config['hardware']}, "
        f"{limit} between tokens (simulated, {seeds} seed{'s' if seeds > 1 else ''})"
    )


def tidy(axes: Axes, along: str = "both") -> None:
    """Grid and frame."""
    axes.grid(color="#dddddd", linewidth=0.6, axis=along)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def target(axes: Axes, result: Mapping[str, Any]) -> None:
    """The target between two tokens."""
    ms = 1e3 * result["config"]["tbt_s"]
    axes.axhline(ms, color="#444444", linewidth=0.9, linestyle=(0, (4, 3)))
    axes.set_ylim(0, max(axes.get_ylim()[1], 1.08 * ms))


def bars(axes: Axes, rows: Rows, by_system: Mapping[str, tuple[str, str]], name: str) -> None:
    """Capacity per workload and system; published ones of the hybrid load."""
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    systems = readings.systems(rows)
    width = 0.8 / len(systems)
    fact = next(f for f in token_tables.facts()["rows"] if f["row"] == 5)
    names = (*token_tables.BASELINES, token_tables.OURS)
    published = dict(zip(names, map(float, fact["published"]), strict=True))
    for i, system in enumerate(systems):
        for at, workload in enumerate(workloads):
            own = readings.select(rows, system=system, workload=workload)
            spread = readings.spread(own, "capacity_per_s")
            if spread is None:
                continue
            x = at + (i - (len(systems) - 1) / 2) * width
            off = [[spread.mean - spread.low], [spread.high - spread.mean]]
            axes.bar(x, spread.mean, 0.92 * width, color=by_system[system][0])
            axes.errorbar(x, spread.mean, off, color="#222222", linewidth=1.0, capsize=2.5)
            text = {"ha": "center", "va": "bottom", "fontsize": 8, "color": "white"}
            axes.annotate(f"{spread.mean:.2f}", (x, 0), (0, 3), textcoords="offset points", **text)
            if name == "hybrid" and system in published:
                draw_published(axes, x, published[system])
    axes.set_xticks(range(len(workloads)), workloads)
    if len(workloads) == 1:  # no bars as wide as the picture
        axes.set_xlim(-1.0, 1.0)
    axes.set_ylabel("capacity (requests/s)")
    axes.margins(y=0.12)
    tidy(axes, "y")


def draw_published(axes: Axes, x: float, y: float) -> None:
    """A hollow marker."""
    axes.plot([x], [y], "o", markersize=7, markerfacecolor="white", markeredgecolor="#222222")


def published_handle() -> Line2D:
    """What hollow markers are, for a legend."""
    style = {"markerfacecolor": "white", "markeredgecolor": "#222222", "linestyle": "none"}
    return Line2D([], [], marker="o", markersize=7, label="published (single runs)", **style)


def over_rate(
    axes: Axes, rows: Rows, metric: str, by_system: Mapping[str, tuple[str, str]]
) -> None:
    """A column over the rate, a line per system. First tokens on a logarithmic scale."""
    text, factor = PANELS[metric]
    for system, (color, marker) in by_system.items():
        own = readings.select(rows, system=system)
        found = [
            (x, spread)
            for x in readings.swept(own, "rate_per_s")
            if (spread := readings.spread(readings.select(own, rate_per_s=x), metric))
        ]
        if not found:
            continue
        xs, spreads = zip(*found, strict=True)
        means = [factor * s.mean for s in spreads]
        axes.plot(xs, means, color=color, marker=marker, markersize=4.5, linewidth=1.8)
        lows, highs = ([factor * getattr(s, end) for s in spreads] for end in ("low", "high"))
        axes.fill_between(xs, lows, highs, color=color, alpha=0.16, linewidth=0)
    axes.set_xlabel("load (requests/s)")
    axes.set_ylabel(text)
    if metric == "ttft_p99_s":
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0)
    tidy(axes)


def at_one_rate(
    name: str, result: Mapping[str, Any], by_system: Mapping[str, tuple[str, str]]
) -> Figure:
    """Systems from top to bottom, a point and a whisker in each panel."""
    rows = readings.select(result["rows"], kind="run")
    metrics: Sequence[str] = ("goodput_tokens_per_s", "ttft_p99_s", "e2e_mean_s")
    if name == "ar-push":
        metrics = ("goodput_tokens_per_s", "tbt_p99_s", "exposed_transfer_mean_s")
    systems = list(by_system)
    figure, grid = pyplot.subplots(
        1, len(metrics), figsize=(WIDE, 1.3 + 0.33 * len(systems)), sharey=True,
        layout="constrained",
    )  # fmt: skip
    for axes, metric in zip(grid, metrics, strict=True):
        text, factor = PANELS[metric]
        high = 0.0
        for y, system in enumerate(systems):
            spread = readings.spread(readings.select(rows, system=system), metric)
            if spread is None:
                continue
            mean, high = factor * spread.mean, max(high, factor * spread.high)
            off = [[mean - factor * spread.low], [factor * spread.high - mean]]
            axes.errorbar(mean, y, xerr=off, fmt="o", color="#0072b2", capsize=3, markersize=5)
        axes.set_xlabel(text)
        axes.set_xlim(0.0, 1.08 * high or 1.0)
        tidy(axes)
    grid[0].set_yticks(range(len(systems)), systems)
    grid[0].invert_yaxis()
    workloads = ", ".join(result["config"]["workloads"])
    rate = rows[0]["rate_per_s"]
    figure.suptitle(f"{title(name, result)}\n{workloads} at {rate:g} requests/s", fontsize=11)
    return figure

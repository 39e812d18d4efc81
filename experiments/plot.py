"""Draws the results of experiments: one picture in the folder of each.

    python experiments/plot.py load-llada-gsm8k two-hours
    python experiments/plot.py --all
    python experiments/plot.py --all --results out/quick

Lines are means over seeds, bands their range. Hollow markers are published values (single runs).
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import readings
import token_plot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from readings import HERE, Rows, Study
from styles import STYLES, styles

matplotlib.use("Agg")
from matplotlib import pyplot

TARGET = 0.95
PUBLISHED_WINDOW_S = 300.0
PLANNED = "dilaserve-reconfigured"
"""The published system of the 2-hour run."""
AXES = {
    "rate_per_gpu_per_s": "load (requests/s per GPU)",
    "slo_multiple": "deadline (multiple of the unloaded latency)",
}
METRICS = {  # column: label, factor
    "attainment": ("SLO attainment (%)", 100.0),
    "accuracy": ("accuracy (%)", 100.0),
    "latency_mean_s": ("mean latency (s)", 1.0),
    "latency_p99_s": ("99th percentile of latency (s)", 1.0),
    "threshold_mean": ("mean confidence threshold", 1.0),
}
PANELS = {  # columns shown, where not attainment and accuracy
    "ablations": ("attainment", "latency_mean_s", "threshold_mean"),
    "own-policy": ("attainment", "accuracy", "threshold_mean"),
    "predictor": ("attainment", "accuracy", "threshold_mean"),
    "migration": ("latency_mean_s", "latency_p99_s"),
}
MODELS = {"llada-8b": "LLaDA-8B", "dream-7b": "Dream-7B", "bundled": "bundled model"}
DATASETS = {"gsm8k": "GSM8K", "mmlu-pro": "MMLU-Pro", "mbpp": "MBPP", "sharegpt": "ShareGPT"}


def title(result: Mapping[str, Any], what: str) -> str:
    """Who ran on what, and that it is simulated."""
    row = result["rows"][0]
    names = [MODELS.get(row["model"], row["model"]), DATASETS.get(row["dataset"], "")]
    seeds = len(result["seeds"])
    real = row["accuracy_kind"] == "measured"
    run = "time simulated, accuracy measured" if real else "simulated"
    run += f", {seeds} seed{'s' if seeds > 1 else ''}"
    return f"{what}: {', '.join(filter(None, names))}, {row['gpus']} GPUs ({run})"


def label(metric: str, rows: Rows) -> str:
    """Of an axis; accuracy says whether it is measured or a proxy."""
    text = METRICS[metric][0]
    kind = rows[0]["accuracy_kind"]
    if metric != "accuracy":
        return text
    return text.replace("accuracy", "accuracy proxy" if kind == "proxy" else f"{kind} accuracy")


def draw_lines(
    axes: Axes,
    rows: Rows,
    x_name: str,
    metric: str,
    studies: list[Study],
    by_system: Mapping[str, tuple[str, str]] | None = None,
) -> None:
    """A column over a swept setting, a line per system, with the published values."""
    factor = METRICS[metric][1]
    for name, (color, marker) in (by_system or styles(readings.systems(rows))).items():
        own = readings.select(rows, system=name)
        found = {
            x: values
            for x in readings.swept(own, x_name)
            if (values := readings.spread(readings.select(own, **{x_name: x}), metric))
        }
        xs = list(found)
        means = [factor * values.mean for values in found.values()]
        lows = [factor * values.low for values in found.values()]
        highs = [factor * values.high for values in found.values()]
        axes.plot(xs, means, color=color, marker=marker, markersize=4.5, linewidth=1.8)
        axes.fill_between(xs, lows, highs, color=color, alpha=0.16, linewidth=0)
        for study in studies:
            points = [(x, study.value(name, metric, x)) for x in study.xs]
            known = [(x, factor * value) for x, value in points if value is not None]
            draw_published(axes, known, color, marker)
    axes.set_xlabel(AXES[x_name])
    axes.set_ylabel(label(metric, rows))
    if x_name == "slo_multiple":
        axes.invert_xaxis()
    tidy(axes, metric)


def draw_published(axes: Axes, points: list[tuple[float, float]], color: str, marker: str) -> None:
    """Hollow markers."""
    axes.plot(
        [x for x, _ in points],
        [y for _, y in points],
        linestyle="none",
        marker=marker,
        markersize=7,
        markerfacecolor="none",
        markeredgecolor=color,
        markeredgewidth=1.3,
    )


def tidy(axes: Axes, metric: str) -> None:
    """Grid, and a range in which noise does not look like an effect."""
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if metric == "attainment":
        axes.set_ylim(-3, 103)
    if metric == "accuracy":
        low, high = axes.get_ylim()
        middle, half = (low + high) / 2, max(4.0, (high - low) / 2)
        axes.set_ylim(middle - half, middle + half)
    if metric == "threshold_mean":
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, 0.68), max(high, 0.92))


def legend(
    figure: Figure, systems: list[str], with_published: bool, notes: Mapping[str, str] | None = None
) -> None:
    """One for all panels, below them; ``notes``: what else to say of a system."""
    notes = notes or {}
    handles = [
        Line2D([], [], color=color, marker=marker, markersize=5, label=name + notes.get(name, ""))
        for name, (color, marker) in styles(systems).items()
    ]
    if with_published:
        handles.append(published_handle())
    columns = 3 if notes else len(handles) if len(handles) <= 5 else 4
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)


def published_handle() -> Line2D:
    """What hollow markers are, for a legend."""
    return Line2D(
        [],
        [],
        linestyle="none",
        marker="o",
        markersize=7,
        markerfacecolor="none",
        markeredgecolor="#444444",
        label="published (single runs)",
    )


def compared(name: str, x_name: str) -> list[Study]:
    """The published sweeps that an experiment repeats over this setting."""
    return [s for s in readings.studies() if s.experiment == name and s.x_name == x_name]


def sweep(name: str, result: Mapping[str, Any], folder: Path) -> Figure:
    """Columns over rate or SLO; a row of panels per SLO or rate if both are swept."""
    rows = result["rows"]
    rates, slos = (readings.swept(rows, key) for key in readings.SWEPT)
    x_name, other = readings.SWEPT if len(rates) >= len(slos) else readings.SWEPT[::-1]
    shown = PANELS.get(name, ("attainment", "accuracy"))
    shown = tuple(metric for metric in shown if any(r[metric] is not None for r in rows))
    others = readings.swept(rows, other)
    size = (10.5 if len(shown) < 3 else 12.5, 0.9 + 3.3 * len(others))
    figure, grid = pyplot.subplots(
        len(others), len(shown), figsize=size, squeeze=False, layout="constrained"
    )
    studies = compared(name, x_name)
    for line, value in zip(grid, others, strict=True):
        own = readings.select(rows, **{other: value})
        fitting = [s for s in studies if readings.same(s.fixed.get(other, value), value)]
        for axes, metric in zip(line, shown, strict=True):
            draw_lines(axes, own, x_name, metric, fitting)
            if len(others) > 1:
                axes.set_title(f"{AXES[other].split(' (')[0]} {value:g}", fontsize=10)
    what = {"load": "Load sweep", "slo": "Deadline sweep"}.get(name.split("-")[0])
    figure.suptitle(title(result, what or name.replace("-", " ").capitalize()))
    legend(figure, readings.systems(rows), bool(studies))
    return figure


def headline(name: str, result: Mapping[str, Any], folder: Path) -> Figure:
    """Attainment over a wide range of load, with the load that each system carries at 95 %."""
    rows = result["rows"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10.5, 4.6), layout="constrained")
    same_set = f"load-{rows[0]['model'].split('-')[0]}-{rows[0]['dataset']}"
    studies = compared(same_set, "rate_per_gpu_per_s")
    draw_lines(left, rows, "rate_per_gpu_per_s", "attainment", studies)
    draw_lines(right, rows, "rate_per_gpu_per_s", "accuracy", studies)
    left.axhline(100 * TARGET, color="#444444", linewidth=0.9, linestyle=(0, (4, 3)))
    notes = {}
    order = readings.systems(rows)
    for system, (color, _) in styles(order).items():
        found = readings.capacities(rows, system, TARGET).values()
        known = [capacity for capacity in found if capacity]
        if not known or len(known) < len(found):
            continue
        rate = sum(capacity.rate for capacity in known) / len(known)
        left.axvline(rate, color=color, linewidth=1.0, linestyle=":")
        bound = "" if all(capacity.exact for capacity in known) else "at least "
        notes[system] = f": 95 % up to {bound}{rate:.2f}"
    figure.suptitle(title(result, "Load at 95 % attainment"))
    legend(figure, order, bool(studies), notes)
    return figure


def two_hours(name: str, result: Mapping[str, Any], folder: Path) -> Figure:
    """Load, attainment, threshold, active requests and layout over time."""
    lines = result["timelines"]
    order = list(dict.fromkeys(line["system"] for line in lines))
    truth = readings.published()["two_hours_timeline"]
    panels: list[tuple[str, str, float]] = [
        ("attainment", "SLO attainment (%)", 100.0),
        ("threshold_mean", "mean threshold", 1.0),
        ("active_mean", "active requests", 1.0),
    ]
    figure, grid = pyplot.subplots(
        5, 1, figsize=(10.5, 12), sharex=True, layout="constrained",
        height_ratios=(0.7, 1.3, 1, 1, 1),
    )  # fmt: skip
    draw_arrivals(grid[0], lines)
    names = {"active_mean": "active"}
    whole = result["config"]["window_s"] == PUBLISHED_WINDOW_S
    for axes, (column, text, factor) in zip(grid[1:4], panels, strict=True):
        for system, (color, marker) in styles(order).items():
            draw_over_time(axes, lines, system, column, factor, color)
            shared = truth[names.get(column, column)]
            values = shared.get(system) if isinstance(shared, dict) else shared
            if whole and values and (isinstance(shared, dict) or system == PLANNED):
                points = [(3.0 * i, factor * v) for i, v in enumerate(values[:40])]
                draw_published(axes, [(x + 1.5, y) for x, y in points], color, marker)
        axes.set_ylabel(text)
        tidy(axes, column)
    grid[3].set_yscale("symlog", linthresh=10)
    grid[3].set_ylim(bottom=0)
    draw_layouts(grid[4], lines, order)
    if whole:
        draw_published_layout(grid[4])
    grid[4].set_xlabel("time (minutes)")
    grid[0].set_xlim(0, 24 * result["config"]["window_s"] / 60)
    figure.suptitle(
        title(result, "Two hours of bursts" if whole else "The 2-hour curve, shortened")
    )
    legend(figure, order, with_published=whole)
    return figure


def minutes(line: Mapping[str, Any]) -> list[float]:
    """Middles of the buckets."""
    starts = [bucket["start_s"] for bucket in line["buckets"]]
    half = (starts[1] - starts[0]) / 2 if len(starts) > 1 else 0.0
    return [(start + half) / 60 for start in starts]


def draw_arrivals(axes: Axes, lines: Rows) -> None:
    """Requests per second of the first run; the others get the same from their seeds."""
    buckets = lines[0]["buckets"]
    length_s = buckets[1]["start_s"] - buckets[0]["start_s"]
    rates = [bucket["arrivals"] / length_s for bucket in buckets]
    edges = [i * length_s / 60 for i in range(len(rates) + 1)]
    axes.stairs(rates, edges, fill=True, color="#bbbbbb")
    axes.set_ylabel("arrivals\n(requests/s)")
    tidy(axes, "")


def draw_over_time(
    axes: Axes, lines: Rows, system: str, column: str, factor: float, color: str
) -> None:
    """The mean over seeds, and their range."""
    found: dict[float, list[float]] = {}
    for line in readings.select(lines, system=system):
        for minute, bucket in zip(minutes(line), line["buckets"], strict=True):
            if bucket[column] is not None:
                found.setdefault(minute, []).append(factor * bucket[column])
    xs = sorted(found)
    axes.plot(xs, [sum(found[x]) / len(found[x]) for x in xs], color=color, linewidth=1.8)
    lows, highs = [min(found[x]) for x in xs], [max(found[x]) for x in xs]
    axes.fill_between(xs, lows, highs, color=color, alpha=0.16, linewidth=0)


def draw_layouts(axes: Axes, lines: Rows, order: list[str]) -> None:
    """Share of the GPUs in instances of more than TP 1, first seed of each system."""
    for system, (color, _) in styles(order).items():
        line = readings.select(lines, system=system)[0]
        shares = []
        for bucket in line["buckets"]:
            gpus = {int(tp): int(tp) * n for tp, n in bucket["instances"].items()}
            total = sum(gpus.values())
            shares.append(100 * (1 - gpus.get(1, 0) / total) if total else 0.0)
        axes.step(minutes(line), shares, where="mid", color=color, linewidth=1.8)
    axes.set_ylabel("GPUs in instances\nwith TP > 1 (%)")
    axes.set_ylim(-3, 103)
    tidy(axes, "")


def draw_published_layout(axes: Axes) -> None:
    """The same share, of the published run."""
    changes = readings.published()["two_hours_timeline"]["shares_above_tp1"]
    axes.step(
        [*(minute for minute, _ in changes), 120],
        [*(100 * share for _, share in changes), 0],
        where="post",
        color=STYLES[PLANNED][0],
        linewidth=1.2,
        linestyle=(0, (4, 3)),
    )
    axes.text(119, 92, f"dashed: published ({PLANNED})", ha="right", fontsize=9, color="#444444")


def layouts(name: str, result: Mapping[str, Any], folder: Path) -> Figure:
    """Mean latency over load of two layouts of the same GPUs, each an experiment of its own."""
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    handles = []
    for other, text, style in LAYOUTS:
        own = readings.results(other, folder)
        if own is None:
            continue
        color, marker = style
        study = next(s for s in readings.studies() if s.experiment == other)
        rows = [{**row, "system": text} for row in own["rows"]]
        draw_lines(axes, rows, study.x_name, "latency_mean_s", [], {text: style})
        values = study.series["infaas"]["latency_mean_s"]
        draw_published(axes, list(zip(study.xs, values, strict=True)), color, marker)
        handles.append(Line2D([], [], color=color, marker=marker, label=text))
    axes.set_ylim(bottom=0)
    figure.suptitle(title(result, "Layouts without a cache"))
    handles.append(published_handle())
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    return figure


LAYOUTS = (
    ("tp-tradeoff-tp1", "8 x TP1", ("#0072b2", "o")),
    ("tp-tradeoff-tp4", "2 x TP4", ("#e69f00", "P")),
)
DRAWINGS: dict[str, Callable[[str, Mapping[str, Any], Path], Figure]] = {
    "headline": headline,
    "two-hours": two_hours,
    "tp-tradeoff-tp1": layouts,
}


def main() -> None:
    """Draw the experiments named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--all", action="store_true", help="every experiment with results")
    parser.add_argument("--results", type=Path, default=HERE, help="folder of the results")
    args = parser.parse_args()
    found = sorted(path.parent.name for path in args.results.glob("*/results.json"))
    found = [name for name in found if name != LAYOUTS[1][0]]  # drawn with the other one
    for name in found if args.all else args.names:
        result = readings.results(name, args.results)
        if result is None:
            parser.error(f"{args.results / name} has no results.json")
        if result["config"].get("family") == "autoregressive":
            figure = token_plot.picture(name, result)
        else:
            figure = DRAWINGS.get(name, sweep)(name, result, args.results)
        path = args.results / name / f"{name}.png"
        figure.savefig(path, dpi=110)
        pyplot.close(figure)
        print(path)


if __name__ == "__main__":
    main()

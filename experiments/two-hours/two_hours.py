"""The 2-hour run over time: load, attainment, thresholds, active requests and layouts."""

from collections.abc import Sequence

from lib import panels
from lib.columns import COLUMNS, Column
from lib.figures import Frame, Plan
from lib.published import content
from lib.results import Results, Rows, Spread
from lib.styles import Style, styles
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PLANNED = "dilaserve-reconfigured"
"""The published system, whose thresholds, active requests and layouts over time are known."""
WINDOWS = 24
PANELS = {"attainment": "attainment", "threshold_mean": "threshold_mean", "active_mean": "active"}
"""Column of a bucket: its name in the published timeline."""
ACTIVE = Column("active requests")


def timeline(plan: Plan, results: Sequence[Results]) -> Figure:
    """One panel below the other, from minute 0 to the end of the last window."""
    (result,) = results
    lines = Rows(result.timelines)
    by_system = styles(lines.distinct("system"))
    bucket_s = lines.all[0]["buckets"][1]["start_s"] - lines.all[0]["buckets"][0]["start_s"]
    whole = bucket_s == content()["two_hours_timeline"]["bucket_s"] and not result.quick
    frame = Frame(plan, (7.6, 9.4), by_system)
    grid = frame.figure.subplots(5, 1, sharex=True, height_ratios=(0.7, 1.4, 1, 1, 0.9))
    arrivals(grid[0], lines, bucket_s)
    for axes, (column, name) in zip(grid[1:4], PANELS.items(), strict=True):
        for system, style in by_system.items():
            over_time(axes, lines.where(system=system), column, bucket_s, style)
        if whole:
            published(axes, column, name, by_system)
        panels.grid(axes)
        shown = COLUMNS.get(column, ACTIVE)
        axes.set_ylabel(shown.label)
        panels.scale(axes, shown, "y")
    grid[3].set_yscale("symlog", linthresh=10)
    grid[3].set_ylim(bottom=0)
    layouts(grid[4], lines, by_system, bucket_s)
    if whole:
        published_layout(grid[4], by_system[PLANNED])
    grid[4].set_xlabel("time (minutes)")
    last = max(b["start_s"] for line in lines for b in line["buckets"] if b["arrivals"])
    grid[0].set_xlim(0, (last + bucket_s) / 60)
    length = f"arriving in {WINDOWS} windows over {(last + bucket_s) / 60:.0f} minutes"
    return frame.finished(result.rows, hollow=whole, length=length)


def arrivals(axes: Axes, lines: Rows, bucket_s: float) -> None:
    """Requests per second of the first run; the others get the same from their seeds."""
    rates = [bucket["arrivals"] / bucket_s for bucket in lines.all[0]["buckets"]]
    edges = [i * bucket_s / 60 for i in range(len(rates) + 1)]
    axes.stairs(rates, edges, fill=True, color="#bbbbbb")
    axes.set_ylabel("arrivals\n(requests/s)")
    panels.grid(axes)


def over_time(axes: Axes, lines: Rows, column: str, bucket_s: float, style: Style) -> None:
    """The mean over seeds in the middle of each bucket, and their range."""
    found: dict[float, list[float]] = {}
    for line in lines:
        for bucket in line["buckets"]:
            if bucket[column] is not None:
                minute = (bucket["start_s"] + bucket_s / 2) / 60
                found.setdefault(minute, []).append(bucket[column])
    spreads = {minute: Spread(tuple(values)) for minute, values in found.items()}
    factor = COLUMNS.get(column, ACTIVE).factor
    panels.line(axes, sorted(spreads), spreads, style._replace(marker=""), factor)


def published(axes: Axes, column: str, name: str, by_system: dict[str, Style]) -> None:
    """Hollow markers in the middle of each bucket; but for attainment of one system only."""
    shared = content()["two_hours_timeline"][name]
    for system, values in (shared if isinstance(shared, dict) else {PLANNED: shared}).items():
        factor, style = COLUMNS.get(column, ACTIVE).factor, by_system[system]
        xs = [3.0 * i + 1.5 for i in range(len(values) - 1)]  # the last one is the tail
        ys = [factor * value for value in values[:-1]]
        axes.add_line(panels.hollow(xs, ys, style.color, style.marker, 5.0))


def layouts(axes: Axes, lines: Rows, by_system: dict[str, Style], bucket_s: float) -> None:
    """Share of the GPUs in instances of more than TP 1, first seed of each system."""
    for system, (color, dash, _) in by_system.items():
        buckets = lines.where(system=system).all[0]["buckets"]
        shares = []
        for bucket in buckets:
            gpus = {int(tp): int(tp) * n for tp, n in bucket["instances"].items()}
            total = sum(gpus.values())
            shares.append(100 * (1 - gpus.get(1, 0) / total) if total else 0.0)
        minutes = [(bucket["start_s"] + bucket_s / 2) / 60 for bucket in buckets]
        axes.step(
            minutes, shares, where="mid", color=color, dashes=dash or (None, None), linewidth=1.6
        )
    axes.set_ylabel("GPUs in instances\nwith TP > 1 (%)")
    axes.set_ylim(-3, 103)
    panels.grid(axes)


def published_layout(axes: Axes, style: Style) -> None:
    """The same share, of the published run."""
    changes = content()["two_hours_timeline"]["shares_above_tp1"]
    minutes, shares = zip(*changes, strict=True)
    axes.step(
        [*minutes, 120], [*(100 * share for share in shares), 0], where="post",
        color=style.color, linewidth=1.2, linestyle=(0, (1, 1)),
    )  # fmt: skip
    axes.text(118, 90, f"dotted: published ({PLANNED})", ha="right", fontsize=8, color=panels.DARK)

"""What runs of autoregressive models came to: a table of each experiment's results, over seeds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import readings
from cells import DASH, Lines, ranged, table
from readings import Rows

COLUMNS = {  # column: heading, factor, format
    "capacity_per_s": ("capacity, requests/s", 1.0, "{:.2f}"),
    "attainment": ("TBT met, %", 100.0, "{:.2f}"),
    "tbt_p99_s": ("TBT p99, ms", 1e3, "{:.0f}"),
    "goodput_tokens_per_s": ("goodput, tokens/s", 1.0, "{:.0f}"),
    "ttft_p50_s": ("TTFT p50, s", 1.0, "{:.2f}"),
    "ttft_p99_s": ("TTFT p99, s", 1.0, "{:.2f}"),
    "served_share": ("served, %", 100.0, "{:.1f}"),
    "e2e_mean_s": ("E2E, s", 1.0, "{:.2f}"),
    "exposed_transfer_mean_s": ("exposed transfer, ms", 1e3, "{:.2f}"),
}


def results_table(rows: Rows) -> Lines:
    """Rows of one kind, over seeds: a line per workload, rate (where given) and system."""
    searched = rows[0]["kind"] == "capacity"
    columns = [c for c in COLUMNS if any(row.get(c) is not None for row in rows)]
    head = ["workload", *([] if searched else ["rate, 1/s"]), "system"]
    head += [*(COLUMNS[c][0] for c in columns), "MFU, %", "cut below/at/above the prompt's end, %"]
    names = ("workload", "system") if searched else ("workload", "rate_per_s", "system")
    body = []
    for key in dict.fromkeys(tuple(row[name] for name in names) for row in rows):
        own = readings.select(rows, **dict(zip(names, key, strict=True)))
        tuned = sorted({row["tuned"] for row in own} - {None})
        named = [*(f"{value:g}" if isinstance(value, float) else value for value in key)]
        named[-1] += f" ({', '.join(tuned)})" if tuned else ""
        cells = [ranged(readings.spread(own, c), *reversed(COLUMNS[c][1:])) for c in columns]
        body.append([*named, *cells, _means(own, "mfu"), _means(own, "splits")])
    return table(head, body)


def _means(rows: Rows, metric: str) -> str:
    """Of columns with several values: instances, or where requests were cut."""
    found = [row[metric] for row in rows if metric in row]
    if metric == "splits":
        found = [[cuts["below"], cuts["at"], cuts["above"]] for cuts in found]
    means = [100.0 * sum(column) / len(found) for column in zip(*found, strict=True)]
    return "/".join(f"{mean:.0f}" for mean in means) or DASH


def causal(folder: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """Experiments with autoregressive models that have results, by name."""
    names = sorted(path.parent.name for path in folder.glob("*/results.json"))
    found = [(name, readings.results(name, folder)) for name in names]
    return [(n, r) for n, r in found if r and r["config"].get("family") == "autoregressive"]

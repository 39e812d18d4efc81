"""``stepserve simulate`` of experiments with autoregressive models."""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from stepserve.core.errors import FieldError
from stepserve.sim.results import Row, save
from stepserve.sim.token_config import TokenExperiment, from_tables
from stepserve.sim.token_run import run_experiment
from stepserve.sim.token_systems import TOKEN_SYSTEMS, candidates

TABLE_WIDTH = 190

COLUMNS = {  # of a row: heading, factor, format
    "kind": ("", 1, ""),
    "workload": ("", 1, ""),
    "system": ("", 1, ""),
    "tuned": ("", 1, ""),
    "seed": ("", 1, ""),
    "rate_per_s": ("rate/s", 1, "{:.2f}"),
    "attainment": ("TBT met", 1, "{:.2%}"),
    "tbt_p99_s": ("TBT p99 ms", 1e3, "{:.0f}"),
    "goodput_tokens_per_s": ("good tok/s", 1, "{:.0f}"),
    "served_share": ("served", 1, "{:.1%}"),
    "ttft_p50_s": ("TTFT p50 s", 1, "{:.2f}"),
    "ttft_p99_s": ("TTFT p99 s", 1, "{:.2f}"),
    "queue_growth": ("queue growth", 1, ""),
    "mfu": ("MFU %", 1e2, "{:.0f}"),
}
"""A system may meet every gap by starving prefills: so first tokens are always beside gaps."""


def run(
    args: argparse.Namespace, table: Mapping[str, Any], command: str, commit: str | None
) -> int:
    """Run the experiment and write what came of it."""
    for name in ("log_steps", "events"):
        if getattr(args, name) is not None:
            raise FieldError(f"--{name.replace('_', '-')}", "not kept of autoregressive models")
    experiment = from_tables(table, TOKEN_SYSTEMS, candidates)
    if args.seed:
        setting = replace(experiment.setting, seeds=tuple(args.seed))
        experiment = replace(experiment, setting=setting)
    args.out.mkdir(parents=True, exist_ok=True)
    console = Console(width=max(TABLE_WIDTH, Console().width))

    def done(rows: Sequence[Row]) -> None:
        for row in rows:
            cells = (f"{COLUMNS[n][0]} {_cell(row, n)}".strip() for n in COLUMNS if n in row)
            console.print("  ".join(cells), highlight=False)

    rows, timings = run_experiment(experiment, args.jobs, time.perf_counter, done)
    console.print(_table(rows))
    save(args.out / "results.json", _results(experiment, command, commit, rows))
    save(args.out / "timing.json", {"rows": timings})
    return 0


def _results(
    experiment: TokenExperiment, command: str, commit: str | None, rows: Sequence[Row]
) -> Row:
    """The content of ``results.json``: nothing in it depends on the machine."""
    return {
        "command": command,
        "commit": commit,
        "config": experiment.as_table(),
        "seeds": list(experiment.setting.seeds),
        "rows": rows,
    }


def _cell(row: Row, name: str) -> str:
    value = row.get(name)
    _, factor, form = COLUMNS[name]
    if value is None:
        return "-"
    if isinstance(value, list):
        return "/".join(form.format(factor * item) for item in value)
    return form.format(factor * value) if form else str(value)


def _table(rows: Sequence[Row]) -> Table:
    table = Table()
    for name, (heading, _, form) in COLUMNS.items():
        table.add_column(heading or name, justify="right" if form else "left")
    for row in rows:
        table.add_row(*(_cell(row, name) for name in COLUMNS))
    return table

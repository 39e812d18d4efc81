"""``stepserve simulate``: run an experiment on a simulated cluster, with the real schedulers."""

import argparse
import contextlib
import functools
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from stepserve.cli.options import merged
from stepserve.core.actions import Action
from stepserve.core.errors import FieldError
from stepserve.core.events import Event
from stepserve.core.instance import InstanceSpec
from stepserve.cost.boosted_steps import StepModel
from stepserve.live.event_log import EventLog
from stepserve.live.recording import Handled
from stepserve.sim.config import Setting
from stepserve.sim.diffusion import MakeLoad, make_load, train_predictor
from stepserve.sim.experiment import Experiment, changed, read_experiments, read_table
from stepserve.sim.instance import OnHandled
from stepserve.sim.results import Row, make_folders, save
from stepserve.sim.run import SIMULATIONS, Runner, results, run_experiments, timings
from stepserve.sim.simulation import Simulation

TABLE_WIDTH = 190
"""Narrower terminals wrap: better than columns cut until they cannot be told apart."""

COLUMNS = {  # of a row: heading, factor, format; those that are null everywhere are left out
    "kind": ("", 1, ""),
    "workload": ("", 1, ""),
    "swept": ("", 1, ""),
    "system": ("", 1, ""),
    "tuned": ("", 1, ""),
    "seed": ("", 1, ""),
    "rate_per_s": ("rate/s", 1, "{:.4g}"),
    "slo_multiple": ("SLO x", 1, "{:g}"),
    "attainment": ("attained", 1, "{:.1%}"),
    "tbt_attainment": ("TBT met", 1, "{:.2%}"),
    "tbt_p99_s": ("TBT p99 ms", 1e3, "{:.0f}"),
    "goodput_tokens_per_s": ("good tok/s", 1, "{:.0f}"),
    "served_share": ("served", 1, "{:.1%}"),
    "ttft_p50_s": ("TTFT p50 s", 1, "{:.2f}"),
    "ttft_p99_s": ("TTFT p99 s", 1, "{:.2f}"),
    "accuracy": ("accuracy", 1, "{:.1%}"),
    "accuracy_weighted": ("weighted", 1, "{:.1%}"),
    "latency_mean_s": ("mean s", 1, "{:.2f}"),
    "latency_p99_s": ("p99 s", 1, "{:.2f}"),
    "threshold_mean": ("threshold", 1, "{:.3f}"),
    "migrations": ("moved", 1, ""),
    "rejected": ("rejected", 1, ""),
    "queue_growth": ("queue growth", 1, ""),
    "mfu": ("MFU %", 1e2, "{:.0f}"),
}
"""A system may meet every gap by starving prefills: so first tokens are always beside gaps."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the ``simulate`` parser."""
    parser = subparsers.add_parser(
        "simulate", help="run an experiment on a simulated cluster, with the real schedulers"
    )
    parser.add_argument("config", type=Path, nargs="?", metavar="CONFIG", help="experiment in TOML")
    parser.add_argument(
        "--from",
        dest="recorded",
        type=Path,
        metavar="LOG",
        help="an event log of `serve --events`: simulate that run, and what CONFIG changes of it",
    )
    parser.add_argument(
        "--set",
        dest="changes",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a dotted key of the experiment; may be given again",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json")
    parser.add_argument("--quick", action="store_true", help="apply the [quick] table")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--seed", type=int, nargs="+", help="seeds in place of the config's")
    parser.add_argument(
        "--log-steps", type=Path, metavar="FOLDER", help="keep a step log of every run"
    )
    parser.add_argument(
        "--events", type=Path, metavar="FOLDER", help="keep an event log of every run"
    )


def run(args: argparse.Namespace) -> int:
    """Run all of the experiment and write what came of it."""
    experiments, table = _read(args)
    for experiment in experiments:
        SIMULATIONS[experiment.family].check(experiment)
    make_folders(**{"out": args.out, "log-steps": args.log_steps, "events": args.events})
    runners = [_runner(experiment, args) for experiment in experiments]
    console = Console(width=max(TABLE_WIDTH, Console().width))
    commit = _commit()  # of the code that runs, not of what a long run ends beside

    def done(rows: Sequence[Row]) -> None:
        for row in rows:
            cells = (f"{COLUMNS[n][0]} {_cell(row, n)}".strip() for n in _shown([row]))
            console.print("  ".join(cells), highlight=False)

    outcomes = run_experiments(experiments, runners, args.jobs, done)
    rows = [outcome.row for outcome in outcomes]
    console.print(_table(rows))
    if any(row["classes"] for row in rows):
        console.print(_class_table([row for row in rows if row["classes"]]))
    save(args.out / "results.json", results(table, _command(args), commit, outcomes))
    save(args.out / "timing.json", timings(outcomes))
    return 0


def _read(args: argparse.Namespace) -> tuple[list[Experiment], Row]:
    """The experiments of all combinations of swept values, and the resolved table of them."""
    changes = [*args.changes, *([f"seeds={args.seed}"] if args.seed else [])]
    if args.recorded is not None:
        from stepserve.cli.recorded_run import recorded_table

        recording, table = recorded_table(args.recorded)
        if args.config is not None:
            table = merged(table, read_table(args.config, quick=args.quick, partial=True))
        table = changed(table, changes=changes)
    elif args.config is None:
        raise FieldError("config", "give an experiment, or --from and an event log")
    else:
        recording, table = None, read_table(args.config, quick=args.quick, changes=changes)
    experiments = read_experiments(table, recording)
    sweep = {"sweep": table["sweep"]} if "sweep" in table else {}
    return experiments, {**experiments[0].as_table(), **sweep}


def _runner(experiment: Experiment, args: argparse.Namespace) -> Runner:
    model: StepModel | None = None
    load: MakeLoad = make_load
    boosted = any(system.predictor.use == "boosted" for system in experiment.systems.values())
    setting, workload = experiment.setting, experiment.workload
    if setting.model == "bundled" and experiment.recording is None:
        from stepserve.cli import bundled_load

        load = bundled_load.make_load
        model = bundled_load.trained_predictor() if boosted else None
    elif boosted:
        plain = Setting(
            model=setting.model, cache_mode=setting.cache_mode, block_tokens=setting.block_tokens
        )
        model = train_predictor(plain, workload.name, workload.early_stop)
    return Runner(model, load, time.perf_counter, args.log_steps, args.events, _log_events)


@contextlib.contextmanager
def _log_events(path: Path, simulation: Simulation) -> Iterator[OnHandled]:
    """An event log of a run, as a server writes it."""
    with contextlib.closing(EventLog(path, simulation.setup())) as log:
        yield functools.partial(_note, log)


def _note(
    log: EventLog,
    spec: InstanceSpec | None,
    incarnation: int,
    now_s: float,
    event: Event,
    actions: list[Action],
) -> None:
    log.note(Handled(spec, incarnation, now_s, event, tuple(actions), seconds=0.0))


def _command(args: argparse.Namespace) -> str:
    """The command to repeat, without absolute paths: they mean nothing elsewhere."""
    words = ["stepserve simulate"]
    words += [_relative(args.config)] if args.config else []
    words += ["--from", _relative(args.recorded)] if args.recorded else []
    words += [word for change in args.changes for word in ("--set", change)]
    words += ["--quick"] if args.quick else []
    words += ["--seed", *map(str, args.seed)] if args.seed else []
    return " ".join(words)


def _relative(path: Path) -> str:
    return path.name if path.is_absolute() else path.as_posix()


def _commit() -> str | None:
    """The revision of the checkout that this package belongs to, ``-dirty`` if changed since."""
    call = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None  # no git, or an installed package


def _shown(rows: Sequence[Row]) -> list[str]:
    """The columns that say something."""
    return [name for name in COLUMNS if any(row[name] not in (None, {}) for row in rows)]


def _cell(row: Row, name: str) -> str:
    value = row[name]
    _, factor, form = COLUMNS[name]
    if value is None:
        return "-"
    if isinstance(value, dict):
        return " ".join(f"{key.rpartition('.')[2]}={item}" for key, item in value.items())
    if isinstance(value, list):
        return "/".join("-" if item is None else form.format(factor * item) for item in value)
    return form.format(factor * value) if form else str(value)


def _table(rows: Sequence[Row]) -> Table:
    names = _shown(rows)
    return _filled({n: COLUMNS[n] for n in names}, [[_cell(r, n) for n in names] for r in rows])


def _class_table(rows: Sequence[Row]) -> Table:
    """Per SLO class, attainment / accuracy; the accuracy of all is weighted."""
    names = ["system", "rate_per_s", "seed", "accuracy_weighted"]
    classes = list(rows[0]["classes"])

    def both(one: Row | None) -> str:
        return "-" if one is None else f"{_cell(one, 'attainment')} / {_cell(one, 'accuracy')}"

    cells = [
        [*(_cell(row, n) for n in names), *(both(row["classes"].get(n)) for n in classes)]
        for row in rows
    ]
    return _filled({n: COLUMNS[n] for n in names} | {n: (n, 1, "-") for n in classes}, cells)


def _filled(columns: dict[str, Any], rows: Sequence[Sequence[str]]) -> Table:
    table = Table()
    for name, (heading, _, form) in columns.items():
        table.add_column(heading or name, justify="right" if form else "left")
    for cells in rows:
        table.add_row(*cells)
    return table

"""``stepserve simulate``: run an experiment on a simulated cluster, with the real schedulers."""

import argparse
import contextlib
import functools
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from stepserve.cli import simulate_tokens
from stepserve.core.actions import Action
from stepserve.core.errors import FieldError
from stepserve.core.events import Event
from stepserve.core.instance import InstanceSpec
from stepserve.core.request import Family
from stepserve.cost.boosted_steps import StepModel
from stepserve.cost.step_log import StepLog
from stepserve.cost.step_table import StepProfiles
from stepserve.families.setup import SchedulerSetup
from stepserve.live.event_log import EventLog
from stepserve.live.recording import Handled
from stepserve.sim import traced
from stepserve.sim.config import Experiment, from_tables, read_table
from stepserve.sim.results import save
from stepserve.sim.run import (
    Load,
    Outcome,
    Point,
    points,
    results,
    run_point,
    run_points,
    timings,
)
from stepserve.sim.systems import SYSTEMS
from stepserve.sim.world import Learn

TABLE_WIDTH = 150
"""Narrower terminals wrap: better than columns cut until they cannot be told apart."""

COLUMNS = {
    "system": "",
    "rate_per_gpu_per_s": "{:g}",
    "slo_multiple": "{:g}",
    "seed": "",
    "attainment": "{:.1%}",
    "accuracy": "{:.1%}",
    "latency_mean_s": "{:.2f}",
    "latency_p99_s": "{:.2f}",
    "threshold_mean": "{:.3f}",
    "migrations": "",
    "rejected": "",
}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the ``simulate`` parser."""
    parser = subparsers.add_parser(
        "simulate", help="run an experiment on a simulated cluster, with the real schedulers"
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="experiment in TOML")
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
    """Run all points of the experiment and write what came of them."""
    table = read_table(args.config, quick=args.quick)
    if table.get("family") == Family.AUTOREGRESSIVE:
        return simulate_tokens.run(args, table, _command(args), _commit())
    experiment = from_tables(table, SYSTEMS)
    if args.seed:
        setting = replace(experiment.setting, seeds=tuple(args.seed))
        experiment = replace(experiment, setting=setting)
    for folder in (args.out, args.log_steps, args.events):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    console = Console(width=max(TABLE_WIDTH, Console().width))
    one = functools.partial(
        _run_one, experiment, _predictor(experiment), args.log_steps, args.events
    )
    commit = _commit()  # of the code that runs, not of what a long run ends beside
    outcomes: dict[Point, Outcome] = {}
    total = len(points(experiment))
    for point, outcome in run_points(experiment, one, args.jobs):
        outcomes[point] = outcome
        console.print(f"{len(outcomes)}/{total}  {_line(outcome.row)}", highlight=False)
    rows = [outcomes[point].row for point in points(experiment)]
    console.print(_table(rows))
    if "classes" in rows[0]:
        console.print(_class_table(rows))
    save(args.out / "results.json", results(experiment, _command(args), commit, outcomes))
    save(args.out / "timing.json", timings(experiment, outcomes))
    return 0


def _predictor(experiment: Experiment) -> StepModel | None:
    if all(system.predictor != "boosted" for system in experiment.systems.values()):
        return None
    if _bundled(experiment):
        from stepserve.cli.bundled_load import trained_predictor

        return trained_predictor()
    return traced.train_predictor(experiment.setting)


def _bundled(experiment: Experiment) -> bool:
    return experiment.setting.dataset == "bundled"


def _load(experiment: Experiment, point: Point) -> Load:
    setting, system = experiment.setting, experiment.systems[point.system]
    if not _bundled(experiment):
        return traced.make_load(setting, system, point)
    from stepserve.cli import bundled_load

    return bundled_load.make_load(setting, system, point)


def _run_one(
    experiment: Experiment,
    model: StepModel | None,
    step_logs: Path | None,
    event_logs: Path | None,
    point: Point,
) -> Outcome:
    name = f"{point.system}-{point.rate_per_gpu_per_s:g}-{point.slo_multiple:g}-{point.seed}"
    load = _load(experiment, point)
    with contextlib.ExitStack() as logs:
        learn: list[Learn] = []
        if step_logs is not None:
            steps = logs.enter_context(contextlib.closing(StepLog(step_logs / f"{name}.csv.gz")))
            learn.append(steps.note)
        on_handled = None
        if event_logs is not None:
            _check_replayable(experiment, point.system)
            control = experiment.systems[point.system].control_for(experiment.setting.gpus)
            setup = SchedulerSetup(Family.DIFFUSION, control, StepProfiles(load.profiles))
            log = EventLog(event_logs / f"{name}.jsonl.gz", setup)
            on_handled = functools.partial(_note, logs.enter_context(contextlib.closing(log)))
        return run_point(
            experiment,
            point,
            load,
            model=model,
            clock=time.perf_counter,
            learn=learn,
            on_handled=on_handled,
        )


def _check_replayable(experiment: Experiment, name: str) -> None:
    """A replay builds schedulers that learn from measured times; others must measure none."""
    faults = experiment.setting.faults
    if not experiment.systems[name].learn_steps and (faults.step_cv or faults.slow_instances):
        raise FieldError("--events", f"{name!r} does not learn step times, which vary: no replay")


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
    path: Path = args.config
    words = ["stepserve simulate", path.name if path.is_absolute() else path.as_posix()]
    words += ["--quick"] if args.quick else []
    words += ["--seed", *map(str, args.seed)] if args.seed else []
    return " ".join(words)


def _commit() -> str | None:
    """The revision of the checkout that this package belongs to, ``-dirty`` if changed since."""
    call = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None  # no git, or an installed package


def _cell(row: dict[str, Any], name: str) -> str:
    value = row[name]
    return "-" if value is None else (COLUMNS[name] or "{}").format(value)


def _line(row: dict[str, Any]) -> str:
    return "  ".join(f"{name} {_cell(row, name)}" for name in list(COLUMNS)[:6])


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table()
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "system" else "right")
    for row in rows:
        table.add_row(*(_cell(row, name) for name in COLUMNS))
    return table


def _class_table(rows: list[dict[str, Any]]) -> Table:
    """Per SLO class, attainment / accuracy; the accuracy of all is weighted."""
    names = [*COLUMNS][:4]
    classes = list(rows[0]["classes"])
    table = Table()
    for name in (*names, *classes, "accuracy_weighted"):
        table.add_column(name, justify="left" if name == "system" else "right")
    for row in rows:
        cells = [
            " / ".join(_cell(row["classes"][name], part) for part in ("attainment", "accuracy"))
            for name in classes
        ]
        weighted = row["accuracy_weighted"]
        table.add_row(
            *(_cell(row, name) for name in names),
            *cells,
            "-" if weighted is None else f"{weighted:.1%}",
        )
    return table

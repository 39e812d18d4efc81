"""Runs experiments: capacities are searched, then runs are made at rates.

First a task per combination of swept values and system that has something to search: tune it if
there is something to tune, then search its capacity on the requests of every seed. Then a task per
run at a given rate. Tasks are self-contained, so they run in any number of processes to the same
results.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from stepserve.core.request import Family
from stepserve.cost.boosted_steps import StepModel
from stepserve.cost.step_log import StepLog

from .autoregressive import AutoregressiveSimulation, first_rate_per_s
from .capacity import Capacity, capacity, round_rate
from .config import ALL
from .diffusion import DiffusionSimulation, MakeLoad, make_load
from .experiment import Experiment
from .instance import Learn, OnHandled
from .measure import Clock
from .results import Row, row_of
from .simulate import Outcome, identity, simulate
from .simulation import Point, Simulation, shortened
from .verdict import held

NEXT_SEED = 1.05
"""How far a search looks around the capacity of other requests of the same kind, at first."""

FIRST_SEARCH = 1.3
SIMULATIONS: Mapping[Family, type[Simulation]] = {
    Family.DIFFUSION: DiffusionSimulation,
    Family.AUTOREGRESSIVE: AutoregressiveSimulation,
}
"""The simulated truth of each family."""

LogEvents = Callable[[Path, Simulation], contextlib.AbstractContextManager[OnHandled]]


@dataclass(frozen=True, slots=True)
class Runner:
    """Everything beside an experiment that a run may need; it can be sent to processes.

    ``model``: of the boosted predictor. ``load``: makes what a diffusion model serves. Logs of
    steps and events go to folders, one file a run; ``log_events`` opens those of the latter.
    """

    model: StepModel | None = None
    load: MakeLoad = make_load
    clock: Clock | None = None
    steps: Path | None = None
    events: Path | None = None
    log_events: LogEvents | None = None

    def simulation(self, experiment: Experiment, point: Point) -> Simulation:
        """The cluster, schedulers and requests of a run."""
        if experiment.family is Family.DIFFUSION:
            return DiffusionSimulation(experiment, point, self.model, self.load)
        return SIMULATIONS[experiment.family](experiment, point)

    def run(self, experiment: Experiment, point: Point) -> Outcome:
        """Run to the end, and keep the logs asked for."""
        name = "-".join(
            [point.system, *_words(experiment), f"{point.rate_per_s:g}", f"{point.seed}"]
        )
        simulation = self.simulation(experiment, point)
        with contextlib.ExitStack() as logs:
            learn: list[Learn] = []
            if self.steps is not None:
                path = self.steps / f"{name}.csv.gz"
                learn.append(logs.enter_context(contextlib.closing(StepLog(path))).note)
            on_handled = None
            if self.events is not None and self.log_events is not None:
                log = self.log_events(self.events / f"{name}.jsonl.gz", simulation)
                on_handled = logs.enter_context(log)
            outcome = simulate(simulation, clock=self.clock, learn=learn, on_handled=on_handled)
        assert outcome is not None, "only a run that may end early has no outcome"
        return outcome

    def try_rate(self, experiment: Experiment, point: Point) -> Outcome | None:
        """Run at a rate; ``None`` if it is certainly not held."""
        return simulate(self.simulation(experiment, point), clock=self.clock, until_missed=True)


def _words(experiment: Experiment) -> list[str]:
    """Swept values, as they stand in the name of a file."""
    return [str(value).replace("/", "_").replace(" ", "") for value in experiment.swept.values()]


@dataclass(frozen=True, slots=True)
class Cell:
    """A system as it is compared, in the ``number``-th combination of swept values."""

    number: int
    system: str


@dataclass(frozen=True, slots=True)
class Found:
    """What a task came to. ``capacities``: one per seed, if they were searched."""

    chosen: str
    outcomes: list[Outcome] = field(default_factory=list)
    capacities: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class _Task:
    """What processes are given: a call that can be sent to them."""

    experiments: Sequence[Experiment]
    runners: Sequence[Runner]

    def __call__(self, what: tuple[Cell, Point | None]) -> Found:
        cell, point = what
        experiment, runner = self.experiments[cell.number], self.runners[cell.number]
        if point is None:
            return search(experiment, cell.system, runner)
        return Found(point.chosen, [runner.run(experiment, point)])


Done = Callable[[Sequence[Row]], None]
Work = tuple[Cell, Point | None]


def run_experiments(
    experiments: Sequence[Experiment], runners: Sequence[Runner], jobs: int, done: Done
) -> list[Outcome]:
    """All outcomes, in an order that depends on the experiments alone.

    ``done`` is told the rows of each task as it ends.
    """
    task = _Task(experiments, runners)
    cells = [Cell(n, name) for n, one in enumerate(experiments) for name in one.compared]
    searched = [cell for cell in cells if _searches(experiments[cell.number], cell.system)]
    found = _all([(cell, None) for cell in searched], task, jobs, done)
    points: list[Work] = []
    for cell in cells:
        experiment = experiments[cell.number]
        peers = [found.get((Cell(cell.number, name), None)) for name in experiment.compared]
        means = [sum(f.capacities) / len(f.capacities) for f in peers if f and f.capacities]
        best_per_s = max(means, default=0.0)
        shares = experiment.workload.rates_of_capacity
        of_capacity = [round_rate(best_per_s * share) for share in shares]
        own = found.get((cell, None))
        chosen = own.chosen if own else cell.system
        points += [
            (cell, Point(cell.system, chosen, rate, seed))
            for rate in sorted({*experiment.rates_per_s, *filter(None, of_capacity)})
            for seed in experiment.seeds
        ]
    ran = _all(points, task, jobs, done)
    results = [found[cell, None] for cell in searched] + [ran[point] for point in points]
    return [outcome for result in results for outcome in result.outcomes]


def _searches(experiment: Experiment, system: str) -> bool:
    tuned = len(experiment.compared[system]) > 1
    return tuned or experiment.capacity.search in (ALL, system)


def _all(todo: Sequence[Work], task: _Task, jobs: int, done: Done) -> dict[Work, Found]:
    results = {}
    for key, result in spread(todo, task, jobs):
        results[key] = result
        done([outcome.row for outcome in result.outcomes])
    return results


def search(experiment: Experiment, system: str, runner: Runner) -> Found:
    """Tune a system if need be, and search its capacity for every seed if that is asked for.

    A row of kind ``capacity`` is that of the run at this rate.
    """
    chosen, rate_per_s = _tuned(experiment, system, runner)
    if experiment.capacity.search not in (ALL, system):
        return Found(chosen)
    outcomes, capacities = [], []
    for seed in experiment.seeds:
        probes = _Probes(experiment, Point(system, chosen, 0.0, seed), runner)
        growth = NEXT_SEED if rate_per_s else FIRST_SEARCH
        found = probes.search(rate_per_s or probes.first_per_s(), growth)
        outcomes.append(probes.outcome(found))
        capacities.append(found.per_s)
        rate_per_s = found.per_s
    return Found(chosen, outcomes, tuple(capacities))


def _tuned(experiment: Experiment, system: str, runner: Runner) -> tuple[str, float]:
    """The candidate of the largest capacity, and that; 0 if there was nothing to choose from.

    A candidate that does not hold the next rate above the best so far is asked nothing more.
    """
    names, how = experiment.compared[system], experiment.capacity
    if len(names) == 1:
        return names[0], 0.0
    short, unmeasured = shortened(experiment), replace(runner, clock=None)
    best, best_per_s = names[0], 0.0
    for name in names:
        probes = _Probes(short, Point(system, name, 0.0, how.tuning_seed), unmeasured)
        rate_per_s = probes.first_per_s()
        if best_per_s:
            step = max(how.step_per_s, how.share * best_per_s)
            rate_per_s = round_rate(best_per_s + step)
            if not probes.holds(rate_per_s):
                continue
        found = probes.search(rate_per_s, FIRST_SEARCH)
        if found.per_s > best_per_s:
            best, best_per_s = name, found.per_s
    return best, best_per_s


class _Probes:
    """Tries rates of one candidate on the requests of one seed; remembers what was tried."""

    def __init__(self, experiment: Experiment, point: Point, runner: Runner) -> None:
        self._experiment, self._point, self._runner = experiment, point, runner
        self._ran: dict[float, Outcome | None] = {}

    def first_per_s(self) -> float:
        """Where to begin, if nothing is known."""
        experiment = self._experiment
        if experiment.family is Family.AUTOREGRESSIVE:
            return first_rate_per_s(experiment, self._point.seed)
        return float(experiment.gpus)

    def holds(self, rate_per_s: float) -> bool:
        """Whether the rate is held."""
        if rate_per_s not in self._ran:
            point = replace(self._point, rate_per_s=rate_per_s)
            self._ran[rate_per_s] = self._runner.try_rate(self._experiment, point)
        outcome = self._ran[rate_per_s]
        return outcome is not None and held(outcome.row, self._experiment.capacity.hold)

    def search(self, first_per_s: float, growth: float) -> Capacity:
        """The largest rate that is."""
        how = self._experiment.capacity
        return capacity(
            self.holds, first_per_s, growth=growth, step_per_s=how.step_per_s, share=how.share
        )

    def outcome(self, found: Capacity) -> Outcome:
        """What came of the rate that was found; of none, which run it was to be."""
        best = self._ran.get(found.per_s)
        if best is None:
            best = Outcome(row_of(identity(self._experiment, self._point, None)))
        tried = [list(probe) for probe in found.probes]
        row = best.row | {"kind": "capacity", "capacity_per_s": found.per_s, "probes": tried}
        return replace(best, row=row)


Task = TypeVar("Task")
Result = TypeVar("Result")


def spread(
    todo: Sequence[Task], run: Callable[[Task], Result], jobs: int
) -> Iterator[tuple[Task, Result]]:
    """Do all tasks, in ``jobs`` processes if more than one; pairs come as tasks end."""
    if jobs <= 1 or len(todo) <= 1:
        yield from ((task, run(task)) for task in todo)
        return
    with ProcessPoolExecutor(min(jobs, len(todo)), get_context("spawn")) as pool:
        futures = {pool.submit(run, task): task for task in todo}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


NAMES = (
    "kind", "system", "tuned", "model", "workload", "rate_per_s", "rate_per_gpu_per_s",
    "slo_multiple", "seed", "swept",
)  # fmt: skip


def results(table: Row, command: str, commit: str | None, outcomes: Sequence[Outcome]) -> Row:
    """The content of ``results.json``: nothing in it depends on the machine."""
    content: Row = {
        "command": command,
        "commit": commit,
        "config": table,
        "seeds": table["seeds"],
        "rows": [outcome.row for outcome in outcomes],
    }
    if any(outcome.timeline for outcome in outcomes):
        content["timelines"] = [{**_names(o), "buckets": o.timeline} for o in outcomes]
    return content


def timings(outcomes: Sequence[Outcome]) -> Row:
    """The content of ``timing.json``: what was measured on this machine."""
    return {"rows": [{**_names(outcome), **outcome.timing} for outcome in outcomes]}


def _names(outcome: Outcome) -> Row:
    return {name: outcome.row[name] for name in NAMES}

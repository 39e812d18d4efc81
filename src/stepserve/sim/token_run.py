"""Runs an experiment with autoregressive models: capacities are searched, then rates are run.

First a task per model, workload and system: tune it if there is something to tune, then search
its capacity on the requests of every seed. Then a task per run at a given rate. Tasks are
self-contained, so they run in any number of processes to the same results.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .capacity import Capacity, capacity, round_rate
from .results import Row
from .run import spread
from .token_cluster import Run, first_rate_per_s, run_world
from .token_config import ALL, TokenExperiment
from .token_results import held

NEXT_SEED = 1.05
"""How far a search looks around the capacity of other requests of the same kind, at first."""

FIRST_SEARCH = 1.3


@dataclass(frozen=True, slots=True)
class Cell:
    """A system as it is compared, serving a workload with a model."""

    model: str
    workload: str
    system: str


@dataclass(frozen=True, slots=True)
class TokenPoint:
    """A run of a cell at a given rate. ``chosen``: the candidate that its system stands for."""

    cell: Cell
    chosen: str
    rate_per_s: float
    seed: int


@dataclass(frozen=True, slots=True)
class Found:
    """What a task came to: rows, and what was measured on this machine, a row for each.

    ``capacities``: one per seed, if they were searched.
    """

    chosen: str
    rows: list[Row] = field(default_factory=list)
    timings: list[Row] = field(default_factory=list)
    capacities: tuple[float, ...] = ()


Clock = Callable[[], float]
Done = Callable[[Sequence[Row]], None]


def run_experiment(
    experiment: TokenExperiment, jobs: int, clock: Clock, done: Done
) -> tuple[list[Row], list[Row]]:
    """All rows, in an order that depends on the experiment alone, and the timings of each.

    ``done`` is told the rows of each task as it ends.
    """
    cells = _cells(experiment)
    found = _all(cells, _Task(experiment, clock), jobs, done)
    points = _points(experiment, found)
    ran = _all(points, _Task(experiment, clock), jobs, done)
    results = [found[cell] for cell in cells] + [ran[point] for point in points]
    rows = [row for result in results for row in result.rows]
    return rows, [row for result in results for row in result.timings]


def _all(todo: Sequence[Any], task: "_Task", jobs: int, done: Done) -> dict[Any, Found]:
    results = {}
    for key, result in spread(todo, task, jobs):
        results[key] = result
        done(result.rows)
    return results


@dataclass(frozen=True, slots=True)
class _Task:
    """What processes are given: a call that can be sent to them."""

    experiment: TokenExperiment
    clock: Clock

    def __call__(self, what: Cell | TokenPoint) -> Found:
        if isinstance(what, Cell):
            return search(self.experiment, what, self.clock)
        outcome = run_point(self.experiment, what, self.clock)
        assert outcome is not None, "only a judged run may be given up"
        return Found(what.chosen, [outcome[0]], [outcome[1]])


def _cells(experiment: TokenExperiment) -> list[Cell]:
    setting = experiment.setting
    return [
        Cell(model, workload, system)
        for model in setting.models
        for workload in setting.workloads
        for system in experiment.compared
    ]


def _points(experiment: TokenExperiment, found: Mapping[Cell, Found]) -> list[TokenPoint]:
    """The runs at given rates, and at given shares of the largest capacity."""
    setting = experiment.setting
    points = []
    for cell in _cells(experiment):
        peers = [found[replace(cell, system=name)].capacities for name in experiment.compared]
        best_per_s = max((sum(c) / len(c) for c in peers if c), default=0.0)
        shares = [round_rate(best_per_s * share) for share in setting.rates_of_capacity]
        points += [
            TokenPoint(cell, found[cell].chosen, rate, seed)
            for rate in sorted({*setting.rates_per_s, *filter(None, shares)})
            for seed in setting.seeds
        ]
    return points


def run_point(
    experiment: TokenExperiment, point: TokenPoint, clock: Clock | None, *, judge: bool = False
) -> tuple[Row, Row] | None:
    """Run at a rate: the row, and what was measured on this machine.

    If there is a ``judge``, ``None`` for a rate that is certainly not held.
    """
    cell, system = point.cell, experiment.systems[point.chosen]
    run = Run(cell.model, cell.workload, point.rate_per_s, point.seed)
    outcome = run_world(experiment.setting, system, run, clock=clock, until_hopeless=judge)
    if outcome is None:
        return None
    row, timing = outcome
    names = _names(point)
    return {"kind": "run", **names, **row}, {**names, "rate_per_s": point.rate_per_s, **timing}


def _names(point: TokenPoint) -> Row:
    cell = point.cell
    return {
        "model": cell.model,
        "workload": cell.workload,
        "system": cell.system,
        "tuned": point.chosen if point.chosen != cell.system else None,
        "seed": point.seed,
    }


def search(experiment: TokenExperiment, cell: Cell, clock: Clock) -> Found:
    """Tune a system if need be, and search its capacity for every seed if that is asked for.

    A row of kind ``capacity`` is that of the run at this rate.
    """
    setting = experiment.setting
    chosen, rate_per_s = _tuned(experiment, cell)
    result = Found(chosen)
    if setting.capacity not in (ALL, cell.system):
        return result
    capacities = []
    for seed in setting.seeds:
        probes = _Probes(experiment, cell, chosen, seed, clock)
        growth = NEXT_SEED if rate_per_s else FIRST_SEARCH
        found = probes.search(rate_per_s or probes.first_per_s(), growth)
        row, timing = probes.row(found.per_s)
        tried = [list(probe) for probe in found.probes]
        row |= {"kind": "capacity", "capacity_per_s": found.per_s, "probes": tried}
        result.rows.append(row)
        result.timings.append(timing)
        capacities.append(found.per_s)
        rate_per_s = found.per_s
    return replace(result, capacities=tuple(capacities))


def _tuned(experiment: TokenExperiment, cell: Cell) -> tuple[str, float]:
    """The candidate of the largest capacity, and that; 0 if there was nothing to choose from.

    A candidate that does not hold the next rate above the best so far is asked nothing more.
    """
    setting = experiment.setting
    names = experiment.compared[cell.system]
    if len(names) == 1:
        return names[0], 0.0
    short = replace(experiment, setting=replace(setting, duration_s=setting.tuning_duration_s))
    best, best_per_s = names[0], 0.0
    for name in names:
        probes = _Probes(short, cell, name, setting.tuning_seed, clock=None)
        rate_per_s = probes.first_per_s()
        if best_per_s:
            step = max(setting.capacity_step_per_s, setting.capacity_share * best_per_s)
            rate_per_s = round_rate(best_per_s + step)
            if not probes.holds(rate_per_s):
                continue
        found = probes.search(rate_per_s, FIRST_SEARCH)
        if found.per_s > best_per_s:
            best, best_per_s = name, found.per_s
    return best, best_per_s


class _Probes:
    """Tries rates of one candidate on the requests of one seed; remembers what was tried."""

    def __init__(
        self, experiment: TokenExperiment, cell: Cell, chosen: str, seed: int, clock: Clock | None
    ) -> None:
        self._experiment, self._clock = experiment, clock
        self._point = TokenPoint(cell, chosen, 0.0, seed)
        self._ran: dict[float, tuple[Row, Row] | None] = {}

    def first_per_s(self) -> float:
        """Where to begin, if nothing is known."""
        point = self._point
        model, workload = point.cell.model, point.cell.workload
        return first_rate_per_s(self._experiment.setting, model, workload, point.seed)

    def holds(self, rate_per_s: float) -> bool:
        """Whether the rate is held."""
        if rate_per_s not in self._ran:
            point = replace(self._point, rate_per_s=rate_per_s)
            self._ran[rate_per_s] = run_point(self._experiment, point, self._clock, judge=True)
        outcome = self._ran[rate_per_s]
        return outcome is not None and held(outcome[0], self._experiment.setting)

    def search(self, first_per_s: float, growth: float) -> Capacity:
        """The largest rate that is."""
        setting = self._experiment.setting
        return capacity(
            self.holds,
            first_per_s,
            growth=growth,
            step_per_s=setting.capacity_step_per_s,
            share=setting.capacity_share,
        )

    def row(self, rate_per_s: float) -> tuple[Row, Row]:
        """What came of a rate that was held; names alone of no rate."""
        return self._ran.get(rate_per_s) or (_names(self._point), _names(self._point))

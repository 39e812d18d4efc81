"""Runs the points of an experiment: every system at every rate, SLO and seed.

A point is self-contained, so points run in any order, in any number of processes, to the same
result. What all points share (a trained predictor) is made once, before.
"""

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any, Protocol, TypeVar

from stepserve.core.errors import FieldError
from stepserve.core.protocols import StepPredictor
from stepserve.core.request import Request
from stepserve.cost.boosted_steps import BoostedSteps, StepModel
from stepserve.cost.remaining_steps import MeanYield, Yields

from .cluster import Profiles, make_world, specs
from .config import Experiment, Setting, System
from .executors import Executors, TraceExecutors
from .oracle import Oracle
from .record import DiffusionRecord
from .results import Row, Timeline, attainment, denoised, finished, mean_threshold, met, summary
from .world import Learn, OnHandled, Timed, World, untimed


@dataclass(frozen=True, slots=True)
class Point:
    """One run."""

    system: str
    rate_per_gpu_per_s: float
    slo_multiple: float
    seed: int


class Load(Protocol):
    """What a point serves: requests, what steps do to them and take, how answers are judged."""

    @property
    def requests(self) -> Sequence[Request]:
        """In order of arrival."""
        ...

    @property
    def rows(self) -> Executors:
        """Executors, real or modelled."""
        ...

    @property
    def yields(self) -> Yields:
        """What the plain predictor starts from."""
        ...

    @property
    def profiles(self) -> Profiles:
        """Step times by TP degree."""
        ...

    @property
    def accuracy_kind(self) -> str:
        """``measured`` or ``proxy``."""
        ...

    def accuracy(self, records: Sequence[DiffusionRecord]) -> float | None:
        """Mean over the requests that got their whole answer, 0..1; ``None`` without any."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a point. ``scheduler_us_per_event`` is measured, all else simulated."""

    row: Row
    timeline: list[Row] = field(default_factory=list)
    scheduler_us_per_event: float | None = None


def points(experiment: Experiment) -> list[Point]:
    """All points, in the order of their rows."""
    setting = experiment.setting
    swept = itertools.product(
        experiment.systems, setting.rates_per_gpu_per_s, setting.slo_multiples, setting.seeds
    )
    return [Point(*values) for values in swept]


SCHEDULERS = ("global", "local")


class Meter:
    """Sums the seconds spent in parts that are called, and counts the calls."""

    def __init__(self, clock: Callable[[], float], parts: Sequence[str]) -> None:
        """``parts``: which ones; measuring costs about a microsecond a call."""
        self._clock = clock
        self._parts = parts
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, measured if the part is."""
        if part not in self._parts:
            return call
        clock, seconds, calls = self._clock, self.seconds, self.calls
        seconds.setdefault(part, 0.0)
        calls.setdefault(part, 0)

        def measured(*args: Any) -> Any:
            start = clock()
            result = call(*args)
            seconds[part] += clock() - start
            calls[part] += 1
            return result

        return measured

    def us_per_call(self) -> float | None:
        """Mean microseconds of a measured call."""
        calls = sum(self.calls.values())
        return 1e6 * sum(self.seconds.values()) / calls if calls else None


def run_point(
    experiment: Experiment,
    point: Point,
    load: Load,
    *,
    model: StepModel | None = None,
    clock: Callable[[], float] | None = None,
    learn: Sequence[Learn] = (),
    on_handled: OnHandled | None = None,
) -> Outcome:
    """Run one point to its end. ``model``: the boosted predictor's. ``clock`` measures
    schedulers. ``learn``, ``on_handled``: see ``World``.
    """
    setting, system = experiment.setting, experiment.systems[point.system]
    meter = None if clock is None else Meter(clock, SCHEDULERS)
    timed = meter.timed if meter else untimed
    world, timeline = simulate(setting, system, load, point.seed, model, learn, timed, on_handled)
    records = denoised(world)
    row = {
        "system": point.system,
        "model": setting.model,
        "dataset": setting.dataset,
        "gpus": setting.gpus,
        "rate_per_gpu_per_s": point.rate_per_gpu_per_s,
        "slo_multiple": point.slo_multiple,
        "seed": point.seed,
        "requests": len(records),
        "accuracy": load.accuracy(records),
        "accuracy_in_time": load.accuracy([r for r in records if met(r)]),
        "accuracy_kind": load.accuracy_kind,
        **summary(world, world.scheduler.reconfiguration.changes),
    }
    if len(setting.class_shares) > 1:
        row["accuracy_weighted"], row["classes"] = _by_class(load, records)
    return Outcome(
        row,
        [] if timeline is None else timeline.rows(),
        meter.us_per_call() if meter else None,
    )


def _by_class(load: Load, records: Sequence[DiffusionRecord]) -> tuple[float | None, Row]:
    """Accuracy of whole answers, each counted by its weight, and what became of each class."""
    groups: dict[str, list[DiffusionRecord]] = {}
    for record in records:
        groups.setdefault(record.request.slo.slo_class, []).append(record)
    classes, total, weights = {}, 0.0, 0.0
    for name, group in sorted(groups.items()):
        accuracy = load.accuracy(group)
        classes[name] = {
            "requests": len(group),
            "attainment": attainment(group),
            "accuracy": accuracy,
            "threshold_mean": mean_threshold(group),
        }
        if accuracy is not None:
            weight = group[0].request.slo.weight * sum(map(finished, group))
            total, weights = total + weight * accuracy, weights + weight
    return total / weights if weights else None, classes


def simulate(
    setting: Setting,
    system: System,
    load: Load,
    seed: int,
    model: StepModel | None = None,
    learn: Sequence[Learn] = (),
    timed: Timed = untimed,
    on_handled: OnHandled | None = None,
) -> tuple[World, Timeline | None]:
    """A world that has run to its end, and its timeline if the setting asks for one."""
    predictor = _predictor(system, load, model)
    learns = (*learn, predictor.learn) if system.predictor == "mean" else learn
    world = make_world(
        setting, system, load.profiles, load.rows, predictor, seed, learns, timed, on_handled
    )
    world.start(specs(setting, system), load.requests)
    timeline = Timeline(world, setting.timeline_s) if setting.timeline_s else None
    with rare_collection():
        world.run()
    return world, timeline


@contextlib.contextmanager
def rare_collection() -> Iterator[None]:
    """A run makes millions of short-lived values that are in no cycle: looking for cycles among
    all the others each time a few hundred are alive takes a tenth of its time.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def _predictor(system: System, load: Load, model: StepModel | None) -> StepPredictor:
    if system.predictor == "mean":
        return MeanYield(load.yields)
    if system.predictor == "oracle":
        if not isinstance(load.rows, TraceExecutors):
            raise FieldError("predictor", "only a trace knows its end: no oracle here")
        return Oracle(load.rows)
    assert model is not None, "the boosted predictor was trained before"
    return BoostedSteps(model)


def run_points(
    experiment: Experiment, run: Callable[[Point], Outcome], jobs: int
) -> Iterator[tuple[Point, Outcome]]:
    """Run all points, in ``jobs`` processes if more than one, as they end."""
    return spread(points(experiment), run, jobs)


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


def results(
    experiment: Experiment, command: str, commit: str | None, outcomes: dict[Point, Outcome]
) -> dict[str, Any]:
    """The content of ``results.json``: nothing in it depends on the machine."""
    ordered = [(point, outcomes[point]) for point in points(experiment)]
    content: dict[str, Any] = {
        "command": command,
        "commit": commit,
        "config": experiment.as_table(),
        "seeds": list(experiment.setting.seeds),
        "rows": [outcome.row for _, outcome in ordered],
    }
    if experiment.setting.timeline_s:
        content["timelines"] = [
            {**_name(point), "buckets": outcome.timeline} for point, outcome in ordered
        ]
    return content


def timings(experiment: Experiment, outcomes: dict[Point, Outcome]) -> dict[str, Any]:
    """The content of ``timing.json``: what was measured on this machine."""
    return {
        "rows": [
            {**_name(point), "scheduler_us_per_event": outcomes[point].scheduler_us_per_event}
            for point in points(experiment)
        ]
    }


def _name(point: Point) -> Row:
    return {
        "system": point.system,
        "rate_per_gpu_per_s": point.rate_per_gpu_per_s,
        "slo_multiple": point.slo_multiple,
        "seed": point.seed,
    }

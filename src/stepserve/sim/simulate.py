"""Runs one simulation to its end and makes a row of it."""

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from stepserve.core.errors import FieldError
from stepserve.core.request import Request

from .experiment import Experiment
from .instance import Learn, OnHandled, untimed
from .measure import Clock, Meter
from .record import RequestRecord
from .requests import base_s
from .results import (
    Row,
    Timeline,
    attainment,
    client_columns,
    machine_columns,
    row_of,
)
from .simulation import Point, Simulation
from .verdict import EarlyEnd, NotHeldError, QueueSamples


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run. ``timing`` is measured on this machine, all else simulated."""

    row: Row
    timeline: list[Row] = field(default_factory=list)
    timing: Row = field(default_factory=dict)


def simulate(
    simulation: Simulation,
    *,
    clock: Clock | None = None,
    learn: Sequence[Learn] = (),
    on_handled: OnHandled | None = None,
    until_missed: bool = False,
) -> Outcome | None:
    """Run to the end; ``clock`` measures schedulers.

    With ``until_missed`` a run ends, without an outcome, as soon as its rate is certainly not held.
    """
    experiment, requests = simulation.experiment, simulation.requests
    warm_up_s, search = experiment.workload.warm_up_s, experiment.capacity
    count = sum(r.arrival_s >= warm_up_s for r in requests)
    if not count:
        raise FieldError("workload.warm_up_s", "no request arrives later")
    meter = None if clock is None else Meter(clock)
    world = simulation.world(learn, meter.timed if meter else untimed, on_handled)
    samples = QueueSamples(world, requests[-1].arrival_s)
    timeline_s = experiment.setting.timeline_s
    timeline = Timeline(world, timeline_s) if timeline_s else None
    if until_missed:
        names = [r.id for r in requests[-count:]]
        gaps = sum(simulation.gaps[-count:])
        EarlyEnd(world, names, gaps, search.hold, search.patience_s)
    try:
        with rare_collection():
            world.run()
    except NotHeldError:
        return None
    rate_per_s = simulation.point.rate_per_s or recorded_rate_per_s(requests)
    records = list(world.records.values())
    judged = records[-count:]
    row = row_of(
        {
            **identity(experiment, simulation.point, rate_per_s),
            **client_columns(judged, search.patience_s),
            "queue_growth": samples.growth,
            **_accuracy(simulation, judged),
            **simulation.quality(judged),
            **machine_columns(world, records),
            **simulation.machines(world, records),
        }
    )
    timelined = [] if timeline is None else timeline.rows()
    return Outcome(row, timelined, meter.row() if meter else {})


def recorded_rate_per_s(requests: Sequence[Request]) -> float:
    """The mean rate of requests that come as they were recorded."""
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    return (len(requests) - 1) / span_s if span_s else 0.0


def identity(experiment: Experiment, point: Point, rate_per_s: float | None) -> Row:
    """The part of a row that says which run it is; ``None`` of no rate at all."""
    setting, gpus = experiment.setting, experiment.gpus
    relative = experiment.recording is None and base_s(experiment)
    return {
        "kind": "run",
        "system": point.system,
        "tuned": point.chosen if point.chosen != point.system else None,
        "family": experiment.family.value,
        "model": setting.model,
        "workload": experiment.workload.label,
        "seed": point.seed,
        "gpus": gpus,
        "instances": len(experiment.hosts),
        "rate_per_s": rate_per_s,
        "rate_per_gpu_per_s": None if rate_per_s is None else rate_per_s / gpus,
        "slo_multiple": setting.slo_multiple if relative else None,
        "swept": dict(experiment.swept),
    }


def _accuracy(simulation: Simulation, records: Sequence[RequestRecord]) -> Row:
    """Accuracy of whole answers; with several SLO classes by class, too, and each answer counted
    by its weight.
    """
    groups: dict[str, list[RequestRecord]] = {}
    for record in records:
        groups.setdefault(record.request.slo.slo_class, []).append(record)
    row: Row = {
        "accuracy": simulation.accuracy(records),
        "accuracy_in_time": simulation.accuracy([r for r in records if r.met]),
        "accuracy_kind": simulation.accuracy_kind,
    }
    if len(groups) < 2:
        return row
    classes, total, weights = {}, 0.0, 0.0
    for name, group in sorted(groups.items()):
        accuracy = simulation.accuracy(group)
        classes[name] = {
            "requests": len(group),
            "attainment": attainment(group),
            "accuracy": accuracy,
            "threshold_mean": simulation.quality(group).get("threshold_mean"),
        }
        if accuracy is not None:
            weight = group[0].request.slo.weight * sum(r.whole for r in group)
            total, weights = total + weight * accuracy, weights + weight
    weighted = total / weights if weights else None
    return {**row, "classes": classes, "accuracy_weighted": weighted}


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

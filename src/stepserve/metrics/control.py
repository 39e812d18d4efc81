"""What the control plane decided, as series of ``/metrics``; read when they are scraped."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class ControlReading:
    """The control plane at one moment; counts are since the start.

    ``cap_lowest`` and ``cap_mean`` are over unfinished requests (1: no request, or no cap).
    ``instances`` counts by tensor-parallel degree; ``scheduler_seconds`` and
    ``scheduler_events`` have a value per kind of scheduler.
    """

    cap_lowest: float = 1.0
    cap_mean: float = 1.0
    caps_updates: int = 0
    migrations_asked: int = 0
    migrations_done: int = 0
    handovers: int = 0
    forecasts_refreshed: int = 0
    plans_solved: int = 0
    layout_changes: int = 0
    scheduler_restarts: int = 0
    instance_losses: int = 0
    instances: Mapping[int, int] = field(default_factory=dict)
    scheduler_seconds: Mapping[str, float] = field(default_factory=dict)
    scheduler_events: Mapping[str, int] = field(default_factory=dict)


_GAUGES = {
    "cap_lowest": "Lowest threshold cap of an unfinished request; 1 without any.",
    "cap_mean": "Mean threshold cap of unfinished requests; 1 without any.",
}
_COUNTERS = {
    "caps_updates": "Updates of threshold caps that changed some.",
    "migrations_asked": "Requests asked to leave a healthy instance at a cut.",
    "migrations_done": "Requests placed anew after they left as asked.",
    "handovers": "Hand-overs of requests that were placed on several instances.",
    "forecasts_refreshed": "Forecasts of remaining steps renewed while requests ran.",
    "plans_solved": "Answers of the layout planner.",
    "layout_changes": "Plans that changed the layout.",
    "instance_losses": "Instances that died, hung or never came up.",
    "scheduler_restarts": "Global schedulers that were replaced by a new one.",
}
_BY_SCHEDULER = {
    "scheduler_seconds": "Time spent inside schedulers.",
    "scheduler_events": "Events that schedulers handled.",
}


class ControlCollector(Collector):
    """Reads once per scrape, so that the series of one scrape belong together."""

    def __init__(self, model: str, read: Callable[[], ControlReading]) -> None:
        self._model = model
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """See ``Collector.collect``."""
        reading, model = self._read(), self._model
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"stepserve:{name}", text, labels=["model_name"])
            gauge.add_metric([model], getattr(reading, name))
            yield gauge
        instances = GaugeMetricFamily(
            "stepserve:instances", "Instances that are up.", labels=["model_name", "tp_degree"]
        )
        for degree, count in sorted(reading.instances.items()):
            instances.add_metric([model, str(degree)], count)
        yield instances
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"stepserve:{name}", text, labels=["model_name"])
            counter.add_metric([model], getattr(reading, name))
            yield counter
        for name, text in _BY_SCHEDULER.items():
            labels = ["model_name", "scheduler"]
            counter = CounterMetricFamily(f"stepserve:{name}", text, labels=labels)
            for kind, value in getattr(reading, name).items():
                counter.add_metric([model, kind], value)
            yield counter

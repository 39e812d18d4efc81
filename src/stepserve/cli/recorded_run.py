"""A recorded live run as an experiment: ``stepserve simulate --from run.jsonl``.

From the event log of ``serve --events`` come the requests with their arrival times, targets and
lengths, the steps that diffusion requests took, the instances of the start, the policies, and how
long batches take. What the log does not tell, and what is assumed instead:

- Steps of a diffusion request are known at the thresholds it was run at; at any other they are
  taken to differ as the published means do.
- A request that was cancelled is taken to end where it was; of one that was refused the length
  is taken to be the mean of the others.
- Batches take what the profile in the log's header says, and no longer, however busy the machine
  was; the gateway and the client take no time.
- Forecasts start from nothing: the run's own means (diffusion), or lengths learned while
  simulating (autoregressive).
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stepserve.core.actions import RunBatch
from stepserve.core.errors import FieldError
from stepserve.core.events import BatchDone, RequestArrived
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.instance import InstanceSpec
from stepserve.core.request import Family, FinishReason, Request
from stepserve.core.step import Batch
from stepserve.cost.batch_profile import BatchProfile
from stepserve.cost.step_table import StepProfiles
from stepserve.live.event_log import Entry, Scheduler, read_events
from stepserve.sim.outcomes import COUNTED_TOKENS, mean_steps
from stepserve.sim.recording import RECORDED, RecordedRequest, Recording
from stepserve.tables import as_table


@dataclass(slots=True)
class _Seen:
    """What a log tells of one request: steps and settled tokens by threshold, and its end."""

    request: Request
    steps: Counter[float] = field(default_factory=Counter)
    settled: Counter[float] = field(default_factory=Counter)
    emitted: int = 0
    ended: bool = False

    def difficulty(self) -> float:
        """Steps against the published mean at the same thresholds; 1 without any."""
        usual = sum(mean_steps(t) * n / COUNTED_TOKENS for t, n in self.settled.items())
        return self.steps.total() / usual if usual else 1.0


def recorded_table(path: Path) -> tuple[Recording, dict[str, Any]]:
    """What was recorded, and the experiment that repeats it.

    Raises FieldError for a file that is no event log, or of a run without requests.
    """
    setup, entries = read_events(path)
    seen, specs = _read(entries)
    if not seen or not specs:
        raise FieldError("--from", f"{path} has no requests, or no instances")
    known = [one.emitted for one in seen.values() if one.emitted]
    usual = max(1, round(sum(known) / len(known))) if known else 1
    begun_s = min(one.request.arrival_s for one in seen.values())
    requests = [
        RecordedRequest(
            replace(one.request, arrival_s=one.request.arrival_s - begun_s),
            one.emitted or min(usual, one.request.max_output_tokens),
            one.difficulty(),
        )
        for one in seen.values()
    ]
    requests.sort(key=lambda r: r.request.arrival_s)
    first = requests[0].request
    profile = setup.profile
    recording = Recording(
        tuple(requests),
        profile.by_degree if isinstance(profile, StepProfiles) else {},
        profile if isinstance(profile, BatchProfile) else None,
    )
    spec = next(iter(specs.values()))
    system = {
        "name": RECORDED,
        "predictor": "mean" if first.family is Family.DIFFUSION else "class_mean",
        "kv_tokens": spec.page_capacity * spec.page_tokens // spec.tp_degree,
        "page_tokens": spec.page_tokens,
        "max_running_requests": spec.max_running_requests // spec.tp_degree,
        "running_per_gpu": True,
        "control": as_table(replace(setup.control, planner=None)),
    }
    degrees = Counter(spec.tp_degree for spec in specs.values())
    setting: dict[str, Any] = {
        "family": first.family.value,
        "model": first.model,
        "hardware": RECORDED,
        "instances": [{"count": n, "degree": degree} for degree, n in degrees.items()],
    }
    if setup.link is not None:
        setting["links"] = {"bytes_per_s": setup.link.bytes_per_s, "rtt_s": setup.link.rtt_s}
    return recording, {
        "setting": setting,
        "workload": {"file": str(path), "arrivals": "recorded"},
        "system": [system],
    }


def _read(
    entries: Iterator[Entry],
) -> tuple[dict[RequestId, _Seen], dict[InstanceId, InstanceSpec]]:
    """Requests in order of arrival, and the first incarnation of every instance."""
    seen: dict[RequestId, _Seen] = {}
    specs: dict[InstanceId, InstanceSpec] = {}
    batches: dict[Scheduler, dict[int, Batch]] = defaultdict(dict)
    for entry in entries:
        if entry.spec is not None and not entry.incarnation:
            specs[entry.spec.id] = entry.spec
        event = entry.event
        if isinstance(event, RequestArrived):
            seen.setdefault(event.request.id, _Seen(event.request))
        elif isinstance(event, BatchDone) and event.batch_id in batches[entry.scheduler]:
            _take(seen, batches[entry.scheduler].pop(event.batch_id), event)
        for action in entry.actions:
            if isinstance(action, RunBatch):
                batches[entry.scheduler][action.batch.id] = action.batch
    return seen, specs


def _take(seen: dict[RequestId, _Seen], batch: Batch, done: BatchDone) -> None:
    for step, outcome in zip(batch.steps, done.outcomes, strict=True):
        one = seen.get(step.request_id)
        if one is None or one.ended or outcome.finished is FinishReason.ERROR:
            continue
        if step.threshold is not None:
            one.steps[step.threshold] += 1
            one.settled[step.threshold] += outcome.settled
        one.emitted = max(one.emitted, outcome.emitted)
        one.ended = outcome.finished is not None

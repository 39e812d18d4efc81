"""What happened to one request, told from an event log: when, what, and why."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stepserve.core.actions import (
    Action,
    Finish,
    LoadState,
    PushChunk,
    Reject,
    Report,
    RunBatch,
    Send,
)
from stepserve.core.errors import FieldError
from stepserve.core.events import (
    BatchDone,
    CapsSet,
    ChunkLanded,
    Event,
    HandedOff,
    HandoverAcknowledged,
    HandoverPrepared,
    HandoverStalled,
    InstanceFound,
    Predicted,
    RequestArrived,
    RequestCancelled,
    SegmentEnded,
    SegmentExtended,
    SegmentPlaced,
    SegmentReleased,
    TimerExpired,
)
from stepserve.core.forecast import StepForecast
from stepserve.core.request import Family, Request
from stepserve.core.step import Batch, Step, StepOutcome

from .event_log import Entry, Scheduler, read_events


@dataclass(slots=True)
class _Stay:
    """A segment on its instance, from when it begins to run there."""

    placed: SegmentPlaced
    began_s: float
    emitted: int
    first_token_s: float | None = None
    last_token_s: float = 0.0
    tokens: int = 0  # emitted here

    def take(self, at_s: float, emitted: int) -> None:
        """A step has ended with so many tokens emitted in all."""
        new, self.emitted = emitted - self.emitted, emitted
        if new > 0:
            if self.first_token_s is None:
                self.first_token_s = at_s
            self.last_token_s = at_s
            self.tokens += new

    def as_predicted(self, at_s: float) -> str:
        """How long it took, beside what its placement was chosen for."""
        predicted_s, tbt_s = self.placed.predicted_s, self.placed.predicted_tbt_s
        if predicted_s is None:
            return ""
        text = f" in {at_s - self.began_s:.3f} s (machine time predicted {predicted_s:.3f} s)"
        if tbt_s is None or self.first_token_s is None or self.tokens < 2:
            return text
        mean_ms = (self.last_token_s - self.first_token_s) / (self.tokens - 1) * 1e3
        return f"{text}, {mean_ms:.1f} ms between tokens (predicted {tbt_s * 1e3:.1f} ms)"


def requests(path: Path) -> Iterator[str]:
    """A line for each request, in the order of arrival: what to ask ``trace_request`` for."""
    _, entries = read_events(path)
    for entry in entries:
        if isinstance(entry.event, RequestArrived):
            request = entry.event.request
            yield f"{request.id}  {request.client_id}  {_facts(request)}"


def trace_request(path: Path, asked: str) -> Iterator[str]:
    """Lines about a request, with seconds since it arrived.

    ``asked``: its id, its reply's, or the one that its client gave it; the first such request.

    Raises FieldError if there is no such request in the log.
    """
    _, entries = read_events(path)
    running: dict[Scheduler, Batch] = {}
    stays: dict[Scheduler, _Stay] = {}
    request: Request | None = None
    seen = 0
    for entry in entries:
        if isinstance(entry.event, RequestArrived):
            seen += 1
            if request is None and _is_meant(entry.event.request, asked):
                request = entry.event.request
        for line in _lines(entry, request.id if request else "", running, stays):
            since_s = entry.at_s - request.arrival_s if request else 0.0
            yield f"{since_s:9.4f} s  {line}"
    if request is None:
        how = "without --request they are listed"
        raise FieldError("--request", f"no {asked!r} among the {seen} requests of {path}; {how}")


def _is_meant(request: Request, asked: str) -> bool:
    """By its own id, its reply's (then the first choice is meant), or its client's."""
    return request.id in (asked, f"{asked}-0") or (request.client_id == asked != "")


def _lines(
    entry: Entry, request_id: str, running: dict[Scheduler, Batch], stays: dict[Scheduler, _Stay]
) -> Iterator[str]:
    event, stay = entry.event, stays.get(entry.scheduler)
    if isinstance(event, SegmentPlaced) and event.request.id == request_id:
        stay = stays[entry.scheduler] = _Stay(event, entry.at_s, event.progress.emitted)
    if isinstance(event, BatchDone):
        yield from _step(entry, event, request_id, running.pop(entry.scheduler, None), stay)
    elif (line := _event(event, request_id) or _handover(entry, request_id)) is not None:
        yield line
    for action in entry.actions:
        if isinstance(action, RunBatch):
            running[entry.scheduler] = action.batch
        elif isinstance(action, LoadState) and action.request.id == request_id:
            if stay is not None and not isinstance(event, SegmentPlaced):
                stay.began_s, stay.emitted = entry.at_s, action.progress.emitted
                yield f"{entry.instance} takes over: {action.why}"
        elif isinstance(action, Report) and isinstance(action.event, SegmentEnded):
            segment, end, progress, _ = action.event
            if segment.request_id == request_id and stay is not None:
                took = stay.as_predicted(entry.at_s)
                yield f"left {segment.instance}: {end}, {progress.settled} positions settled{took}"
        elif (line := _action(action, request_id)) is not None:
            yield line


def _event(event: Event, request_id: str) -> str | None:
    match event:
        case RequestArrived(request) if request.id == request_id:
            return f"arrived: {_facts(request)}"
        case RequestCancelled(name, reason) if name == request_id:
            return f"cancelled by its client ({reason})"
        case Predicted(name, forecast) if name == request_id:
            return f"predicted: {_steps(forecast)}"
        case SegmentPlaced(segment, source=None) if segment.request_id == request_id:
            until = "" if segment.stop is None else f" until {segment.stop}"
            cap = f", cap {event.cap:g}" if event.request.family is Family.DIFFUSION else ""
            return f"joined {segment.instance} at position {segment.start}{until}{cap}"
        case SegmentPlaced(segment, source=source) if segment.request_id == request_id:
            return f"room on {segment.instance}, to go on at {segment.start} after {source}"
        case InstanceFound(_, spec, rows) if any(r.request.id == request_id for r in rows):
            return f"a new global scheduler finds it on {spec.id}"
        case CapsSet(caps) if request_id in dict(caps):
            return f"cap {dict(caps)[request_id]:g}"  # type: ignore[index]
    return None


def _handover(entry: Entry, request_id: str) -> str | None:
    """What happens between the two sides of a hand-over."""
    event, here = entry.event, entry.instance
    if getattr(event, "request_id", None) != request_id:
        return None
    match event:
        case HandoverPrepared():
            return f"{here} may push keys and values"
        case ChunkLanded(start=start, stop=stop, intact=intact):
            state = "landed" if intact else "came in damaged"
            return f"keys and values {start} to {stop} {state} on {here}"
        case HandedOff(progress=progress):
            at = f"{progress.settled}, with {progress.emitted} tokens emitted"
            return f"handed off to {here} at {at}"
        case HandoverAcknowledged():
            return f"{here} hears that it was taken over"
        case SegmentExtended():
            return f"{here} goes on to the end: there is no successor any more"
        case TimerExpired(stage=stage) if entry.actions:  # else nobody waited any more
            return f"{here} waits no longer: {stage}"
        case HandoverStalled():
            return "the successor made no room in time"
    return None


def _action(action: Action, request_id: str) -> str | None:
    match action:
        case PushChunk(to, name, start=start, stop=stop, why=why) if name == request_id:
            return f"keys and values {start} to {stop} go to {to}: {why}"
        case Send(to, SegmentPlaced(segment), why) if segment.request_id == request_id:
            where = f" from {segment.start}" if segment.start else ""
            where += "" if segment.stop is None else f" up to {segment.stop}"
            return f"placed on {to}{where}: {why}"
        case Send(to, SegmentReleased(name, at=at), why) if name == request_id:
            return f"{to} is asked to let it go at the next {at}: {why}"
        case Reject(name, why=why, reason=reason) if name == request_id:
            return f"rejected ({reason}): {why}"
        case Finish(name, reason, error, why) if name == request_id:
            return f"finished ({reason}): {error or why}"
    return None


def _step(
    entry: Entry, event: BatchDone, request_id: str, batch: Batch | None, stay: _Stay | None
) -> Iterator[str]:
    pairs: list[tuple[Step, StepOutcome]] = []
    if batch is not None:
        pairs = list(zip(batch.steps, event.outcomes, strict=True))
    for step, outcome in pairs:
        if step.request_id == request_id:
            if stay is not None:
                stay.take(entry.at_s, outcome.emitted)
            level = "" if step.threshold is None else f" at {step.threshold:g}"
            forced = f" ({outcome.forced} forced)" if outcome.forced else ""
            yield (
                f"{step.kind} step on {entry.instance}{level}: {step.query_tokens} tokens in a "
                f"batch of {len(pairs)}, {event.seconds * 1e3:.2f} ms, "
                f"{outcome.settled} settled{forced}"
            )


def _facts(request: Request) -> str:
    slo = request.slo.e2e_s
    deadline = "no deadline" if slo is None else f"deadline in {slo:g} s"
    sizes = f"prompt {request.prompt_tokens}, at most {request.max_output_tokens} tokens"
    if request.family is Family.AUTOREGRESSIVE:
        ttft, tbt = request.slo.ttft_s, request.slo.tbt_s
        first = "" if ttft is None else f", {ttft:g} s to the first token"
        between = "" if tbt is None else f", {tbt:g} s between tokens"
        return f"{sizes}, {deadline}{first}{between}"
    bounds = request.diffusion.thresholds
    return (
        f"{sizes}, {deadline}, "
        f"threshold {bounds.preferred:g} to {bounds.floor:g}, cache {request.diffusion.cache_mode}"
    )


def _steps(forecast: StepForecast) -> str:
    if len(forecast.steps) == 1:
        return f"{forecast.steps[0]:.1f} more steps, {forecast.output_tokens:.1f} tokens in all"
    pairs = zip(forecast.thresholds, forecast.steps, strict=True)
    return ", ".join(f"{steps:.1f} steps at {level:g}" for level, steps in pairs)

"""What happened to one request, told from an event log: when, what, and why."""

from collections.abc import Iterator
from pathlib import Path

from stepserve.core.actions import Action, Finish, PushChunk, Reject, RunBatch, Send
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
    Predicted,
    RequestArrived,
    RequestCancelled,
    SegmentEnded,
    SegmentExtended,
    SegmentPlaced,
    SegmentReleased,
    TimedOut,
)
from stepserve.core.forecast import StepForecast
from stepserve.core.request import Family, Request
from stepserve.core.step import Batch, Step, StepOutcome

from .event_log import Entry, Scheduler, read_events


def story(path: Path, asked: str) -> Iterator[str]:
    """Lines about a request, with seconds since it arrived. ``asked``: its id, or its reply's.

    Raises FieldError if there is no such request in the log.
    """
    _, entries = read_events(path)
    running: dict[Scheduler, Batch] = {}
    joined: dict[int, tuple[float, SegmentPlaced]] = {}  # by epoch
    request: Request | None = None
    seen = 0
    for entry in entries:
        if isinstance(entry.event, RequestArrived):
            seen += 1
            if entry.event.request.id in (asked, f"{asked}-0"):  # the reply's first choice
                request = entry.event.request
        event = entry.event
        if request and isinstance(event, SegmentPlaced) and event.request.id == request.id:
            joined[event.segment.epoch] = entry.at_s, event
        for line in _lines(entry, request.id if request else "", running):
            if line.startswith("left ") and isinstance(event, SegmentEnded):
                line += _as_predicted(entry.at_s, joined.get(event.segment.epoch))
            since_s = entry.at_s - request.arrival_s if request else 0.0
            yield f"{since_s:9.4f} s  {line}"
    if request is None:
        raise FieldError("--request", f"no {asked!r} among the {seen} requests of {path}")


def _lines(entry: Entry, request_id: str, running: dict[Scheduler, Batch]) -> Iterator[str]:
    event = entry.event
    if isinstance(event, BatchDone):
        yield from _step(entry, event, request_id, running.pop(entry.scheduler, None))
    elif (line := _event(event, request_id) or _handover(entry, request_id)) is not None:
        yield line
    for action in entry.actions:
        if isinstance(action, RunBatch):
            running[entry.scheduler] = action.batch
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
        case SegmentPlaced(segment, cap=cap, source=None) if segment.request_id == request_id:
            until = "" if segment.stop is None else f" until {segment.stop}"
            at = f"at position {segment.start}{until}, cap {cap:g}"
            return f"joined {segment.instance} {at}"
        case SegmentPlaced(segment, source=source) if segment.request_id == request_id:
            return f"room on {segment.instance}, to go on at {segment.start} after {source}"
        case CapsSet(caps) if request_id in dict(caps):
            return f"cap {dict(caps)[request_id]:g}"  # type: ignore[index]
        case SegmentEnded(segment, end, progress) if segment.request_id == request_id:
            return f"left {segment.instance}: {end}, {progress.settled} positions settled"
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
            return f"{here} takes over at {progress.settled}, {progress.emitted} tokens are out"
        case HandoverAcknowledged():
            return f"{here} knows that it was taken over"
        case SegmentExtended():
            return f"{here} goes on to the end: there is no successor any more"
        case TimedOut(stage=stage):
            return f"{here}: time is up for {stage}"
        case HandoverStalled():
            return "the successor made no room in time"
    return None


def _action(action: Action, request_id: str) -> str | None:
    match action:
        case PushChunk(to, name, start=start, stop=stop, why=why) if name == request_id:
            return f"keys and values {start} to {stop} go to {to}: {why}"
        case Send(to, SegmentPlaced(segment), why) if segment.request_id == request_id:
            return f"placed on {to}: {why}"
        case Send(to, SegmentReleased(name, at=at), why) if name == request_id:
            return f"{to} is asked to let it go at the next {at}: {why}"
        case Reject(name, why=why) if name == request_id:
            return f"rejected: {why}"
        case Finish(name, reason, error, why) if name == request_id:
            return f"finished ({reason}): {error or why}"
    return None


def _step(entry: Entry, event: BatchDone, request_id: str, batch: Batch | None) -> Iterator[str]:
    pairs: list[tuple[Step, StepOutcome]] = []
    if batch is not None:
        pairs = list(zip(batch.steps, event.outcomes, strict=True))
    for step, outcome in pairs:
        if step.request_id == request_id:
            level = "" if step.threshold is None else f" at {step.threshold:g}"
            forced = f" ({outcome.forced} forced)" if outcome.forced else ""
            yield (
                f"{step.kind} step on {entry.instance}{level}: {step.query_tokens} tokens in a "
                f"batch of {len(pairs)}, {event.seconds * 1e3:.2f} ms, "
                f"{outcome.settled} settled{forced}"
            )


def _as_predicted(at_s: float, joined: tuple[float, SegmentPlaced] | None) -> str:
    """How long a segment took, beside what its placement was chosen for."""
    if joined is None or joined[1].predicted_s is None:
        return ""
    joined_s, placed = joined
    tbt = placed.predicted_tbt_s
    between = "" if tbt is None else f" and {tbt * 1e3:.1f} ms between tokens"
    took_s = at_s - joined_s
    return f", {took_s:.3f} s after it joined (predicted {placed.predicted_s:.3f} s{between})"


def _facts(request: Request) -> str:
    slo = request.slo.e2e_s
    deadline = "no deadline" if slo is None else f"deadline in {slo:g} s"
    sizes = f"prompt {request.prompt_tokens}, at most {request.max_output_tokens} tokens"
    if request.family is Family.AUTOREGRESSIVE:
        return f"{sizes}, {deadline}"
    bounds = request.diffusion.thresholds
    return (
        f"{sizes}, {deadline}, "
        f"threshold {bounds.preferred:g} to {bounds.floor:g}, cache {request.diffusion.cache_mode}"
    )


def _steps(forecast: StepForecast) -> str:
    if len(forecast.steps) == 1:
        return f"{forecast.steps[0]:.1f} steps, {forecast.output_tokens:.1f} tokens"
    pairs = zip(forecast.thresholds, forecast.steps, strict=True)
    return ", ".join(f"{steps:.1f} steps at {level:g}" for level, steps in pairs)

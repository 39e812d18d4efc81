"""How a global scheduler takes over the cluster of one that is no more.

Every instance is asked what it holds (``StateAsked``), and goes on meanwhile. Until all have
answered, or are lost, nothing is decided: what an instance says before its answer is part of it,
but for ends; all else waits. Then the books are what was found, requests that nobody holds are
queued anew from what reached the frontend, and the events that waited are handled in their order.

Neither paper has this. Not taken over are the queue's order of late requests, successors of
migrations, and a change of the layout that was under way: instances that start are waited for,
on GPUs that it left empty those of the last layout come back.
"""

import itertools
from collections.abc import Iterable, Sequence

from stepserve.core.actions import GlobalAction, Send
from stepserve.core.events import (
    GlobalEvent,
    HandedOff,
    InstanceFound,
    InstanceLost,
    InstanceReported,
    InstanceStopped,
    InstanceUp,
    SchedulerStarted,
    SegmentEnded,
    SegmentReleased,
)
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.instance import HeldSegment
from stepserve.core.protocols import StepProgram
from stepserve.core.request import Progress
from stepserve.core.segment import ReleasePoint, SegmentEnd

from . import splits
from .ledger import Ledger, RequestState
from .lifecycle import RequestStep

WHY = "found by a new scheduler"


class Recovery:
    """What is known while answers of instances are awaited."""

    def __init__(self, event: SchedulerStarted) -> None:
        self.awaiting = {spec.id for spec in event.instances}
        self._number = event.number
        self.layout, self._requests = event.layout, event.requests
        self.waiting: list[GlobalEvent] = []
        self.ended: dict[RequestId, SegmentEnded] = {}
        self._reached = {r.request.id: r.progress for r in event.requests}
        self._found: dict[InstanceId, tuple[HeldSegment, ...]] = {}

    def keeps(self, event: GlobalEvent) -> bool:
        """Take an event into account; ``False`` if the scheduler has to handle it as well."""
        match event:
            case InstanceFound(self._number, spec, segments) if spec.id in self.awaiting:
                self.awaiting.remove(spec.id)
                self._found[spec.id] = segments
            case InstanceStopped(spec):
                self._forget(spec.id)
            case InstanceLost(spec, progress):
                self._forget(spec.id)
                for request_id, reached in progress:
                    self._come_to(request_id, reached)
            case InstanceUp():
                pass
            case SegmentEnded(segment, end, progress) if segment.instance in self.awaiting:
                over = end in (SegmentEnd.FINISHED, SegmentEnd.FAILED)
                if over and segment.request_id in self._reached:
                    self.ended[segment.request_id] = event
                self._come_to(segment.request_id, progress)
                return True
            case InstanceReported(instance) if instance in self.awaiting:
                return True
            case InstanceFound():
                return True  # asked for by somebody else
            case _:
                self.waiting.append(event)
                return True
        return False

    def _forget(self, instance: InstanceId) -> None:
        self.awaiting.discard(instance)
        self._found.pop(instance, None)

    def _come_to(self, request_id: RequestId, progress: Progress) -> None:
        if request_id in self._reached:
            self._reached[request_id] = _furthest(progress, self._reached[request_id])

    def enter(self, ledger: Ledger, program: StepProgram) -> list[GlobalAction]:
        """Make the books what was found; requests without a segment then are run by nobody."""
        rows = itertools.chain.from_iterable(self._found.values())
        held: dict[RequestId, list[HeldSegment]] = {}
        for row in sorted(rows, key=lambda row: row.segment.epoch):
            held.setdefault(row.request.id, []).append(row)
        actions: list[GlobalAction] = []
        taken: list[tuple[RequestState, list[HeldSegment]]] = []
        for request, _, epoch in self._requests:
            progress = self._reached[request.id] or program.start(request)
            # Accepted is accepted: of epoch 0 are those that may still be refused or dropped.
            state = RequestState(request, program.resume(request, progress), epoch=max(1, epoch))
            ledger.requests[request.id] = state
            if request.id not in self.ended:
                taken.append((state, held.pop(request.id, [])))
                actions += _take_over(ledger, *taken[-1])
        actions += _release(ledger, itertools.chain.from_iterable(held.values()))
        for state, segments in taken:
            actions += _complete(ledger, state, segments)
        return actions


def _furthest(said: Progress, before: Progress | None) -> Progress:
    """What a segment says that never began may be less than what is known."""
    return said if before is None or said.emitted >= before.emitted else before


def _take_over(
    ledger: Ledger, state: RequestState, rows: Sequence[HeldSegment]
) -> list[GlobalAction]:
    """Enter what instances hold of a request; without a segment afterwards, nobody runs it.

    Instances may have been between any two messages: segments that do not follow each other
    are of plans that ended.
    """
    runs: list[list[HeldSegment]] = []
    for row in rows:
        last = runs[-1][-1].segment if runs else None
        if last and (last.epoch + 1, last.stop) == (row.segment.epoch, row.segment.start):
            runs[-1].append(row)
        else:
            runs.append([row])
    if not runs:
        return []
    *old, chain = sorted(runs, key=lambda run: (run[0].begun, run[0].segment.epoch))
    actions = _release(ledger, itertools.chain.from_iterable(old))
    first, stop, known = chain[0], chain[-1].segment.stop, state.progress
    if stop is not None and known.emitted > max(0, stop - state.request.prompt_tokens + 1):
        return actions + _release(ledger, chain)  # its successor had begun, and is lost
    ledger.hold(state, *(row.segment for row in chain))
    state.epoch = max(state.epoch, chain[-1].segment.epoch)
    state.forecast, state.cap = first.forecast, first.cap
    if first.leaving:
        state.move(RequestStep.RELEASE)
    state.progress = _furthest(first.progress, known)
    return actions


def _complete(
    ledger: Ledger, state: RequestState, rows: Sequence[HeldSegment]
) -> list[GlobalAction]:
    """Once all is entered: do without a successor that is not there, or a predecessor."""
    first = state.segment
    if first is None:
        return []
    actions: list[GlobalAction] = []
    last = (first, *state.planned)[-1]
    if last.stop is not None:
        actions = splits.go_on(ledger, state, last.epoch + 1, f"{WHY}, without successor")
    if not any(row.begun for row in rows if row.segment.epoch == first.epoch):
        handed = HandedOff(first.request_id, first.epoch, state.progress, wait=False)
        actions.append(Send(first.instance, handed, f"{WHY}, without predecessor"))
    return actions


def _release(ledger: Ledger, rows: Iterable[HeldSegment]) -> list[GlobalAction]:
    """Segments that are nobody's: their instances let them go."""
    actions: list[GlobalAction] = []
    for row in rows:
        segment = row.segment
        ledger.hold_leaving(segment, row.request)
        released = SegmentReleased(segment.request_id, segment.epoch, ReleasePoint.STEP)
        actions.append(Send(segment.instance, released, f"{WHY}, over"))
    return actions

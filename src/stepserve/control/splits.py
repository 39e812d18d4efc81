"""What becomes of a request's further segments when something happens to one of them.

Source: DynaServe 3.6, DynaServe 3.9. Who runs a request is settled between its instances
(``handover``), and heard of when the one lets go or the other reports. Until then the books have it
where it was; a loss is judged by what reached the frontend: a token that the predecessor could not
have made says that the hand-over is done.
"""

from dataclasses import replace

from stepserve.core.actions import GlobalAction, Send
from stepserve.core.events import HandedOff, SegmentExtended, SegmentReleased
from stepserve.core.ids import InstanceId
from stepserve.core.request import Progress
from stepserve.core.segment import ReleasePoint, Segment

from .ledger import ClaimKind, Ledger, RequestState


def planned_on(ledger: Ledger, instance_id: InstanceId) -> list[tuple[RequestState, Segment]]:
    """The planned segments of an instance, with their requests."""
    instance = ledger.instances.get(instance_id)
    names = instance.held(ClaimKind.PLANNED) if instance is not None else []
    rows = [ledger.requests[name] for name in names]
    return [(row, s) for row in rows for s in row.planned if s.instance == instance_id]


def has_begun(state: RequestState, segment: Segment, reached: Progress | None) -> bool:
    """Whether a planned segment has run, as far as the frontend knows."""
    before = max(state.progress.emitted, segment.start - state.request.prompt_tokens + 1)
    return reached is not None and reached.emitted > before


def drop(ledger: Ledger, state: RequestState, why: str, index: int = 0) -> list[GlobalAction]:
    """Take the planned segments from ``index`` on back."""
    dropped, state.planned = state.planned[index:], state.planned[:index]
    return [
        Send(s.instance, SegmentReleased(s.request_id, s.epoch, ReleasePoint.STEP), why)
        for s in dropped
        if ledger.leave(s)
    ]


def do_without(ledger: Ledger, state: RequestState, epoch: int, why: str) -> list[GlobalAction]:
    """There will be no hand-over of that epoch: the segment before it goes on to the end.

    Where there is no room for that it is given up too, and so on; the one that runs is released.
    """
    index = next((i for i, s in enumerate(state.planned) if s.epoch == epoch), None)
    if index is None:
        return []
    return drop(ledger, state, why, index) + go_on(ledger, state, epoch, why)


def go_on(ledger: Ledger, state: RequestState, epoch: int, why: str) -> list[GlobalAction]:
    """The last segment goes on to the end; ``epoch``: of the hand-over that will not be."""
    last = state.planned[-1] if state.planned else state.segment
    assert last is not None, "a request with planned segments is placed"
    if ledger.extend(state, last):
        whole = replace(last, stop=None)
        if state.planned:
            state.planned = (*state.planned[:-1], whole)
        else:
            state.segment = whole
        return [Send(last.instance, SegmentExtended(last.request_id, epoch, whole), why)]
    if state.planned:
        return do_without(ledger, state, last.epoch, why)
    return [state.ask_release(ReleasePoint.STEP, f"{why}; no room to go on")]


def take_over(ledger: Ledger, state: RequestState) -> GlobalAction:
    """The instance that ran it is lost: the next segment begins with what has landed."""
    segment = state.planned[0]
    ledger.promote(state, segment.epoch)
    handed = HandedOff(segment.request_id, segment.epoch, state.progress, wait=False)
    return Send(segment.instance, handed, "its predecessor is lost")

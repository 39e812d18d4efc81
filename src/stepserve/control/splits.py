"""What becomes of a request's further segments when something happens to one of them.

Source: dynaserve.md 3.6, 3.9. Who runs a request is settled between its instances (``handover``),
and heard of when the one lets go or the other reports. Until then the books have it where
it was; a loss is judged by what reached the frontend: a token that the predecessor could not have
made says that the hand-over is done.
"""

from dataclasses import replace

from stepserve.core.actions import GlobalAction, Send
from stepserve.core.events import HandedOff, SegmentExtended, SegmentReleased
from stepserve.core.ids import InstanceId
from stepserve.core.request import Progress
from stepserve.core.segment import ReleasePoint, Segment

from .ledger import Ledger, Tracked


def planned_on(ledger: Ledger, instance_id: InstanceId) -> list[tuple[Tracked, Segment]]:
    """The planned segments of an instance, with their requests."""
    instance = ledger.instances.get(instance_id)
    rows = [ledger.requests[name] for name in instance.expected] if instance is not None else []
    return [(row, s) for row in rows for s in row.planned if s.instance == instance_id]


def has_begun(tracked: Tracked, segment: Segment, reached: Progress | None) -> bool:
    """Whether a planned segment has run, as far as the frontend knows."""
    before = max(tracked.progress.emitted, segment.start - tracked.request.prompt_tokens + 1)
    return reached is not None and reached.emitted > before


def drop(ledger: Ledger, tracked: Tracked, why: str, index: int = 0) -> list[GlobalAction]:
    """Take the planned segments from ``index`` on back."""
    dropped, tracked.planned = tracked.planned[index:], tracked.planned[:index]
    return [
        Send(s.instance, SegmentReleased(s.request_id, s.epoch, ReleasePoint.STEP), why)
        for s in dropped
        if ledger.depart(s)
    ]


def do_without(ledger: Ledger, tracked: Tracked, epoch: int, why: str) -> list[GlobalAction]:
    """There will be no hand-over of that epoch: the segment before it goes on to the end.

    Where there is no room for that it is given up too, and so on; the one that runs is released.
    """
    index = next((i for i, s in enumerate(tracked.planned) if s.epoch == epoch), None)
    if index is None:
        return []
    return drop(ledger, tracked, why, index) + go_on(ledger, tracked, epoch, why)


def go_on(ledger: Ledger, tracked: Tracked, epoch: int, why: str) -> list[GlobalAction]:
    """The last segment goes on to the end; ``epoch``: of the hand-over that will not be."""
    last = tracked.planned[-1] if tracked.planned else tracked.segment
    assert last is not None, "a request with planned segments is placed"
    if ledger.extend(tracked, last):
        whole = replace(last, stop=None)
        if tracked.planned:
            tracked.planned = (*tracked.planned[:-1], whole)
        else:
            tracked.segment = whole
        return [Send(last.instance, SegmentExtended(last.request_id, epoch, whole), why)]
    if tracked.planned:
        return do_without(ledger, tracked, last.epoch, why)
    return [tracked.ask_release(ReleasePoint.STEP, f"{why}; no room to go on")]


def take_over(ledger: Ledger, tracked: Tracked) -> GlobalAction:
    """The instance that ran it is lost: the next segment begins with what has landed."""
    segment = tracked.planned[0]
    ledger.promote(tracked, segment.epoch)
    handed = HandedOff(segment.request_id, segment.epoch, tracked.progress, wait=False)
    return Send(segment.instance, handed, "its predecessor is lost")

"""What outlives a global scheduler: where instances are, which requests are open, who left.

A driver has every event handled here, and tells of each action when it carries it out. When the
scheduler fails, or is to be replaced, ``restart`` makes a new one and says what it has to be told
first (see ``recovery``). Pure, as the schedulers are: live and simulated clusters use the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stepserve.core.actions import Finish, GlobalAction, Rebuild, Reject, Send
from stepserve.core.events import (
    GlobalEvent,
    InstanceLost,
    InstanceStopped,
    InstanceUp,
    OpenRequest,
    RequestArrived,
    RequestCancelled,
    SchedulerStarted,
    SegmentPlaced,
)
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.instance import InstanceSpec
from stepserve.core.request import FinishReason, Progress, Request

from .global_scheduler import GlobalScheduler

_HEARD = {RequestArrived, RequestCancelled, InstanceUp, InstanceStopped, InstanceLost}


@dataclass(slots=True)
class _Open:
    """A request that has no answer yet. ``epoch``: the latest that was sent."""

    request: Request
    epoch: int = 0
    cancelled: FinishReason | None = None


class Supervisor:
    """Holds the present global scheduler, and what the next one has to know.

    ``layout`` is the last that stood: a change that was broken off falls back to it.
    """

    def __init__(self, make: Callable[[], GlobalScheduler]) -> None:
        self._make = make
        self.scheduler = make()
        self.restarts = 0  # schedulers before this one
        self.up: dict[InstanceId, InstanceSpec] = {}
        self.starting: dict[InstanceId, InstanceSpec] = {}
        self.layout: tuple[InstanceSpec, ...] = ()
        self._changes_before = 0  # of the layout, by the schedulers before
        self._open: dict[RequestId, _Open] = {}

    @property
    def layout_changes(self) -> int:
        """Changes of the layout that were begun."""
        return self._changes_before + self.scheduler.reconfiguration.changes

    def handle(self, now_s: float, event: GlobalEvent) -> list[GlobalAction]:
        """Have the scheduler handle an event; returns what is to be done, in order."""
        moved = type(event) in _HEARD and self._hear(event)
        actions = self.scheduler.handle(now_s, event)
        if moved and self.scheduler.stands:
            asked = (action.spec for action in actions if isinstance(action, Rebuild))
            self.layout = (*self.up.values(), *self.starting.values(), *asked)
        return actions

    def _hear(self, event: GlobalEvent) -> bool:
        """Take an event into account; whether an instance came or went."""
        match event:
            case RequestArrived(request):
                self._open.setdefault(request.id, _Open(request))
            case RequestCancelled(request_id, reason):
                row = self._open.get(request_id)
                if row is not None:
                    row.cancelled = row.cancelled or reason
            case InstanceUp(spec):
                self.starting.pop(spec.id, None)
                self.up[spec.id] = spec
                return True
            case InstanceStopped(spec) | InstanceLost(spec):
                self.starting.pop(spec.id, None)
                self.up.pop(spec.id, None)
                return True
        return False

    def note(self, action: GlobalAction) -> None:
        """An action is about to be carried out. One that never is, is not taken for done."""
        match action:
            case Send(_, SegmentPlaced() as placed):
                row = self._open[placed.request.id]
                row.epoch = max(row.epoch, placed.segment.epoch)
            case Rebuild(spec):
                self.starting[spec.id] = spec
            case Finish(request_id) | Reject(request_id):
                self.forget(request_id)

    def forget(self, request_id: RequestId) -> None:
        """The request is over, whether the scheduler said so or not."""
        self._open.pop(request_id, None)

    def start(
        self, layout: Sequence[InstanceSpec], starting: Sequence[InstanceSpec] = ()
    ) -> SchedulerStarted:
        """The first event of a cluster that begins with these instances.

        ``starting``: those that the driver starts itself, without being asked.
        """
        self.layout, self.starting = tuple(layout), {spec.id: spec for spec in starting}
        return SchedulerStarted(0, self.layout)

    def take_over(
        self,
        number: int,
        layout: Sequence[InstanceSpec],
        requests: Sequence[tuple[Request, Progress]],
        up: Sequence[InstanceSpec],
        starting: Sequence[InstanceSpec],
    ) -> SchedulerStarted:
        """The first event after ``number`` schedulers that died with their process."""
        self.restarts, self.layout = number, tuple(layout)
        self.up = {spec.id: spec for spec in up}
        self.starting = {spec.id: spec for spec in starting}
        beyond = number << 20  # what epochs they gave is not known
        self._open = {request.id: _Open(request, beyond) for request, _ in requests}
        known = tuple(OpenRequest(*row, beyond) for row in requests)
        return SchedulerStarted(number, self.layout, known, tuple(up), tuple(starting))

    def restart(self, reached: Callable[[RequestId], Progress | None]) -> list[GlobalEvent]:
        """A new scheduler; returns the events that it has to handle first.

        ``reached``: how far an open request has come, as the frontend knows.
        """
        self._changes_before = self.layout_changes
        self.scheduler = self._make()
        self.restarts += 1
        rows = self._open.items()
        known = tuple(OpenRequest(row.request, reached(name), row.epoch) for name, row in rows)
        up, starting = tuple(self.up.values()), tuple(self.starting.values())
        started = SchedulerStarted(self.restarts, self.layout, known, up, starting)
        cancels = [RequestCancelled(n, r.cancelled) for n, r in rows if r.cancelled is not None]
        return [started, *cancels]

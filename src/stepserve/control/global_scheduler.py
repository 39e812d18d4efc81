"""The cluster's scheduler: admission, the queue, placement, and what to do when things end.

A pure function of (state, time, event), like the local one. A request is in exactly one
place: waiting for its forecast, in the queue, or placed, with further segments planned or not.
"""

import itertools

from stepserve.core.actions import Finish, GlobalAction, Predict, Send
from stepserve.core.config import ControlConfig
from stepserve.core.errors import EventError
from stepserve.core.events import (
    GlobalEvent,
    HandoverStalled,
    InstanceFound,
    InstanceLost,
    InstanceReported,
    InstanceStopped,
    InstanceUp,
    PlanSolved,
    Predicted,
    RequestArrived,
    RequestCancelled,
    SchedulerStarted,
    SegmentEnded,
    SegmentPlaced,
    StateAsked,
)
from stepserve.core.protocols import (
    CostModel,
    MigrationPolicy,
    Placement,
    PlacementPolicy,
    StepProgram,
)
from stepserve.core.request import FinishReason, OnMiss, Request
from stepserve.core.segment import ReleasePoint, Segment, SegmentEnd
from stepserve.core.status import ClusterStatus

from . import splits
from .admission import Admission
from .fair_shares import Charges, FairQueue
from .ledger import ClaimKind, Ledger, RequestState
from .lifecycle import RequestPhase, RequestStep
from .load_control import LoadControl
from .plan_demand import PlanDemand
from .reconfigure import Reconfiguration
from .recovery import WHY, Recovery
from .relocation import Relocation
from .view import status_of

MAX_LOSSES = 6
"""A request whose instances were lost that often is not placed again: it may be the cause."""


TOO_LARGE = "prompt and max_tokens need more KV pages than an instance has"


class GlobalScheduler:
    """Queues by due time, places by policy, and never loses a request it accepted."""

    def __init__(
        self,
        config: ControlConfig,
        program: StepProgram,
        placement: PlacementPolicy,
        migration: MigrationPolicy | None,
        load_control: LoadControl,
        cost: CostModel,
    ) -> None:
        self._config = config
        self._program = program
        self._placement = placement
        self._cost = cost
        self.load_control = load_control
        self.reconfiguration = Reconfiguration()
        self._demand = PlanDemand(config, cost, self.reconfiguration)
        reads_work = getattr(placement, "reads_work", False)
        self.ledger = Ledger(program, config.running_tokens, config.admitted_limit, reads_work)
        self._relocation = Relocation(config, program, migration, cost, self.ledger)
        self._queue = FairQueue(config.tenant_weights)
        self._charges = Charges(self._queue, program, cost)
        waiting = self._queue, self._relocation.entry, self.ledger
        self._admission = Admission(*waiting, program, cost)
        self._recovery: Recovery | None = None

    @property
    def stands(self) -> bool:
        """Whether the layout stands: no change is under way, and no recovery."""
        return self._recovery is None and not self.reconfiguration.under_way

    def status(self) -> ClusterStatus:
        """A snapshot for whoever looks from outside."""
        return status_of(self.ledger, self.reconfiguration, len(self._queue), self._recovery)

    def runs(self, segment: Segment) -> bool:
        """Whether it is the segment that its request runs in now."""
        state = self.ledger.requests.get(segment.request_id)
        return (
            state is not None
            and state.segment is not None
            and (state.segment.epoch == segment.epoch)
        )

    def handle(self, now_s: float, event: GlobalEvent) -> list[GlobalAction]:
        """Take one event into account and return what is to be done, in order."""
        if self._recovery is not None and self._recovery.keeps(event):
            return []
        match event:
            case InstanceReported():
                actions = self._hear(now_s, event)
            case RequestArrived():
                actions = self._arrive(now_s, event.request)
            case Predicted():
                actions = self._admit(now_s, event)
            case RequestCancelled():
                actions = self._cancel(event) + self._place_queued(now_s)
            case SegmentEnded():
                actions = self._end(event) + self._place_queued(now_s)
            case InstanceUp():
                actions = self._come_up(now_s, event) + self._place_queued(now_s)
            case InstanceStopped():
                actions = self._stopped(event)
            case PlanSolved():
                actions = self._demand.take(event.plan, self.ledger)
            case InstanceLost():
                actions = self._lose(event) + self._place_queued(now_s)
            case HandoverStalled():
                actions = self._stalled(event)
            case InstanceFound():
                actions = self._come_up(now_s, event) if self._recovery is not None else []
            case SchedulerStarted():
                actions = self._take_over(event)
        if self._recovery is not None and not self._recovery.awaiting:
            actions += self._recover(now_s, self._recovery)
        if self.load_control.stale:
            actions += self.load_control.update(now_s, self.ledger)
        if self._demand.on:
            actions += self._demand.ask(now_s, self.ledger)
        return actions

    def _take_over(self, event: SchedulerStarted) -> list[GlobalAction]:
        self._recovery = Recovery(event)
        self.reconfiguration.go_on(event.layout, event.starting)
        asked = StateAsked(event.number)
        return [Send(spec.id, asked, "a new scheduler") for spec in event.instances]

    def _recover(self, now_s: float, recovery: Recovery) -> list[GlobalAction]:
        """All have said what they hold: see ``recovery``."""
        self._recovery = None
        requests = self.ledger.requests
        actions = recovery.enter(self.ledger, self._program)
        for request_id, ended in recovery.ended.items():
            actions.append(self._end_of(requests[request_id], ended))
        for state in [t for t in requests.values() if t.segment is None]:
            actions += self._resume(state, WHY)
        self.load_control.changed()
        for spec in self.reconfiguration.missing(recovery.layout, self.ledger):
            actions.append(self.reconfiguration.rebuild(spec, 0.0, "nothing is on its GPUs"))
        for event in recovery.waiting:
            try:
                actions += self.handle(now_s, event)
            except Exception as error:
                raise EventError(event) from error
        return actions

    def _arrive(self, now_s: float, request: Request) -> list[GlobalAction]:
        if request.id in self.ledger.requests:
            return []
        if self._queue.is_full(self._relocation.tenant(request), self._config.queue_limit):
            return [self._admission.turn_away(now_s, request)]
        if not self.ledger.can_ever_hold(request):
            return [Finish(request.id, FinishReason.ERROR, TOO_LARGE, TOO_LARGE)]
        state = RequestState(request, self._program.start(request))
        self.ledger.requests[request.id] = state
        return [self._predict(state, "arrived")]

    def _predict(self, state: RequestState, why: str) -> GlobalAction:
        state.move(RequestStep.PREDICT)
        request = state.request
        thresholds = self._program.thresholds(request, self._config.thresholds)
        return Predict(request, state.progress, thresholds, why)

    def _admit(self, now_s: float, event: Predicted) -> list[GlobalAction]:
        state = self.ledger.requests.get(event.request_id)
        if state is None or state.phase is not RequestPhase.PREDICTING:
            return []
        state.forecast = event.forecast
        is_new = state.epoch == 0
        if is_new:
            self.load_control.admit(state)
            self._demand.count(state)
        if is_new and state.request.slo.on_miss is OnMiss.REJECT:
            refusal = self._admission.refuse(now_s, state)
            if refusal is not None:
                self._forget(state)
                return [refusal]
        state.move(RequestStep.ENQUEUE)
        self._queue.push(*self._relocation.entry(state))
        return self._place_queued(now_s)

    def _place_queued(self, now_s: float) -> list[GlobalAction]:
        """Place from the head of the queue until its head fits nowhere.

        A deadline that passed while its request waited cannot be met any more, so the request
        goes behind those that can still meet theirs; or, with ``fcfs_drop``, it is refused, as
        in the published system (DiLaServe B1).
        """
        actions: list[GlobalAction] = []
        while self._queue:
            state = self.ledger.requests[self._queue.head()[2]]
            entry = self._relocation.entry(state)
            if self._relocation.is_too_late(state, now_s):
                if self._config.queue == "fcfs_drop" and state.epoch == 0:
                    actions.append(self._drop(state, now_s))
                else:
                    self._relocation.give_up(state)
                    self._queue.push(*self._relocation.entry(state))  # first: its tenant never left
                self._queue.remove(*entry)
                continue
            view = self.ledger.view(state.request, now_s)
            if view.loads:
                self._queue.remove(*entry)
                assert state.forecast is not None, "queued requests have a forecast"
                place = self._placement.place
                placement = place(state.request, state.progress, state.forecast, view)
                self._charges.settle(
                    entry[0], state, view.loads[placement.segments[0].instance].spec
                )
                actions += self._send_segments(state, placement)
            elif self.ledger.can_ever_hold(state.request):
                break
            else:
                self._queue.remove(*entry)
                actions.append(self._finish(state, FinishReason.ERROR, TOO_LARGE, TOO_LARGE))
        return actions

    def _send_segments(self, state: RequestState, placement: Placement) -> list[GlobalAction]:
        """The last one first: instances make room before there is anything to be handed over."""
        self.ledger.assign(state, *placement.segments)
        request, progress, forecast = state.request, state.progress, state.forecast
        assert state.segment is not None, "it has just been placed"
        assert forecast is not None, "queued requests have a forecast"
        actions: list[GlobalAction] = []
        source = None
        seconds = placement.predicted_s or itertools.repeat(None)
        rows = zip((state.segment, *state.planned), seconds, strict=False)
        for segment, ends_s in rows:
            at = request, progress, forecast, state.cap, source
            source = segment.instance
            running_requests = len(self.ledger.instances[source].held(ClaimKind.RUNNING))
            why = f"epoch {segment.epoch}, {running_requests} running requests there"
            if placement.why:
                why = f"{why}; {placement.why}"
            placed = SegmentPlaced(segment, *at, ends_s, placement.tbt_s)
            actions.insert(0, Send(source, placed, why))
        return actions

    def _cancel(self, event: RequestCancelled) -> list[GlobalAction]:
        state = self.ledger.requests.get(event.request_id)
        if state is None or state.cancelled is not None:
            return []
        if state.segment is not None:
            state.cancelled = event.reason
            release = state.ask_release(ReleasePoint.STEP, "cancelled")
            return [release, *splits.drop(self.ledger, state, "cancelled")]
        self._queue.remove(*self._relocation.entry(state))
        return [self._finish(state, event.reason, None, "cancelled before it was placed")]

    def _drop(self, state: RequestState, now_s: float) -> GlobalAction:
        refused = self._admission.drop(now_s, state)
        self._forget(state)
        self.load_control.changed()
        return refused

    def _end(self, event: SegmentEnded) -> list[GlobalAction]:
        segment, ledger = event.segment, self.ledger
        if ledger.left(segment):
            return self.reconfiguration.advance(ledger)
        state = ledger.requests.get(segment.request_id)
        if state is None:
            return []
        ledger.promote(state, segment.epoch)  # news of its end may come before others
        if state.segment is None or state.segment.epoch != segment.epoch:
            return []  # an older epoch
        if event.end is SegmentEnd.HANDED_OFF and state.planned:
            state.progress = event.progress
            ledger.promote(state, state.planned[0].epoch)
            ledger.left(segment)
            return self.reconfiguration.advance(ledger)
        dropped = splits.drop(ledger, state, event.end.value)
        ledger.unassign(state)
        # What a segment says that never began may be less than what is known.
        furthest = max(event.progress, state.progress, key=lambda progress: progress.emitted)
        state.progress = self._program.resume(state.request, furthest)
        self.load_control.changed()
        if event.end in (SegmentEnd.FINISHED, SegmentEnd.FAILED):
            actions = [self._end_of(state, event)]
        elif state.migration_target is not None and state.cancelled is None:
            start, to = state.progress.settled, state.migration_target
            after = Segment(state.request.id, segment.index + 1, start, None, to, epoch=0)
            actions = self._send_segments(state, Placement((after,)))
        else:
            actions = self._resume(state, "released")
        return dropped + actions + self.reconfiguration.advance(ledger)

    def _end_of(self, state: RequestState, event: SegmentEnded) -> GlobalAction:
        """A request ended with its segment."""
        if event.end is SegmentEnd.FAILED:
            return self._finish(state, FinishReason.ERROR, event.error, "step failed")
        reason = event.progress.finished or FinishReason.STOP
        return self._finish(state, reason, None, f"{event.progress.steps} steps")

    def _resume(self, state: RequestState, why: str) -> list[GlobalAction]:
        """A request that lost its place: gone if it was cancelled, else queued anew."""
        if state.cancelled is not None:
            return [self._finish(state, state.cancelled, None, "released as asked")]
        reached = state.progress.finished
        if reached is not None:  # only the news of its end was lost
            error = "its step failed" if reached is FinishReason.ERROR else None
            return [self._finish(state, reached, error, "ended before its place was lost")]
        if state.losses >= MAX_LOSSES:
            error = f"given up after {state.losses} losses of its instances"
            return [self._finish(state, FinishReason.ERROR, error, error)]
        self.ledger.cancel_migration(state)
        state.forecast = None  # made for another state, and at least a placement old
        return [self._predict(state, why)]

    def _finish(
        self, state: RequestState, reason: FinishReason, error: str | None, why: str
    ) -> GlobalAction:
        self.ledger.cancel_migration(state)
        self._charges.settle(self._relocation.tenant(state.request), state)
        self._forget(state)
        self.load_control.changed()
        return Finish(state.request.id, reason, error, why)

    def _forget(self, state: RequestState) -> None:
        state.move(RequestStep.END)
        del self.ledger.requests[state.request.id]

    def _hear(self, now_s: float, event: InstanceReported) -> list[GlobalAction]:
        name, batch_ends_s, measured, running_requests, mix = event
        instance = self.ledger.instances.get(name)
        if instance is None:
            return []
        if instance.batch_ends_s != batch_ends_s:
            instance.batch_ends_s, instance.load = batch_ends_s, None
        if measured is not None:
            self.reconfiguration.works(name)
            tokens, rows, seconds = measured
            self._cost.observe(tokens, rows, instance.spec, seconds, mix)
        actions: list[GlobalAction] = []
        if running_requests:
            self.ledger.hear(running_requests)
            self.load_control.changed()
            actions = self._relocation.preempt(now_s, instance, self._queue)
            actions += self._relocation.migrate(instance)
        head = self.ledger.requests[self._queue.head()[2]] if self._queue else None
        if head is not None and self._relocation.is_too_late(head, now_s):
            actions += self._place_queued(now_s)
        return actions

    def _stalled(self, event: HandoverStalled) -> list[GlobalAction]:
        state = self.ledger.requests.get(event.request_id)
        if state is None:
            return []
        return splits.do_without(self.ledger, state, event.epoch, "no room was made in time")

    def _come_up(self, now_s: float, event: InstanceUp | InstanceFound) -> list[GlobalAction]:
        self.ledger.add_instance(event.spec, now_s)
        self.reconfiguration.came_up(event.spec)
        return self.reconfiguration.advance(self.ledger)

    def _stopped(self, event: InstanceStopped) -> list[GlobalAction]:
        self.ledger.remove_instance(event.spec.id)
        if not self.reconfiguration.wants_gone(event.spec):
            why = "stopped for a scheduler that is no more"
            return [self.reconfiguration.rebuild(event.spec, 0.0, why)]
        self.reconfiguration.stopped(event.spec)
        return self.reconfiguration.advance(self.ledger)

    def _lose(self, event: InstanceLost) -> list[GlobalAction]:
        """Ask for a rebuild; re-queue what was there, from what reached the frontend."""
        actions: list[GlobalAction] = []
        reached, name = dict(event.progress), event.spec.id
        planned = splits.planned_on(self.ledger, name)
        for state, segment in planned:
            if splits.has_begun(state, segment, reached.get(state.request.id)):
                self.ledger.promote(state, segment.epoch)
        placed = self.ledger.remove_instance(name)
        for state, segment in planned:
            actions += splits.do_without(self.ledger, state, segment.epoch, f"{name} is lost")
        for state in placed:
            progress = reached.get(state.request.id, state.progress)
            state.progress = self._program.resume(state.request, progress)
            state.losses += 1
            if state.planned and progress.finished is None:
                actions.append(splits.take_over(self.ledger, state))
            else:
                actions += splits.drop(self.ledger, state, "ended")
                actions += self._resume(state, "lost its place")
        rebuilt, changed = self.reconfiguration.lost(event.spec, self.ledger)
        return [*rebuilt, *actions, *changed]

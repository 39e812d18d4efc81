"""Who leaves a place: lost requests, for those in time, and residents that are faster elsewhere.

A request is lost when its deadline cannot be met any more. It is served nevertheless, later: see
``queue_key``.
"""

from collections.abc import Sequence

from stepserve.core.actions import GlobalAction
from stepserve.core.config import ControlConfig
from stepserve.core.ids import RequestId
from stepserve.core.protocols import CostModel, MigrationPolicy, StepProgram
from stepserve.core.request import OnMiss
from stepserve.core.segment import ReleasePoint

from .admission import service_s
from .ledger import Ledger, Tracked, TrackedInstance

PATIENCE_S = 60.0
"""Due time, after arrival, of a request without a deadline, and what a late request is put
back by: nobody starves for longer while others come."""

LOST_PATIENCE_S = 600.0
"""Earliest due time, after arrival, of a lost request that makes way: first come, first served,
and so late that an overload of minutes does not bring them to the head, where they delay
everybody."""

HOPE = 0.9
"""Share of its predicted seconds that a resident is given up for; one that waits: all of them."""

QueueKey = tuple[float, float, RequestId]
"""(due time in seconds, arrival in seconds, id): the order of the queue."""


def queue_key(tracked: Tracked, order: str) -> QueueKey:
    """Due time, then arrival; or arrival alone. Late ones are put back, once.

    ``order``: see ``ControlConfig.queue``.
    """
    request = tracked.request
    if order != "deadline":
        return request.arrival_s, request.arrival_s, request.id
    due_s = request.deadline_s
    if due_s is None:
        due_s = request.arrival_s + PATIENCE_S
    elif tracked.late:
        due_s += PATIENCE_S
        if tracked.makes_way:
            due_s = max(due_s, request.arrival_s + LOST_PATIENCE_S)
    return due_s, request.arrival_s, request.id


class Relocation:
    """Looks at one instance's residents when it reported on them; asks at most one to leave."""

    def __init__(
        self,
        config: ControlConfig,
        program: StepProgram,
        migration: MigrationPolicy | None,
        cost: CostModel,
        ledger: Ledger,
    ) -> None:
        self._config = config
        self._program = program
        self._migration = migration
        self._cost = cost
        self._ledger = ledger

    def is_too_late(self, tracked: Tracked, now_s: float) -> bool:
        """Whether its deadline is lost; with ``fcfs_drop`` its budget is what counts (B1)."""
        slo_s = tracked.request.slo.e2e_s
        if slo_s is None or tracked.late:
            return False
        share = self._config.margin if self._config.queue == "fcfs_drop" else 1.0
        left_s = tracked.request.arrival_s + share * slo_s - now_s
        return left_s < self._least_s(tracked)

    def give_up(self, tracked: Tracked) -> None:
        """Its deadline, not the request."""
        tracked.late = True
        tracked.makes_way = self._config.lost == "make_way"

    def _least_s(self, tracked: Tracked) -> float:
        """Seconds that it still takes at least, where lost requests make way; else 0."""
        forecast, slo = tracked.forecast, tracked.request.slo
        if self._config.lost != "make_way" or forecast is None:
            return 0.0
        believed, loads = 1.0, list(self._ledger.loads())
        if tracked.segment is not None:
            believed, instance = HOPE, self._ledger.instances[tracked.segment.instance]
            loads = [self._ledger.load(instance)]
        if not loads:
            return 0.0
        load = min(loads, key=lambda load: load.residents)  # where there will be room first
        residents = min(load.residents + 1, load.spec.max_residents)
        index = 0 if slo.on_miss is OnMiss.BEST_EFFORT else len(forecast.steps) - 1
        of = tracked.request, tracked.progress, forecast, index, residents
        return believed * service_s(self._program.batches_left(*of), load.spec, self._cost)

    def make_way(
        self, now_s: float, instance: TrackedInstance, queue: Sequence[QueueKey]
    ) -> list[GlobalAction]:
        """Ask a lost resident to leave for a request of the (sorted) queue that is in time."""
        if self._config.lost != "make_way" or instance.draining:
            return []
        requests = self._ledger.requests
        leaving = sum(t.cutting and t.late for t in requests.values())
        if leaving >= len(queue) or requests[queue[leaving][2]].late:
            return []
        for request_id in instance.placed:
            tracked = requests[request_id]
            if tracked.cutting or tracked.progress.finished is not None:
                continue
            if self.is_too_late(tracked, now_s):
                self.give_up(tracked)
            if tracked.late and queue_key(tracked, self._config.queue) > queue[leaving]:
                return [tracked.ask_release(ReleasePoint.CUT, "lost, and others are in time")]
        return []

    def migrate(self, instance: TrackedInstance) -> list[GlobalAction]:
        """Ask one resident to go on elsewhere: the one that gets to its cut first."""
        if self._migration is None or instance.draining or len(instance.placed) < 2:
            return []
        ledger, program = self._ledger, self._program
        rows = [ledger.requests[r] for r in instance.placed]
        rows = [t for t in rows if not t.cutting and t.progress.finished is None]
        if not rows:
            return []
        tracked = min(rows, key=lambda t: program.tokens_to_cut(t.request, t.progress))
        source = ledger.load_without_leavers(instance)
        others = (o for o in ledger.with_room(tracked.request) if o.spec is not instance.spec)
        target = self._migration.target(tracked.request, source, others)
        if target is None:
            return []
        ledger.expect(tracked, target)
        at = ReleasePoint.STEP if self._config.migration == "any_step" else ReleasePoint.CUT
        return [tracked.ask_release(at, f"a step is faster on {target}")]

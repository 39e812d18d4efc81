"""Who leaves a place: infeasible requests, for those in time, and those that are faster elsewhere.

A request is infeasible when its deadline cannot be met any more. It is served nevertheless, later:
see
``queue_key``.
"""

import itertools

from stepserve.core.actions import GlobalAction
from stepserve.core.config import ControlConfig
from stepserve.core.protocols import CostModel, MigrationPolicy, StepProgram
from stepserve.core.request import OnMiss, Request
from stepserve.core.segment import ReleasePoint
from stepserve.core.status import InstancePhase

from .admission import service_s
from .fair_shares import FairQueue, QueueKey
from .ledger import ClaimKind, InstanceState, Ledger, RequestState
from .lifecycle import RequestPhase

_LEAVING = RequestPhase.LEAVING

PATIENCE_S = 60.0
"""Due time, after arrival, of a request without a deadline, and what a late request is put
back by: nobody starves for longer while others come."""

INFEASIBLE_PATIENCE_S = 600.0
"""Earliest due time, after arrival, of an infeasible request that may be preempted: in order of
arrival, and so late that an overload of minutes does not bring them to the head, where they delay
everybody."""

HOPE = 0.9
"""Share of its predicted seconds that a running request is given up for; waiting ones: all."""


def queue_key(state: RequestState, order: str) -> QueueKey:
    """Due time, then arrival; or arrival alone. Late ones are put back, once.

    ``order``: see ``ControlConfig.queue``.
    """
    request = state.request
    if order != "deadline":
        return request.arrival_s, request.arrival_s, request.id
    due_s = request.deadline_s
    if due_s is None:
        due_s = request.arrival_s + PATIENCE_S
    elif state.infeasible:
        due_s += PATIENCE_S
        if state.preemptible:
            due_s = max(due_s, request.arrival_s + INFEASIBLE_PATIENCE_S)
    return due_s, request.arrival_s, request.id


class Relocation:
    """Looks at what runs on an instance when it reports; asks at most one request to leave."""

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

    def tenant(self, request: Request) -> str:
        """Whose it is; nobody's where tenants are not told apart."""
        return request.tenant if self._config.tenant_order == "fair" else ""

    def entry(self, state: RequestState) -> tuple[str, QueueKey]:
        """Its entry in the queue: whose it is, and its key."""
        return self.tenant(state.request), queue_key(state, self._config.queue)

    def is_too_late(self, state: RequestState, now_s: float) -> bool:
        """Whether its deadline is infeasible; ``fcfs_drop`` counts its budget (DiLaServe B1)."""
        if state.request.slo.e2e_s is None or state.infeasible:
            return False
        share = self._config.margin if self._config.queue == "fcfs_drop" else 1.0
        return state.request.left_s(now_s, share) < self._least_s(state)

    def give_up(self, state: RequestState) -> None:
        """Its deadline, not the request."""
        state.infeasible = True
        state.preemptible = self._config.infeasible == "preempt"

    def _least_s(self, state: RequestState) -> float:
        """Seconds that it still takes at least, where infeasible requests are preempted; else 0."""
        forecast, slo = state.forecast, state.request.slo
        if self._config.infeasible != "preempt" or forecast is None:
            return 0.0
        believed, loads = 1.0, list(self._ledger.loads())
        if state.segment is not None:
            believed, instance = HOPE, self._ledger.instances[state.segment.instance]
            loads = [self._ledger.load(instance)]
        if not loads:
            return 0.0
        load = min(loads, key=lambda load: load.running_requests)  # where there will be room first
        running_requests = min(load.running_requests + 1, load.spec.max_running_requests)
        index = 0 if slo.on_miss is OnMiss.BEST_EFFORT else len(forecast.steps) - 1
        of = state.request, state.progress, forecast, index, running_requests
        return believed * service_s(self._program.batches_left(*of), load.spec, self._cost)

    def preempt(
        self, now_s: float, instance: InstanceState, queue: FairQueue
    ) -> list[GlobalAction]:
        """Ask an infeasible request to leave for one that is in time and would go first."""
        if self._config.infeasible != "preempt" or instance.phase is not InstancePhase.UP:
            return []
        requests = self._ledger.requests
        leaving = sum(t.phase is _LEAVING and t.infeasible for t in requests.values())
        after = next(itertools.islice(queue.ranks(), leaving, None), None)
        if after is None or requests[after[1][2]].infeasible:
            return []
        for request_id in instance.held(ClaimKind.RUNNING):
            state = requests[request_id]
            if state.phase is _LEAVING or state.progress.finished is not None:
                continue
            if self.is_too_late(state, now_s):
                self.give_up(state)
            if state.infeasible and queue.rank(*self.entry(state)) > after:
                return [state.ask_release(ReleasePoint.CUT, "infeasible, and others are in time")]
        return []

    def migrate(self, instance: InstanceState) -> list[GlobalAction]:
        """Ask one running request to go on elsewhere: the one that gets to its cut first."""
        if self._migration is None or instance.phase is not InstancePhase.UP:
            return []
        ledger, program = self._ledger, self._program
        names = instance.held(ClaimKind.RUNNING)
        rows = [ledger.requests[name] for name in names]
        rows = [t for t in rows if t.phase is not _LEAVING and t.progress.finished is None]
        if len(names) < 2 or not rows:
            return []
        state = min(rows, key=lambda t: program.tokens_to_cut(t.request, t.progress))
        source = ledger.load_without_leavers(instance)
        others = (o for o in ledger.with_room(state.request) if o.spec is not instance.spec)
        target = self._migration.target(state.request, source, others)
        if target is None:
            return []
        ledger.reserve_migration(state, target)
        return [state.ask_release(self._migration.at, f"a step is faster on {target}")]

"""The queue of several tenants: none below its share of machine time waits for one above it.

Source: the virtual token counters of "Fairness in Serving Large Language Models" (OSDI 2024).
Deviations: tenants are charged machine time, not tokens, because a token costs what its step does;
all of it is charged when a request is placed, as predicted, and corrected to what was run when it
ends, so a wrong hint gains nothing for longer than a request lasts. Counters are not recovered by a
new scheduler: it begins with even ones.

Between two tenants that wait all the while, seconds / weight differ by no more than two requests.
"""

import bisect
from collections.abc import Iterator, Mapping

from stepserve.core.forecast import StepForecast
from stepserve.core.ids import RequestId
from stepserve.core.instance import InstanceSpec
from stepserve.core.protocols import CostModel, StepProgram
from stepserve.core.request import Progress

from .ledger import RequestState

QueueKey = tuple[float, float, RequestId]
"""(due time in seconds, arrival in seconds, id): the order of one tenant's requests."""

Rank = tuple[float, QueueKey]
"""What a tenant had, in seconds of machine time by its weight, and the key of its request."""


class FairQueue:
    """Waiting requests: the tenant that had the least is next, with its first request."""

    def __init__(self, weights: Mapping[str, float], order: str) -> None:
        """``weights``: of tenants, 1 of others; ``order``: see ``ControlConfig.tenant_order``."""
        self._weights, self._together = weights, order == "together"
        self._rows: dict[str, list[QueueKey]] = {}  # of tenants that wait, each sorted
        self._had_s: dict[str, float] = {}  # of every tenant ever seen, by weight
        self._last_s = 0.0  # what the tenant had that was served last
        self._count = 0

    def __len__(self) -> int:
        """All waiting requests."""
        return self._count

    @property
    def shared(self) -> bool:
        """Whether there was more than one tenant; only then is there anything to charge."""
        return len(self._had_s) > 1

    def _name(self, tenant: str) -> str:
        return "" if self._together else tenant

    def _weight(self, name: str) -> float:
        return self._weights.get(name, 1.0)

    def _had(self, name: str) -> float:
        """What it had; one that comes to wait has saved nothing up while it did not."""
        had_s = self._had_s.get(name, 0.0)
        if name in self._rows:
            return had_s
        least_s = min([self._had_s[other] for other in self._rows], default=self._last_s)
        return max(had_s, least_s)

    def push(self, tenant: str, key: QueueKey) -> None:
        """A request begins to wait."""
        name = self._name(tenant)
        self._had_s[name] = self._had(name)
        bisect.insort(self._rows.setdefault(name, []), key)
        self._count += 1

    def remove(self, tenant: str, key: QueueKey) -> None:
        """A request waits no more, if it did."""
        name = self._name(tenant)
        rows = self._rows.get(name, [])
        index = bisect.bisect_left(rows, key)
        if rows[index : index + 1] == [key]:
            del rows[index]
            self._count -= 1
            if not rows:
                del self._rows[name]

    def charge(self, tenant: str, seconds: float, served: bool) -> None:
        """Machine time of a tenant's request: ``served`` now, or a correction (also negative)."""
        name = self._name(tenant)
        self._had_s[name] += seconds / self._weight(name)
        if served:
            self._last_s = self._had_s[name]

    def rank(self, tenant: str, key: QueueKey) -> Rank:
        """Of a request that is placed: it makes room for none of a higher rank."""
        return self._had_s.get(self._name(tenant), 0.0), key

    def ranks(self) -> Iterator[Rank]:
        """Of all waiting requests, tenant by tenant; the first is next."""
        firsts = ((self._had_s[name], rows[0], name) for name, rows in self._rows.items())
        for had_s, _, name in sorted(firsts):
            yield from ((had_s, key) for key in self._rows[name])

    def head(self) -> QueueKey:
        """The request that is next; there must be one."""
        return next(self.ranks())[1]

    def ahead(self, tenant: str, key: QueueKey) -> int:
        """About how many requests go before one that would come to wait now: if all cost alike."""
        name = self._name(tenant)
        own = bisect.bisect_left(self._rows.get(name, []), key)
        turns = (own + 1) / self._weight(name)
        others = (other for other in self._rows if other != name)
        return own + sum(min(len(self._rows[n]), round(turns * self._weight(n))) for n in others)

    def is_full(self, tenant: str, limit: int) -> bool:
        """Whether ``limit`` requests wait, and the tenant's are its share of them by weight."""
        if len(self) < limit:
            return False
        name = self._name(tenant)
        total = sum(self._weight(other) for other in {*self._rows, name})
        return len(self._rows.get(name, [])) >= limit * self._weight(name) / total


class Charges:
    """Charges tenants for their requests: at each placement, and when one is over."""

    def __init__(self, queue: FairQueue, program: StepProgram, cost: CostModel) -> None:
        self._queue, self._program, self._cost = queue, program, cost

    def place(self, state: RequestState, spec: InstanceSpec) -> None:
        """It is placed: what it ran until now, and what it is predicted to run from now on."""
        if self._queue.shared and state.forecast is not None:
            to_come_s = self._machine_s(state, state.progress, state.forecast, spec)
            self._charge(state, spec, self._ran_s(state, spec) + to_come_s, served=True)

    def finish(self, state: RequestState) -> None:
        """It is over: what it ran, no more and no less."""
        if state.charged is not None:
            spec, _ = state.charged
            self._charge(state, spec, self._ran_s(state, spec), served=False)

    def _charge(
        self, state: RequestState, spec: InstanceSpec, seconds: float, served: bool
    ) -> None:
        before_s = state.charged[1] if state.charged is not None else 0.0
        state.charged = spec, seconds
        self._queue.charge(state.request.tenant, seconds - before_s, served)

    def _ran_s(self, state: RequestState, spec: InstanceSpec) -> float:
        """Machine time of the steps until now, as if they had been foreseen from the start."""
        progress, forecast = state.progress, state.forecast
        if not progress.steps or forecast is None:
            return 0.0
        steps = (float(progress.steps),) * len(forecast.steps)
        ran = StepForecast(forecast.thresholds, steps, float(progress.emitted))
        return self._machine_s(state, self._program.start(state.request), ran, spec)

    def _machine_s(
        self, state: RequestState, progress: Progress, forecast: StepForecast, spec: InstanceSpec
    ) -> float:
        """A request's share of batches of a full instance, by tokens, times the GPUs."""
        of = state.request, progress, forecast, 0, spec.max_running_requests
        seconds = 0.0
        for n, tokens, rows, mix in self._program.batches_left(*of):
            share = mix.prefill_tokens / tokens if mix and mix.prefill_tokens else 1.0 / rows
            seconds += n * share * self._cost.step_time_s(tokens, rows, spec, mix)
        return seconds * spec.tp_degree

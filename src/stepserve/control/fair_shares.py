"""The queue of several tenants: none below its share of machine time waits for one above it.

Source: the virtual token counters of "Fairness in Serving Large Language Models" (OSDI 2024).
Deviations: tenants are charged machine time, not tokens; all of it when a request is placed, as
predicted, and corrected to what was run when it is over, so a wrong hint gains nothing for longer
than a request lasts. A new scheduler begins with even counters. Between two tenants that wait all
the while, seconds by weight differ by no more than two requests.
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

    def __init__(self, weights: Mapping[str, float]) -> None:
        """``weights``: of tenants, 1 of others."""
        self._weights = weights
        self._rows: dict[str, list[QueueKey]] = {}  # of tenants that wait, each sorted
        self.had_s: dict[str, float] = {}  # of every tenant ever seen, by weight
        self._last_s = 0.0  # what the tenant had that was served last
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def push(self, tenant: str, key: QueueKey) -> None:
        """A request begins to wait. Its tenant has saved nothing up while none of its did."""
        if tenant not in self._rows:
            least_s = min([self.had_s[other] for other in self._rows], default=self._last_s)
            self.had_s[tenant] = max(self.had_s.get(tenant, 0.0), least_s)
        bisect.insort(self._rows.setdefault(tenant, []), key)
        self._count += 1

    def remove(self, tenant: str, key: QueueKey) -> None:
        """A request waits no more, if it did."""
        rows = self._rows.get(tenant, [])
        index = bisect.bisect_left(rows, key)
        if rows[index : index + 1] == [key]:
            del rows[index]
            self._count -= 1
            if not rows:
                del self._rows[tenant]

    def charge(self, tenant: str, seconds: float, served: bool) -> None:
        """Machine time of a tenant's request: ``served`` now, or a correction (also negative)."""
        self.had_s[tenant] += seconds / self._weight(tenant)
        if served:
            self._last_s = self.had_s[tenant]

    def rank(self, tenant: str, key: QueueKey) -> Rank:
        """Of a request that is placed: it makes room for none of a higher rank."""
        return self.had_s.get(tenant, 0.0), key

    def ranks(self) -> Iterator[Rank]:
        """Of all waiting requests, tenant by tenant; the first is next."""
        firsts = ((self.had_s[name], rows[0], name) for name, rows in self._rows.items())
        for had_s, _, name in sorted(firsts):
            yield from ((had_s, key) for key in self._rows[name])

    def head(self) -> QueueKey:
        """The request that is next; there must be one."""
        return next(self.ranks())[1]

    def ahead(self, tenant: str, key: QueueKey) -> int:
        """About how many requests go before one that would come to wait now: if all cost alike."""
        own = bisect.bisect_left(self._rows.get(tenant, []), key)
        turns = (own + 1) / self._weight(tenant)
        others = (name for name in self._rows if name != tenant)
        return own + sum(min(len(self._rows[n]), round(turns * self._weight(n))) for n in others)

    def is_full(self, tenant: str, limit: int) -> bool:
        """Whether ``limit`` requests wait, and the tenant's are its share of them by weight."""
        share = self._weight(tenant) / sum(map(self._weight, {*self._rows, tenant}))
        return len(self) >= limit and len(self._rows.get(tenant, [])) >= limit * share


class Charges:
    """Charges tenants for their requests: at each placement, and when one is over."""

    def __init__(self, queue: FairQueue, program: StepProgram, cost: CostModel) -> None:
        self._queue, self._program, self._cost = queue, program, cost

    def settle(self, tenant: str, state: RequestState, on: InstanceSpec | None = None) -> None:
        """What a request ran until now; placed ``on`` an instance, what is predicted to come, too.

        Nothing is charged while there is one tenant.
        """
        placed = on is not None and len(self._queue.had_s) > 1
        spec = on if placed else state.charged and state.charged[0]
        progress, forecast = state.progress, state.forecast
        if not spec or forecast is None:
            return
        steps = (float(progress.steps),) * len(forecast.steps)
        ran = StepForecast(forecast.thresholds, steps, float(progress.emitted))
        start = self._program.start(state.request)
        seconds = self._machine_s(state, start, ran, spec) if progress.steps else 0.0
        if placed:
            seconds += self._machine_s(state, progress, forecast, spec)
        before_s = state.charged[1] if state.charged else 0.0
        state.charged = spec, seconds
        self._queue.charge(tenant, seconds - before_s, placed)

    def _machine_s(
        self, state: RequestState, progress: Progress, forecast: StepForecast, spec: InstanceSpec
    ) -> float:
        """A request's share of batches of a full instance, by tokens, times the GPUs."""
        seconds, of = 0.0, (state.request, progress, forecast, 0, spec.max_running_requests)
        for n, tokens, rows, mix in self._program.batches_left(*of):
            share = mix.prefill_tokens / tokens if mix and mix.prefill_tokens else 1.0 / rows
            seconds += n * share * self._cost.step_time_s(tokens, rows, spec, mix)
        return seconds * spec.tp_degree

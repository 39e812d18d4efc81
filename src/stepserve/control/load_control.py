"""When threshold caps are worked out, from what, and who is told.

The rule itself is a policy (``threshold/load_caps`` and its siblings). Source: DiLaServe A2.2 and
DiLaServe B6. Caps are stale after an arrival, an end or a new forecast, and are worked out at most
every ``every_s`` (DiLaServe B1: about once per second); the scheduler that owns this needs no
timer, because nothing can have changed while it heard nothing.
"""

import math
from collections.abc import Sequence

from stepserve.core.actions import GlobalAction, Send
from stepserve.core.events import CapsSet
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.instance import InstanceSpec
from stepserve.core.protocols import CapPolicy, CostModel, Demand, StepProgram
from stepserve.core.status import InstancePhase

from .ledger import Ledger, RequestState

BELIEVED = 0.7
"""Share of the fastest predicted remaining time that is required of a deadline (DiLaServe B6)."""


class LoadControl:
    """Keeps ``RequestState.cap`` of every request, and tells instances what changed."""

    def __init__(
        self, policy: CapPolicy | None, program: StepProgram, cost: CostModel, every_s: float
    ) -> None:
        """No policy: no caps."""
        self._policy = policy
        self._program = program
        self._cost = cost
        self._every_s = every_s
        self._next_s = -math.inf
        self.stale = False  # whether ``update`` may have something to do
        self._level = 0

    def admit(self, state: RequestState) -> None:
        """A new request starts at the lowest level handed out in the last update (DiLaServe B6).

        Deviations: a level, because candidates are the request's own; levels at a request's
        floor do not count unless all are, because that is where infeasible requests are.
        """
        if state.forecast is not None and self._level:
            thresholds = state.forecast.thresholds
            state.cap = thresholds[min(self._level, len(thresholds) - 1)]
        self.stale = True

    def changed(self) -> None:
        """Demand is no longer what the caps were worked out from."""
        self.stale = True

    def update(self, now_s: float, ledger: Ledger) -> list[GlobalAction]:
        """Work the caps out anew if they are stale and it is time; tell who has a new one."""
        if not self.stale or now_s < self._next_s or self._policy is None:
            return []
        self.stale, self._next_s = False, now_s + self._every_s
        up = InstancePhase.UP
        specs = [instance.spec for instance in ledger.instances.values() if instance.phase is up]
        rows = [t for t in ledger.requests.values() if t.forecast is not None and not t.preemptible]
        if not specs or not rows:
            self._level = 0
            return []
        fastest = max(specs, key=lambda spec: spec.tp_degree)
        demands = [self._demand(state, fastest) for state in rows]
        caps = self._policy.caps(demands, specs, now_s)
        self._level = _lowest_level(demands, caps)
        changed: dict[InstanceId, list[tuple[RequestId, float]]] = {}
        for state, cap in zip(rows, caps, strict=True):
            if cap != state.cap:
                state.cap = cap
                if state.segment is not None:
                    changed.setdefault(state.segment.instance, []).append((state.request.id, cap))
        why = f"{len(rows)} requests, caps {min(caps):g} to {max(caps):g}"
        return [Send(to, CapsSet(tuple(pairs)), why) for to, pairs in changed.items()]

    def _demand(self, state: RequestState, fastest: InstanceSpec) -> Demand:
        request, progress, forecast = state.request, state.progress, state.forecast
        assert forecast is not None, "only requests with a forecast are asked about"
        program, steps_run = self._program, progress.steps
        heavy_left = program.heavy_left(request, progress, forecast.output_tokens)
        steps = [forecast.remaining(i, steps_run) for i in range(len(forecast.thresholds))]
        heavy = [min(n, heavy_left) for n in steps]
        step_s = self._cost.step_time_s(program.full_tokens(request), 1, fastest)
        return Demand(
            request=request,
            done=(progress.settled - request.prompt_tokens) / request.max_output_tokens,
            thresholds=forecast.thresholds,
            heavy=tuple(heavy),
            light=tuple(n - h for n, h in zip(steps, heavy, strict=True)),
            heavy_tokens=program.heavy_tokens(request),
            light_tokens=program.light_tokens(request),
            least_s=BELIEVED * steps[-1] * step_s,
        )


def _lowest_level(demands: Sequence[Demand], caps: Sequence[float]) -> int:
    """The lowest level (0: highest threshold) above the floor; the floor's if all are there."""
    levels = [d.thresholds.index(cap) for d, cap in zip(demands, caps, strict=True)]
    above = [k for k, d in zip(levels, demands, strict=True) if k < len(d.thresholds) - 1]
    return max(above or levels)

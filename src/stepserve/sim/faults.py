"""What goes wrong in a simulated run, decided by a seed.

The schedulers never see this: they see what a real cluster would show them.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from stepserve.core.bounds import Bounded, Chance, FiniteNotNegative, FinitePositive, Whole
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.request import FinishReason
from stepserve.core.step import Batch, StepOutcome


@dataclass(frozen=True, slots=True)
class FaultConfig(Bounded, path="setting.faults"):
    """Rates of things that go wrong; all 0 for none.

    ``losses_per_hour``: of each instance. ``false_loss_share``: losses of instances that were
    only slow; what they had said arrives after they were given up. ``restarts_per_hour``: of the
    global scheduler, which is replaced by one that knows nothing. ``row_error_rate``: chance
    that a row of a batch fails. ``late_share``: chance that a message between schedulers is
    held up for ``late_s``, and those behind it, too; ``jitter_s``: every message takes up to
    so much longer. ``slow_instances`` take ``slow_factor`` as long for
    every batch. ``step_cv``: coefficient of variation of a batch's time.
    """

    losses_per_hour: FiniteNotNegative = 0.0
    false_loss_share: Chance = 0.0
    restarts_per_hour: FiniteNotNegative = 0.0
    row_error_rate: Chance = 0.0
    late_share: Chance = 0.0
    late_s: FiniteNotNegative = 0.5
    jitter_s: FiniteNotNegative = 0.0
    slow_instances: Whole = 0
    slow_factor: FinitePositive = 2.0
    step_cv: FiniteNotNegative = 0.0


class Faults:
    """Draws what goes wrong. One stream of numbers per kind, so that kinds do not interact."""

    def __init__(self, config: FaultConfig, seed: int) -> None:
        self._config = config
        self._losses, self._rows, self._late, self._noise, self._restarts = (
            random.Random(f"{seed}/faults/{kind}")
            for kind in ("loss", "row", "late", "noise", "restart")
        )
        self.rows_fail = config.row_error_rate > 0.0
        self.messages_vary = config.late_share > 0.0 or config.jitter_s > 0.0
        self.steps_vary = config.step_cv > 0.0

    def life_s(self) -> float:
        """Seconds until an instance that comes up now is lost; infinite without losses."""
        rate = self._config.losses_per_hour / 3600.0
        return self._losses.expovariate(rate) if rate > 0.0 else math.inf

    def restart_s(self) -> float:
        """Seconds until the global scheduler is replaced; infinite if never."""
        rate = self._config.restarts_per_hour / 3600.0
        return self._restarts.expovariate(rate) if rate > 0.0 else math.inf

    def false_alarm(self) -> bool:
        """Whether an instance that is given up was only slow."""
        return self._losses.random() < self._config.false_loss_share

    def slowdowns(self, instances: Sequence[InstanceId]) -> dict[InstanceId, float]:
        """Factor on every batch of the instances that are slow."""
        slow = self._noise.sample(list(instances), min(self._config.slow_instances, len(instances)))
        return dict.fromkeys(slow, self._config.slow_factor)

    def held_up_s(self) -> float:
        """Seconds that a message takes longer than it should."""
        config, draw = self._config, self._late.random
        return draw() * config.jitter_s + (config.late_s if draw() < config.late_share else 0.0)

    def noise(self) -> float:
        """Factor of mean 1 on the time of a batch."""
        sigma = math.sqrt(math.log1p(self._config.step_cv**2))
        return self._noise.lognormvariate(-sigma * sigma / 2.0, sigma)

    def split(self, batch: Batch) -> tuple[Batch, tuple[StepOutcome, ...]]:
        """The part of a batch that runs, and the outcomes of the rows that fail instead."""
        rate, draw = self._config.row_error_rate, self._rows.random
        failed = {step.request_id for step in batch.steps if draw() < rate}
        kept = tuple(step for step in batch.steps if step.request_id not in failed)
        lost = [step.request_id for step in batch.steps if step.request_id in failed]
        return Batch(batch.id, kept), tuple(map(_failed, lost))


def _failed(request_id: RequestId) -> StepOutcome:
    return StepOutcome(request_id, 0, 0, FinishReason.ERROR, error="the row failed (injected)")

"""As much prefill beside the decodes as the tightest gap between two tokens allows.

DynaServe's local scheduler, as published (DynaServe 1.4, DynaServe 3.3).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stepserve.core.bounds import NotNegative, Share
from stepserve.core.instance import InstanceSpec
from stepserve.core.protocols import Parts
from stepserve.core.running import RunningRequest
from stepserve.core.step import Mix, Step

from .chunked_prefill import ChunkedPrefill, Row


class TbtBudget(ChunkedPrefill):
    """M is the largest multiple of a page with which the batch is predicted to end in time.

    Never above ``control.chunk_tokens``. Where nothing is decoded, the targets of the prefills
    bound the batch: a decode may join while it runs.
    """

    @dataclass(frozen=True, slots=True)
    class Options(ChunkedPrefill.Options):
        """How much of the target a batch may take."""

        safety: Share = 0.95  # share of the target
        overhead_s: NotNegative = 0.001  # what is taken off for the host

    def __init__(self, options: Options, parts: Parts) -> None:
        super().__init__(options, parts)
        self._safety, self._overhead_s = options.safety, options.overhead_s

    def room(
        self, decoding: Sequence[Row], waiting: Sequence[Row], spec: InstanceSpec, now_s: float
    ) -> int:
        """By bisection over pages; 0 if the decodes leave no time."""
        limit_s = math.inf
        for running, step in decoding or waiting:
            limit_s = min(limit_s, self.left_s(running, step, now_s))
        limit_s = limit_s * self._safety - self._overhead_s
        prefills = [step for _, step in waiting]
        page, mix, cost = spec.page_tokens, Mix.of, self._cost
        _, _, rows, context = mix([step for _, step in decoding])

        def fits(tokens: int) -> bool:
            chunks = self.fill(prefills, tokens, page)
            batch = mix(chunks)._replace(decodes=rows, decode_context=context)
            executed = batch.prefill_tokens + rows
            return cost.step_time_s(executed, rows + len(chunks), spec, batch) <= limit_s

        top = min(self._chunk_tokens, sum([step.query_tokens for step in prefills]))
        if fits(top):
            return top
        low, high = 0, -(-top // page)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle * page) else (low, middle)
        return low * page

    def left_s(self, running: RunningRequest, step: Step, now_s: float) -> float:
        """Seconds that the batch may take for this one: its target."""
        return running.request.slo.scheduled_tbt_s or self._tbt_s

"""Decodes first, then as much prefill as the tightest gap between two tokens allows.

DynaServe's local scheduler (DynaServe 1.4, DynaServe 3.3): ``latency_budget`` of autoregressive
models.
"""

import math
from collections.abc import Sequence

from stepserve.core.config import TokenConfig
from stepserve.core.instance import InstanceSpec
from stepserve.core.protocols import CostModel, StepProgram
from stepserve.core.running import RunningRequest, StepPace
from stepserve.core.step import Mix, Step

OVERDUE = 16
"""A prefill left out for so many times ``starvation_batches`` goes first, whatever the order."""

Row = tuple[RunningRequest, Step]


class TokenBudget:
    """Every decode is in every batch; prefills share M tokens in the order configured.

    M is the largest multiple of a page with which the batch is predicted to end in time, never
    above ``chunk_tokens``. Where nothing is decoded, the targets of the prefills bound the
    batch: a decode may join while it runs. Chunks end where a page, prompt or segment does.

    Guard (DynaServe 3.3): if no prefill ran for ``starvation_batches`` or ``starved_s``, the next
    one gets ``least_chunk_tokens``, at the cost of a late token.

    Ours: ``budget = "age"`` subtracts the time since a decode's last token, at most half of its
    target, so that a token that is late already makes the batch shorter, not empty of
    prefills. With ``ttft = "respect"``, prefills that can still meet a TTFT target go first,
    the earliest due first; they take no more of the batch than others would. No order
    starves a prefill for ever (``OVERDUE``).
    """

    def __init__(
        self,
        cost: CostModel,
        program: StepProgram,
        options: TokenConfig,
        starvation_batches: int,
    ) -> None:
        self._cost = cost
        self._program = program
        self._options = options
        self._starvation_batches = starvation_batches
        self._left_out = 0  # batches in a row without a prefill although one was due
        self._served_s = -math.inf  # when a prefill began last, or none was due

    def pace(self, running_requests: Sequence[RunningRequest], spec: InstanceSpec) -> StepPace:
        """The target: no batch is to take longer. Thresholds, which pace is for, have one value."""
        return StepPace(self._options.tbt_s, self._options.tbt_s)

    def compose(
        self, candidates: Sequence[Row], spec: InstanceSpec, now_s: float
    ) -> tuple[Step, ...]:
        """All decodes and, in turn, the prefills or chunks of them that fit."""
        decoding = [row for row in candidates if not row[1].kind.heavy]
        chunks: list[Step] = []
        if len(decoding) < len(candidates):
            waiting = [row for row in candidates if row[1].kind.heavy]
            chunks = self._chunks(decoding, waiting, spec, now_s)
        self._left_out += 1
        if chunks or len(decoding) == len(candidates):
            self._left_out, self._served_s = 0, now_s
        return (*[step for _, step in decoding], *chunks)

    def _chunks(
        self, decoding: list[Row], waiting: list[Row], spec: InstanceSpec, now_s: float
    ) -> list[Step]:
        """What to prefill beside these decodes; something if there are none."""
        options = self._options
        if len(waiting) > 1:
            waiting.sort(key=lambda row: self._turn(row[0], row[1], now_s))
        prefills = [step for _, step in waiting]
        tokens = max(options.chunk_tokens, spec.page_tokens)
        if options.budget != "none":
            limit_s = self._limit_s(decoding or waiting, now_s)
            tokens = self._fitting(prefills, [step for _, step in decoding], limit_s, spec)
        waited_s = now_s - max(self._served_s, waiting[0][0].joined_s)
        starved = self._left_out >= self._starvation_batches or waited_s >= options.starved_s
        if starved or not decoding:
            tokens = max(tokens, options.least_chunk_tokens, spec.page_tokens)
        return self._fill(prefills, tokens, spec.page_tokens)

    def _limit_s(self, rows: Sequence[Row], now_s: float) -> float:
        """Seconds that the batch may take for the tightest of these."""
        options, limit_s = self._options, math.inf
        for running, step in rows:
            left_s = target_s = running.request.slo.tbt_s or options.tbt_s
            if options.budget == "age" and not step.kind.heavy:
                left_s -= min(now_s - running.last_token_s, 0.5 * target_s)
            limit_s = min(limit_s, left_s)
        return limit_s * options.safety - options.overhead_s

    def _fitting(
        self, prefills: Sequence[Step], decodes: Sequence[Step], limit_s: float, spec: InstanceSpec
    ) -> int:
        """M, by bisection over pages; 0 if the decodes leave no time."""
        page, mix, cost = spec.page_tokens, Mix.of, self._cost
        _, _, rows, context = mix(decodes)

        def fits(tokens: int) -> bool:
            chunks = self._fill(prefills, tokens, page)
            batch = mix(chunks)._replace(decodes=rows, decode_context=context)
            executed = batch.prefill_tokens + rows
            return cost.step_time_s(executed, rows + len(chunks), spec, batch) <= limit_s

        top = min(self._options.chunk_tokens, sum([step.query_tokens for step in prefills]))
        if fits(top):
            return top
        low, high = 0, -(-top // page)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle * page) else (low, middle)
        return low * page

    def _fill(self, prefills: Sequence[Step], tokens: int, page_tokens: int) -> list[Step]:
        """The first prefills of up to so many tokens together, the last of them perhaps cut."""
        chunks: list[Step] = []
        for step in prefills:
            if step.query_tokens > tokens:
                ends_at = step.context_tokens - step.query_tokens + tokens
                part = self._program.shorten(step, tokens - ends_at % page_tokens)
                return chunks if part is None else [*chunks, part]
            chunks.append(step)
            tokens -= step.query_tokens
        return chunks

    def _turn(
        self, running: RunningRequest, step: Step, now_s: float
    ) -> tuple[bool, float, float, float]:
        """Sorts prefills: overdue ones, then TTFT targets, the configured order, arrival."""
        request, slo, options = running.request, running.request.slo, self._options
        if running.skipped >= OVERDUE * self._starvation_batches:
            return False, 0.0, 0.0, request.arrival_s
        first_s = math.inf
        if slo.ttft_s is not None and not running.progress.emitted:
            first_s = request.arrival_s + slo.ttft_s
        respected = options.ttft == "respect" and first_s >= now_s
        rank = {
            "fcfs": 0.0,
            "priority": -slo.weight,
            "shortest": float(step.query_tokens),
            "deadline": min(first_s, request.deadline_s or math.inf),
        }[options.order]
        return True, first_s if respected else math.inf, rank, request.arrival_s

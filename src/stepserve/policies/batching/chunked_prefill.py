"""Decodes first, then prefills in chunks: what batching of autoregressive models has in common.

DynaServe's local scheduler (DynaServe 1.4, DynaServe 3.3) but for M, the tokens of prefill that a
batch has room for: ``static_chunk``, ``tbt_budget`` and ``age_budget`` differ in that.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from stepserve.core.bounds import Bounded, Count, Positive, among
from stepserve.core.errors import check
from stepserve.core.instance import InstanceSpec
from stepserve.core.protocols import Parts
from stepserve.core.request import Family
from stepserve.core.running import RunningRequest, StepPace
from stepserve.core.step import Step

ORDERS = ("fcfs", "priority", "shortest", "deadline")

OVERDUE = 16
"""A prefill left out for so many times ``starvation_batches`` goes first, whatever the order."""

Row = tuple[RunningRequest, Step]


class ChunkedPrefill(ABC):
    """Every decode is in every batch; prefills share M tokens in the order configured.

    Chunks end where a page, prompt or segment does.

    Guard (DynaServe 3.3): if no prefill ran for ``starvation_batches`` or ``starved_s``, the next
    one gets ``least_chunk_tokens``, at the cost of a late token.

    Ours: prefills that can still meet a TTFT target go first, the earliest due first; they take no
    more of the batch than others would. No order starves a prefill for ever (``OVERDUE``).
    """

    family = Family.AUTOREGRESSIVE

    @dataclass(frozen=True, slots=True)
    class Options(Bounded):
        """Of prefills. One that is starved is computed even if a token is late for it."""

        order: Annotated[str, among(ORDERS)] = "fcfs"  # priority: by slo.weight
        ignore_ttft: bool = False  # false: those that can meet a TTFT target first; published: true
        least_chunk_tokens: Count = 64  # what a starved prefill gets
        starvation_batches: Count = 4  # batches without a prefill until one is starved
        starved_s: Positive = 0.4  # seconds without a prefill until one is starved

        @property
        def weighs(self) -> bool:
            """Whether ``slo.weight`` counts."""
            return self.order == "priority"

    def __init__(self, options: Options, parts: Parts) -> None:
        """Raises FieldError if the guard's chunk is more than a batch may have."""
        fits = options.least_chunk_tokens <= parts.control.chunk_tokens
        check(fits, "least_chunk_tokens", "must be at most control.chunk_tokens")
        self._options = options
        self._program, self._cost = parts.program, parts.cost
        self._tbt_s, self._chunk_tokens = parts.control.tbt_s, parts.control.chunk_tokens
        self._left_out = 0  # batches in a row without a prefill although one was due
        self._served_s = -math.inf  # when a prefill began last, or none was due

    def pace(self, running_requests: Sequence[RunningRequest], spec: InstanceSpec) -> StepPace:
        """The target: no batch is to take longer. Thresholds, which pace is for, have one value."""
        return StepPace(self._tbt_s, self._tbt_s)

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

    @abstractmethod
    def room(
        self, decoding: Sequence[Row], waiting: Sequence[Row], spec: InstanceSpec, now_s: float
    ) -> int:
        """M: tokens of the prefills, which wait in this order, beside the decodes."""

    def _chunks(
        self, decoding: list[Row], waiting: list[Row], spec: InstanceSpec, now_s: float
    ) -> list[Step]:
        """What to prefill beside these decodes; something if there are none."""
        options = self._options
        if len(waiting) > 1:
            waiting.sort(key=lambda row: self._turn(row[0], row[1], now_s))
        tokens = self.room(decoding, waiting, spec, now_s)
        waited_s = now_s - max(self._served_s, waiting[0][0].joined_s)
        starved = self._left_out >= options.starvation_batches or waited_s >= options.starved_s
        if starved or not decoding:
            tokens = max(tokens, options.least_chunk_tokens, spec.page_tokens)
        return self.fill([step for _, step in waiting], tokens, spec.page_tokens)

    def fill(self, prefills: Sequence[Step], tokens: int, page_tokens: int) -> list[Step]:
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
        if running.skipped >= OVERDUE * options.starvation_batches:
            return False, 0.0, 0.0, request.arrival_s
        first_s = math.inf
        if slo.ttft_s is not None and not running.progress.emitted:
            first_s = request.arrival_s + slo.ttft_s
        respected = not options.ignore_ttft and first_s >= now_s
        rank = {
            "fcfs": 0.0,
            "priority": -slo.weight,
            "shortest": float(step.query_tokens),
            "deadline": min(first_s, request.deadline_s or math.inf),
        }[options.order]
        return True, first_s if respected else math.inf, rank, request.arrival_s

"""What steps do to autoregressive requests: how long outputs get, what is held where.

Keys and values of a request exist on an instance as far as it executed inputs there, or as
chunks landed. A step has to begin where they end: one that begins later would read what does
not exist, one that begins earlier would do work twice. Both are refused, and so is a decode
step that is not over the newest token. What a request that is handed over begins with is said
when it begins: its scheduler need not have counted on a chunk that was late.

Deviations from an engine: no token has a value, and a chunk that comes too late is not written.
"""

from collections.abc import Callable

from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.request import FinishReason, Progress, Request
from stepserve.core.step import Batch, Step, StepKind, StepOutcome


class ArTruth:
    """What is true of one request: its length, and what reached the frontend so far.

    ``executed`` counts inputs: ``prompt_tokens + output_tokens - 1`` if none was computed twice.
    """

    __slots__ = ("emitted", "executed", "output_tokens", "prompt_tokens", "reason")

    def __init__(self, request: Request, ends_at: int | None) -> None:
        limit = request.max_output_tokens
        self.prompt_tokens = request.prompt_tokens
        self.output_tokens = limit if ends_at is None else min(ends_at, limit)
        by_itself = ends_at is not None and ends_at <= limit
        self.reason = FinishReason.STOP if by_itself else FinishReason.LENGTH
        self.emitted = self.executed = 0


class ArExecutors:
    """``Executors`` and ``KvCopies`` of autoregressive requests. Truths are kept."""

    def __init__(self, ends_at: Callable[[int], int | None] = lambda _: None) -> None:
        """``ends_at``: output length at which the ``index``-th request ends by itself."""
        self._ends_at = ends_at
        self.truths: dict[RequestId, ArTruth] = {}
        self.held: dict[InstanceId, dict[RequestId, int]] = {}  # positions with keys and values
        self._filling: set[tuple[InstanceId, RequestId]] = set()  # no step was run yet

    def arrive(self, index: int, request: Request) -> None:
        """See ``Executors.arrive``."""
        self.truths[request.id] = ArTruth(request, self._ends_at(index))

    def load(self, instance: InstanceId, request: Request, progress: Progress) -> None:
        """See ``Executors.load``. The second says that what landed is enough to begin with."""
        rows, name = self.held.setdefault(instance, {}), request.id
        if name in rows:
            assert (instance, name) in self._filling, f"{name} is on {instance} already"
            assert progress.settled <= rows[name], f"{progress} with only {rows[name]} landed"
            rows[name] = progress.settled
            self._filling.remove((instance, name))
        else:
            rows[name] = 0
            self._filling.add((instance, name))

    def run(self, instance: InstanceId, batch: Batch) -> tuple[StepOutcome, ...]:
        """See ``Executors.run``."""
        rows, filling = self.held[instance], self._filling
        outcomes = tuple([self._step(instance, rows, step) for step in batch.steps])
        if filling:
            filling.difference_update([(instance, step.request_id) for step in batch.steps])
        return outcomes

    def _step(self, instance: InstanceId, rows: dict[RequestId, int], step: Step) -> StepOutcome:
        request_id, kind, query, context, _ = step
        truth = self.truths[request_id]
        if truth.emitted == truth.output_tokens:  # the news of its end was lost
            return StepOutcome(request_id, 0, truth.emitted, truth.reason)
        known = truth.prompt_tokens + truth.emitted
        held = rows[request_id]
        if held != context - query:
            first = (instance, request_id) in self._filling and context - query < held
            assert first, f"{step} begins not at the {held} held"
        assert context == known if kind is StepKind.DECODE else context <= known, (
            f"{step} is not of the {known} tokens that are known"
        )
        rows[request_id] = context
        truth.executed += query
        finished = None
        if context == known:
            truth.emitted += 1
            if truth.emitted == truth.output_tokens:
                finished = truth.reason
        return StepOutcome(request_id, query, truth.emitted, finished)

    def free(self, instance: InstanceId, request_id: RequestId) -> None:
        """See ``Executors.free``."""
        del self.held[instance][request_id]
        self._filling.discard((instance, request_id))

    def lost(self, instance: InstanceId) -> None:
        """See ``Executors.lost``."""
        for request_id in self.held.pop(instance, ()):
            self._filling.discard((instance, request_id))

    def end(self, request_id: RequestId) -> None:
        """The truth is kept."""

    def export_kv(self, instance: InstanceId, request_id: RequestId, start: int, stop: int) -> None:
        """See ``KvCopies.export_kv``."""
        held = self.held[instance][request_id]
        assert 0 <= start < stop <= held, f"[{start}, {stop}) of {held} tokens held"

    def import_kv(self, instance: InstanceId, request_id: RequestId, start: int, stop: int) -> None:
        """See ``KvCopies.import_kv``. What comes after a gap, or after a step, is of no use."""
        rows = self.held.get(instance, {})
        if (instance, request_id) in self._filling and start <= rows[request_id]:
            rows[request_id] = max(rows[request_id], stop)

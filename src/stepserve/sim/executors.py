"""What steps do to requests: drawn from traces, or computed by a real engine.

A simulated cluster asks one ``Executors``. ``TraceExecutors`` answers from an outcome model;
``EngineExecutors`` runs every step on an engine's executor (passed in from outside), so that
tokens, and with them accuracy, are real while time is simulated.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.payload import Payload
from stepserve.core.protocols import Executor
from stepserve.core.request import FinishReason, Progress, Request
from stepserve.core.step import Batch, Step, StepOutcome

from .outcomes import TraceOutcomes, Truth


class Executors(Protocol):
    """The executors of a cluster, all together."""

    def arrive(self, index: int, request: Request) -> None:
        """The ``index``-th request of the workload exists."""
        ...

    def load(self, instance: InstanceId, request: Request, progress: Progress) -> None:
        """An instance is to hold a request, from the tokens that reached the frontend on."""
        ...

    def run(self, instance: InstanceId, batch: Batch) -> tuple[StepOutcome, ...]:
        """Run a batch; outcomes in the order of its steps. Their tokens reach the frontend."""
        ...

    def free(self, instance: InstanceId, request_id: RequestId) -> None:
        """An instance drops a request."""
        ...

    def lost(self, instance: InstanceId) -> None:
        """An instance is gone, with all it held."""
        ...

    def end(self, request_id: RequestId) -> None:
        """The request is over."""
        ...


class TraceExecutors:
    """Outcomes drawn from a model of how many steps requests need."""

    def __init__(
        self, model: TraceOutcomes, eos_tokens: Callable[[int], int | None] = lambda _: None
    ) -> None:
        """``eos_tokens``: output length at which the ``index``-th request ends by itself."""
        self._model = model
        self._eos_tokens = eos_tokens
        self._step = model.step
        self._some_lost = False
        self.truths: dict[RequestId, Truth] = {}

    def arrive(self, index: int, request: Request) -> None:
        """See ``Executors.arrive``."""
        self.truths[request.id] = self._model.start(request, index, self._eos_tokens(index))

    def load(self, instance: InstanceId, request: Request, progress: Progress) -> None:
        """Nothing to hold: the truth outlives instances."""

    def run(self, instance: InstanceId, batch: Batch) -> tuple[StepOutcome, ...]:
        """See ``Executors.run``."""
        truths, advance = self.truths, self._step
        if self._some_lost:
            advance = self._step_or_end
        return tuple([advance(truths[step.request_id], step) for step in batch.steps])

    def _step_or_end(self, truth: Truth, step: Step) -> StepOutcome:
        """As an executor does: a step of a finished row executes nothing and says so again.

        It happens when the news of the end was lost with the instance.
        """
        if truth.settled < truth.end:
            return self._model.step(truth, step)
        reason = FinishReason.STOP if truth.eos else FinishReason.LENGTH
        return StepOutcome(truth.request_id, 0, truth.end, reason)

    def free(self, instance: InstanceId, request_id: RequestId) -> None:
        """Nothing to drop."""

    def lost(self, instance: InstanceId) -> None:
        """From now on a request may be run again after its end."""
        self._some_lost = True

    def end(self, request_id: RequestId) -> None:
        """See ``Executors.end``."""
        del self.truths[request_id]


class EngineExecutors:
    """Outcomes computed by one executor per instance."""

    def __init__(
        self, executor: Callable[[InstanceId], Executor], payloads: Mapping[RequestId, Payload]
    ) -> None:
        """``payloads``: prompt and sampling of every request that will arrive."""
        self._executor = executor
        self._payloads = payloads
        self._executors: dict[InstanceId, Executor] = {}
        self.settled: dict[RequestId, dict[int, int]] = {}  # offset -> token id

    def arrive(self, index: int, request: Request) -> None:
        """See ``Executors.arrive``."""
        self.settled[request.id] = {}

    def load(self, instance: InstanceId, request: Request, progress: Progress) -> None:
        """See ``Executors.load``."""
        executor = self._executors.get(instance)
        if executor is None:
            executor = self._executors[instance] = self._executor(instance)
        executor.add(request, self._payloads[request.id], progress, self.settled[request.id])

    def run(self, instance: InstanceId, batch: Batch) -> tuple[StepOutcome, ...]:
        """See ``Executors.run``."""
        result = self._executors[instance].run(batch)
        for request_id, tokens in result.settled.items():
            self.settled[request_id].update((t.offset, t.token_id) for t in tokens)
        return result.outcomes

    def free(self, instance: InstanceId, request_id: RequestId) -> None:
        """See ``Executors.free``."""
        self._executors[instance].remove(request_id)

    def lost(self, instance: InstanceId) -> None:
        """See ``Executors.lost``."""
        self._executors.pop(instance, None)

    def end(self, request_id: RequestId) -> None:
        """Settled tokens are kept: they are the answer."""

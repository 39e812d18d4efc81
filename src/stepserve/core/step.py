"""A step is one request's share of one forward pass; a batch is steps run together.

``Step``, ``Batch`` and ``StepOutcome`` are named tuples, as are ``Progress``, ``Confidence`` and
``StepForecast``: one is made at every step of every request, in a third of the time.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from stepserve.core.ids import RequestId
from stepserve.core.request import Confidence, FinishReason


class StepKind(StrEnum):
    """Heavy steps build the context state, light steps reuse it."""

    heavy: bool  # whether the step builds the context state

    def __new__(cls, value: str, heavy: bool) -> "StepKind":
        """A member with an attribute: it is read at every step of every request."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.heavy = heavy
        return member

    PREFILL = "prefill", True
    DECODE = "decode", False
    RECOMPUTE = "recompute", True
    CACHED = "cached", False


class Step(NamedTuple):
    """``query_tokens`` are executed, attending over ``context_tokens`` (queries included)."""

    request_id: RequestId
    kind: StepKind
    query_tokens: int
    context_tokens: int
    threshold: float | None = None


class Mix(NamedTuple):
    """What a batch of autoregressive steps is made of: the key of its time (DynaServe 3.2).

    ``prefill_pairs`` are the query-key pairs of the heavy steps: a chunk of q tokens after c0
    others has q * c0 + q * (q + 1) / 2, which is what its attention costs.
    ``decode_context`` is the sum of the context lengths of the light steps.
    """

    prefill_tokens: int = 0
    prefill_pairs: int = 0
    decodes: int = 0
    decode_context: int = 0

    @classmethod
    def of(cls, steps: "Sequence[Step]") -> "Mix":
        """Of autoregressive steps."""
        tokens = pairs = decodes = context = 0
        for _, kind, query, keys, _ in steps:
            if kind.heavy:
                tokens += query
                pairs += query * (keys - query) + query * (query + 1) // 2
            else:
                decodes += 1
                context += keys
        return cls(tokens, pairs, decodes, context)


class Batch(NamedTuple):
    """Steps of different requests run in one forward pass of one instance."""

    id: int
    steps: tuple[Step, ...]

    @property
    def query_tokens(self) -> int:
        """Tokens executed: the cost key of a diffusion step (DiLaServe B2)."""
        return sum([step.query_tokens for step in self.steps])


class StepOutcome(NamedTuple):
    """What one step did to its request.

    ``settled``: positions newly final; ``emitted``: length of the contiguous settled output
    prefix now; ``forced``: of the settled ones, those at or below the threshold; ``error``:
    this row failed (its neighbours did not), and ``finished`` is ``ERROR``.
    """

    request_id: RequestId
    settled: int
    emitted: int
    finished: FinishReason | None = None
    confidence: Confidence | None = None
    forced: int = 0
    error: str | None = None

"""A step is one request's share of one forward pass; a batch is steps run together."""

from dataclasses import dataclass
from enum import StrEnum

from stepserve.core.ids import RequestId
from stepserve.core.request import Confidence, FinishReason


class StepKind(StrEnum):
    """Heavy steps build the context state, light steps reuse it."""

    PREFILL = "prefill"
    DECODE = "decode"
    RECOMPUTE = "recompute"
    CACHED = "cached"

    @property
    def heavy(self) -> bool:
        """Whether the step builds the context state."""
        return self in (StepKind.PREFILL, StepKind.RECOMPUTE)


@dataclass(frozen=True, slots=True)
class Step:
    """``query_tokens`` are executed, attending over ``context_tokens`` (queries included)."""

    request_id: RequestId
    kind: StepKind
    query_tokens: int
    context_tokens: int
    threshold: float | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Steps of different requests run in one forward pass of one instance."""

    id: int
    steps: tuple[Step, ...]

    @property
    def query_tokens(self) -> int:
        """Tokens executed: the cost key of a diffusion step (dilaserve.md B2)."""
        return sum(step.query_tokens for step in self.steps)


@dataclass(frozen=True, slots=True)
class StepOutcome:
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

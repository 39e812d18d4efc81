"""What the gateway is given: facts about the served model, and who is told what happens."""

from dataclasses import dataclass, field
from typing import Protocol

from stepserve.core.frontend import RequestReport
from stepserve.core.request import (
    CacheMode,
    Family,
    FinishReason,
    RefreshScope,
    Request,
    ThresholdBounds,
)

DIFFUSION_FIELDS = frozenset(
    (
        "dlm",
        "confidence_threshold",
        "threshold",
        "num_denoising_steps",
        "denoising_steps",
        "reasoning_effort",
    )
)
FAMILY_FIELDS = DIFFUSION_FIELDS
"""Fields of requests that not every family has: a model refuses those that are not its own."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Facts about the served model that requests are validated against.

    ``context_tokens`` bounds the prompt and its output, in whole blocks. ``request_fields`` are
    those of ``FAMILY_FIELDS`` that its requests may have; its replies have the objects among them.
    ``mask_token_id`` may not occur in a prompt: the engine would take it for a position to fill.
    ``default_cache`` is the only one of a block-causal model (``CacheMode.BLOCK``). ``weighs``:
    whether a policy of this server makes use of ``slo.weight``.
    """

    id: str
    family: Family
    context_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    default_max_tokens: int
    request_fields: frozenset[str] = DIFFUSION_FIELDS
    block_lengths: tuple[int, ...] = (32,)
    default_block_length: int = 32
    mask_token_id: int | None = None
    default_temperature: float = 0.0
    default_cache: CacheMode = CacheMode.NONE
    default_refresh_scope: RefreshScope = RefreshScope.FULL
    default_thresholds: ThresholdBounds = field(default_factory=ThresholdBounds)
    weighs: bool = False

    @property
    def denoises(self) -> bool:
        """Whether answers are made block by block, as ``dlm`` of a request may say."""
        return "dlm" in self.request_fields


class Observer(Protocol):
    """Told what happens to every request; each request is started once and ends once.

    One "request" here is one sample: a body with two prompts and ``n`` 3 makes six.
    """

    def started(self, request: Request) -> None:
        """A sample was handed to the frontend."""
        ...

    def emitted(self, request: Request, tokens: int, gap_s: float | None) -> None:
        """A text event of that many tokens came, ``gap_s`` after the one before, if any."""
        ...

    def finished(
        self, request: Request, reason: FinishReason, output_tokens: int, report: RequestReport
    ) -> None:
        """A sample ended; ``output_tokens`` are those billed."""
        ...

    def rejected(self, request: Request) -> None:
        """A sample was refused at admission."""
        ...

    def limited(self, tenant: str, why: str) -> None:
        """A request of a tenant was refused: ``403``, or the limit that it would pass."""
        ...

    def header_ignored(self, name: str) -> None:
        """An SLO header held a value that could not be used."""
        ...

    def render(self) -> bytes:
        """The body of ``/metrics`` in Prometheus' text format."""
        ...

"""What is known of a request when it arrives, and how far it has come."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from stepserve.core.bounds import Bounded, Count, Positive
from stepserve.core.errors import FieldError
from stepserve.core.ids import RequestId


class Family(StrEnum):
    """How a model generates; it selects the step program, and nothing else does."""

    DIFFUSION = "diffusion"
    AUTOREGRESSIVE = "autoregressive"


class OnMiss(StrEnum):
    """What to do when a deadline cannot be met at the preferred threshold (docs/api.md)."""

    DEGRADE = "degrade"  # lower the threshold down to the floor, then best effort
    BEST_EFFORT = "best_effort"  # keep the preferred threshold, be late
    REJECT = "reject"  # refuse at admission if predicted to miss; then as degrade


_BEST_EFFORT = OnMiss.BEST_EFFORT  # asked for at every step: an enum is slow to look members up


class CacheMode(StrEnum):
    """Which keys and values a diffusion step may reuse (Fast-dLLM; DiLaServe C8)."""

    NONE = "none"  # exact: every step executes the whole sequence
    PREFIX = "prefix"  # cached steps execute from the block's start to the end
    DUAL = "dual"  # cached steps execute the block alone
    BLOCK = "block"  # exact: of a block-causal model, keys and values of finished blocks are final

    @property
    def exact(self) -> bool:
        """Whether no step works with keys and values that are out of date."""
        return self in (CacheMode.NONE, CacheMode.BLOCK)


class RefreshScope(StrEnum):
    """What a recompute step executes of a request whose prompt has keys and values already.

    Source: DiLaServe E3. The prompt's keys and values change little while the output
    is denoised, and dLLM-Cache refreshes them far less often; here they are computed once per
    instance, by the first step on it.
    """

    FULL = "full"  # prompt and canvas (the published systems)
    OUTPUT = "output"  # the canvas, attending to the prompt's kept keys and values


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # end-of-text or a stop token or string
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class Refusal(StrEnum):
    """Why a request was refused before any work was done."""

    DEADLINE = "deadline"  # it has passed, or not even an idle server could meet it
    SATURATED = "saturated"  # an idle server could have met it
    QUEUE_FULL = "queue_full"


@dataclass(frozen=True, slots=True)
class SLO(Bounded, path="slo"):
    """Latency targets in seconds from arrival; ``None`` means no target.

    ``tpot_s`` is amortised: (last - first committed text) / (tokens - tokens in the first
    event). ``tbt_s`` bounds each gap between two tokens; schedulers work for no less than
    ``least_tbt_s``, since all of a batch keep its tightest target. ``weight``: what this request's
    quality is worth beside others'. Raises FieldError unless it is positive. ``fixed_deadline``:
    the deadline is a moment of the wall clock, so whoever asks again has less time.
    """

    slo_class: str = "standard"
    e2e_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    on_miss: OnMiss = OnMiss.DEGRADE
    weight: Positive = 1.0
    tbt_s: float | None = None
    least_tbt_s: float = 0.0
    fixed_deadline: bool = False

    @property
    def pinned(self) -> bool:
        """Whether the preferred threshold is kept: there is no deadline, or it may be missed."""
        return self.e2e_s is None or self.on_miss is _BEST_EFFORT

    @property
    def scheduled_tbt_s(self) -> float | None:
        """The gap that is worked for; what is judged is ``tbt_s``."""
        return None if self.tbt_s is None else max(self.tbt_s, self.least_tbt_s)

    @property
    def targets_s(self) -> dict[str, float]:
        """The targets that are set, by name."""
        every = {"e2e": self.e2e_s, "ttft": self.ttft_s, "tpot": self.tpot_s, "tbt": self.tbt_s}
        return {name: target_s for name, target_s in every.items() if target_s is not None}

    def missed(self, **measured_s: float | None) -> tuple[str, ...]:
        """The targets that are not kept, by what was measured; ``None`` or absent keeps any."""
        return tuple(
            name
            for name, target_s in self.targets_s.items()
            if (value_s := measured_s.get(name)) is not None and value_s > target_s
        )


@dataclass(frozen=True, slots=True)
class ThresholdBounds:
    """The preferred confidence threshold and the floor it may be lowered to.

    Equal bounds pin the quality. Raises FieldError unless 0 < floor <= preferred <= 1.
    """

    preferred: float = 0.9
    floor: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 < self.preferred <= 1.0:
            raise FieldError("confidence_threshold", "must be in (0, 1]")
        if not 0.0 < self.floor <= self.preferred:
            raise FieldError("min_confidence_threshold", "must be in (0, confidence_threshold]")


@dataclass(frozen=True, slots=True)
class DiffusionOptions(Bounded, path="dlm"):
    """How a diffusion request is denoised.

    ``refresh_blocks``: with a cache, recompute at the start of every n-th block;
    ``refresh_scope``: what of the request.
    ``max_steps_per_block`` and ``max_forwards`` are hard caps: when one is reached, every
    position still masked in the block is unmasked at once.
    """

    thresholds: ThresholdBounds = ThresholdBounds()
    block_tokens: Count = 32
    cache_mode: CacheMode = CacheMode.DUAL
    refresh_blocks: Count = 1
    refresh_scope: RefreshScope = RefreshScope.FULL
    max_steps_per_block: Count | None = None
    max_forwards: Count | None = None
    expected_output_tokens: Count | None = None

    def __post_init__(self) -> None:
        """Raises FieldError for a count below 1, or an output scope without a cache."""
        Bounded.__post_init__(self)
        if self.cache_mode.exact and self.refresh_scope is RefreshScope.OUTPUT:
            raise FieldError("dlm.refresh_scope", "output needs dlm.cache to be approximate")


@dataclass(frozen=True, slots=True)
class Request:
    """Facts known on arrival. Token values travel beside it, in a ``Payload``.

    ``expected_output_tokens`` is the client's hint; of a diffusion request it is an option.
    ``tenant``: whose it is, where machine time is shared out (``control/fair_shares``).
    ``min_output_tokens``: what it asked for makes sure that the output is no shorter.
    ``client_id``: the ``X-Request-Id`` that it came with; several may have the same.
    """

    id: RequestId
    family: Family
    model: str
    prompt_tokens: int
    max_output_tokens: int
    arrival_s: float
    slo: SLO = SLO()
    diffusion: DiffusionOptions = DiffusionOptions()
    expected_output_tokens: int | None = None
    tenant: str = ""
    min_output_tokens: int = 0
    client_id: str = ""

    def possible_tokens(self, expected: float) -> float:
        """The length nearest to an expected one that the output can have."""
        return min(float(self.max_output_tokens), max(float(self.min_output_tokens), expected))

    @property
    def deadline_s(self) -> float | None:
        """Absolute end-to-end deadline on the scheduler's clock."""
        return None if self.slo.e2e_s is None else self.arrival_s + self.slo.e2e_s

    def left_s(self, now_s: float, share: float = 1.0) -> float:
        """Seconds until a share of its deadline has passed; infinite without one."""
        e2e_s = self.slo.e2e_s
        return math.inf if e2e_s is None else self.arrival_s + share * e2e_s - now_s


class Confidence(NamedTuple):
    """Five numbers over the latest confidence of every output position (DiLaServe B4)."""

    minimum: float
    p25: float
    median: float
    mean: float
    p75: float


class Progress(NamedTuple):
    """How far a request has come, in tokens of its own axis: prompt first, then output.

    ``settled`` counts final positions, the prompt included; ``emitted`` is the length of the
    contiguous settled prefix of the output.
    """

    settled: int = 0
    emitted: int = 0
    steps: int = 0
    finished: FinishReason | None = None
    confidence: Confidence | None = None

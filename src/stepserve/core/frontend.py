"""What a gateway and the world behind it say to each other about requests."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from stepserve.core.ids import RequestId
from stepserve.core.payload import Payload, SettledToken
from stepserve.core.request import FinishReason, Refusal, Request


@dataclass(frozen=True, slots=True)
class RequestReport:
    """What a finished request cost and got; the reply's ``metrics``, ``slo`` and ``dlm``.

    Times are seconds. ``slack_s`` is deadline minus completion (negative when late), ``paused_s``
    what passed between the last step on one instance and the first on the next, all together.
    ``missed`` names the targets that were set and not kept: ``e2e``, ``ttft``, ``tpot``, ``tbt``.
    """

    forwards: int = 0
    blocks: int = 0
    forced: int = 0
    refreshes: int = 0
    threshold_min: float | None = None
    threshold_mean: float | None = None
    migrations: int = 0
    handovers: int = 0
    paused_s: float = 0.0
    queue_s: float = 0.0
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float = 0.0
    slack_s: float | None = None
    slo_met: bool | None = None
    missed: tuple[str, ...] = ()
    degraded: bool = False

    @property
    def slo_status(self) -> str:
        """``none`` without targets, ``missed``, ``degraded`` (met below the preferred threshold)
        or ``met``.
        """
        if self.slo_met is None:
            return "none"
        met = "degraded" if self.degraded else "met"
        return met if self.slo_met else "missed"


@dataclass(frozen=True, slots=True)
class TokensEmitted:
    """The next tokens of a request's contiguous settled prefix, in order, each once.

    The token that ends the output (end-of-text, a stop token) is the last one.
    ``forwards`` counts the request's forward passes so far; ``at_s`` is on the frontend's clock.
    """

    tokens: tuple[SettledToken, ...]
    forwards: int
    at_s: float


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """Last update of a request; ``error`` is set when reason is ``ERROR``."""

    reason: FinishReason
    report: RequestReport
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RequestRejected:
    """Refused at admission; no work was done. Only ever the first update. See ``Reject``."""

    retry_after_s: float | None
    why: str
    reason: Refusal = Refusal.SATURATED


Update = TokensEmitted | RequestEnded | RequestRejected


class Frontend(Protocol):
    """What the gateway needs of the world behind it."""

    def now_s(self) -> float:
        """The scheduler's clock, for ``Request.arrival_s``."""
        ...

    def submit(self, request: Request, payload: Payload) -> AsyncIterator[Update]:
        """Serve a request. Ends after ``RequestEnded`` or ``RequestRejected``."""
        ...

    def cancel(self, request_id: RequestId, reason: FinishReason) -> None:
        """Stop working on a request within one step; its iterator still ends properly.

        Unknown and finished requests are ignored.
        """
        ...

    def accepts(self) -> bool:
        """Whether an instance is up and requests are being taken."""
        ...

    def ready(self) -> bool:
        """Whether requests should be sent here: they are taken, and will be for a while."""
        ...

    def healthy(self) -> bool:
        """Whether the schedulers' loop makes progress."""
        ...

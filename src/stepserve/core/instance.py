"""What is known of instances, and of the cluster as policies see it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from stepserve.core.bounds import Bounded, NotNegative, Positive
from stepserve.core.forecast import StepForecast
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.plan import Slot
from stepserve.core.request import Progress, Request
from stepserve.core.segment import Segment


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """What an instance is: one model replica on a tensor-parallel group.

    ``slot`` says on which GPUs, where the planner may change that.
    """

    id: InstanceId
    tp_degree: int
    page_capacity: int
    page_tokens: int
    max_running_requests: int
    slot: Slot | None = None


@dataclass(frozen=True, slots=True)
class Link(Bounded, path="link"):
    """What it takes to copy keys and values from one instance to another."""

    bytes_per_token: NotNegative
    bytes_per_s: Positive
    rtt_s: NotNegative = 0.0

    def seconds(self, tokens: int) -> float:
        """Seconds over an idle link; 0 for no tokens."""
        if tokens <= 0:
            return 0.0
        return self.rtt_s + tokens * self.bytes_per_token / self.bytes_per_s


class RunningReport(NamedTuple):
    """How far one running request has come, and the latest forecast of what it still needs."""

    request_id: RequestId
    epoch: int
    progress: Progress
    forecast: StepForecast


class HeldSegment(NamedTuple):
    """A segment that an instance holds, and all that the global scheduler has to know of it.

    ``begun``: it runs, or has come to its stop; if not, it waits for what is handed over.
    ``leaving``: it was asked to be let go.
    """

    request: Request
    segment: Segment
    progress: Progress
    forecast: StepForecast
    cap: float
    begun: bool
    leaving: bool


class Work(NamedTuple):
    """What one segment of an autoregressive request still has to do on its instance.

    ``prefill_tokens`` inputs that are known already, after ``context_tokens`` others whose
    keys and values exist; then ``decode_tokens`` of output, as far as foreseen.
    """

    prefill_tokens: int
    context_tokens: int
    decode_tokens: float


class InstanceLoad(NamedTuple):
    """What the global scheduler knows of an instance: promises made, not only reports heard.

    ``running_tokens`` is the sum of full lengths (prompt and output canvas) placed there.
    ``work`` has an entry per segment placed there, of programs that tell it.
    """

    spec: InstanceSpec
    running_requests: int
    running_tokens: int
    free_pages: int
    batch_ends_s: float
    work: tuple[Work, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterView:
    """An immutable snapshot offered to policies."""

    at_s: float
    loads: Mapping[InstanceId, InstanceLoad]

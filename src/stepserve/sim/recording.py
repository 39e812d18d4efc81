"""A recorded live run, as far as a simulation can repeat it.

A command reads it from an event log (``cli/recorded_run``). What it cannot know is said there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from stepserve.core.request import Request
from stepserve.cost.batch_profile import BatchProfile
from stepserve.cost.step_table import StepProfile

from .config import SLOClass

RECORDED = "recorded"
"""Hardware of a recorded run: its times are in the log."""


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request, which arrives at its own time after the first one's, and what it needed.

    ``output_tokens``: at which it ended. ``difficulty``: steps of a diffusion request against the
    published mean at the thresholds it was run at.
    """

    request: Request
    output_tokens: int
    difficulty: float = 1.0


@dataclass(frozen=True, slots=True)
class Recording:
    """Requests in order of arrival, and how long batches took as the schedulers believed."""

    requests: tuple[RecordedRequest, ...]
    profiles: Mapping[int, StepProfile] = field(default_factory=dict)
    batches: BatchProfile | None = None

    def scale(self, rate_per_s: float) -> float:
        """What times are multiplied by for a rate; 0 for the recorded one."""
        span_s, gaps = self.requests[-1].request.arrival_s, len(self.requests) - 1
        return gaps / span_s / rate_per_s if rate_per_s and span_s else 1.0

    def requests_at(self, rate_per_s: float, classes: tuple[SLOClass, ...]) -> list[Request]:
        """The requests at a rate, 0 for the recorded one, with the targets of their classes."""
        scale, recorded = self.scale(rate_per_s), [r.request for r in self.requests]
        return [with_targets(replace(r, arrival_s=scale * r.arrival_s), classes) for r in recorded]


def with_targets(request: Request, classes: tuple[SLOClass, ...]) -> Request:
    """A recorded request with the targets that its class is given now.

    A class without a name is everybody's.
    """
    slo = request.slo
    for one in classes:
        if one.name in ("", slo.slo_class):
            given = {name: getattr(one, name) for name in ("e2e_s", "ttft_s", "tbt_s")}
            slo = replace(slo, **{name: value for name, value in given.items() if value})
    return request if slo is request.slo else replace(request, slo=slo)

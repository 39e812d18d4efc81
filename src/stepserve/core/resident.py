"""A request as the instance that holds it sees it."""

from dataclasses import dataclass
from typing import NamedTuple

from stepserve.core.forecast import StepForecast
from stepserve.core.request import Progress, Request
from stepserve.core.segment import ReleasePoint, Segment


@dataclass(slots=True)
class Resident:
    """The local scheduler's record of one request it holds.

    Only the local scheduler writes it; policies read it. Not frozen: it is the one value
    that changes at every step of every request. ``heavy_tokens``, ``light_tokens`` and
    ``heavy_left`` are the step program's answers, kept because policies ask at every step.
    """

    request: Request
    segment: Segment
    progress: Progress
    forecast: StepForecast
    heavy_tokens: int
    light_tokens: int
    heavy_left: float
    forecast_settled: int  # tokens settled when the forecast was asked for
    has_state: bool = False  # keys and values exist on this instance
    cap: float = 1.0  # the highest threshold that load control allows it
    skipped: int = 0  # batches composed without it since it last ran
    release: ReleasePoint | None = None  # asked to leave, and when


class StepPace(NamedTuple):
    """Seconds that one more heavy and one more light step of a request are expected to take."""

    heavy_s: float
    light_s: float

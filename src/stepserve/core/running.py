"""A request as the instance that holds it sees it."""

from dataclasses import dataclass
from typing import NamedTuple

from stepserve.core.forecast import StepForecast
from stepserve.core.request import Progress, Request
from stepserve.core.segment import ReleasePoint, Segment


class StepPace(NamedTuple):
    """Seconds that one more heavy and one more light step of a request are expected to take."""

    heavy_s: float
    light_s: float


@dataclass(slots=True)
class RunningRequest:
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
    joined_s: float = 0.0  # when it began to run here
    last_token_s: float = (
        0.0  # when it joined, or its latest step here ended (autoregressive programs)
    )

    def infeasible(self, pace: StepPace, now_s: float) -> bool:
        """Whether its deadline is believed out of reach even at the lowest threshold."""
        deadline_s = self.request.deadline_s
        if deadline_s is None:
            return False
        return now_s + self.time_left_s(len(self.forecast.steps) - 1, pace) > deadline_s

    def time_left_s(self, index: int, pace: StepPace) -> float:
        """Predicted seconds to its end at the ``index``-th candidate threshold."""
        steps = self.forecast.remaining(index, self.progress.steps)
        heavy = min(self.heavy_left, steps)
        return steps * pace.light_s + heavy * (pace.heavy_s - pace.light_s)

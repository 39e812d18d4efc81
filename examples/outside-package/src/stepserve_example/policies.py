"""A threshold policy and a placement policy."""

from dataclasses import dataclass

from stepserve.core.errors import check
from stepserve.core.forecast import StepForecast
from stepserve.core.instance import ClusterView
from stepserve.core.protocols import Parts, Placement
from stepserve.core.request import Family, Progress, Request
from stepserve.core.running import RunningRequest, StepPace
from stepserve.core.segment import Segment
from stepserve.policies.threshold.deadline_fit import DeadlineFit


class LowEarly:
    """A ``ThresholdPolicy``: the floor at first, then the highest threshold that fits.

    Published measurements (LLaDA-8B on GSM8K) found that a low threshold costs least quality early
    in a request.
    """

    @dataclass(frozen=True, slots=True)
    class Options:
        """``share``: of the expected output at the floor; ``margin``: see ``DeadlineFit``."""

        share: float = 1 / 3
        margin: float | None = None

        def __post_init__(self) -> None:
            """Raises FieldError naming the number that makes no sense."""
            check(0.0 <= self.share <= 1.0, "share", "must be in [0, 1]")

    def __init__(self, options: Options, parts: Parts) -> None:
        self._share = options.share
        self._fit = DeadlineFit(DeadlineFit.Options(options.margin), parts)

    def pick(self, running: RunningRequest, pace: StepPace, now_s: float) -> float:
        """See ``ThresholdPolicy.pick``."""
        settled = running.progress.settled - running.request.prompt_tokens
        if settled < self._share * running.forecast.output_tokens:
            return running.forecast.thresholds[-1]
        return self._fit.pick(running, pace, now_s)


class CutInTwo:
    """A ``PlacementPolicy``: each request begins on one instance and ends on another.

    Both are those with the fewest running tokens, ties by instance id.
    """

    family = Family.AUTOREGRESSIVE

    @dataclass(frozen=True, slots=True)
    class Options:
        """``share``: of the expected output, before the cut."""

        share: float = 0.5

        def __post_init__(self) -> None:
            """Raises FieldError naming the number that makes no sense."""
            check(0.0 <= self.share < 1.0, "share", "must be in [0, 1)")

    def __init__(self, options: Options, parts: Parts) -> None:
        self._share = options.share

    def place(
        self, request: Request, progress: Progress, forecast: StepForecast, view: ClusterView
    ) -> Placement:
        """See ``PlacementPolicy.place``. The last token is never executed: no cut is there."""
        ranked = sorted(view.loads.values(), key=lambda load: (load.running_tokens, load.spec.id))
        names = [load.spec.id for load in ranked]
        known = request.prompt_tokens + progress.emitted
        more = max(0.0, forecast.output_tokens - progress.emitted)
        cut = known + int(self._share * more)
        if len(names) < 2 or cut >= request.prompt_tokens + request.max_output_tokens - 1:
            return Placement((Segment(request.id, 0, 0, None, names[0], 0),), why="in one")
        first = Segment(request.id, 0, 0, cut, names[0], 0)
        return Placement((first, Segment(request.id, 1, cut, None, names[1], 0)), why="in two")

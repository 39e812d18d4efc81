"""Placement by the smallest predicted step completion time (DiLaServe A2.4, DiLaServe B7).

The predicted completion of the request's next step is the end of the batch that runs now, plus the
time of a batch of every running request and the newcomer at full length (DiLaServe B7's
worst-case load). Deviation (DiLaServe C6): the published code leaves out the running batch's end.
"""

from stepserve.core.config import NoOptions
from stepserve.core.forecast import StepForecast
from stepserve.core.instance import ClusterView
from stepserve.core.protocols import Parts, Placement
from stepserve.core.request import Progress, Request
from stepserve.core.segment import Segment


class StepCompletion:
    """One open segment where the next step would end first; ties by instance id."""

    Options = NoOptions

    def __init__(self, options: NoOptions, parts: Parts) -> None:
        self._cost = parts.cost
        self._full_tokens = parts.program.full_tokens

    def place(
        self, request: Request, progress: Progress, forecast: StepForecast, view: ClusterView
    ) -> Placement:
        """See ``PlacementPolicy.place``."""
        extra, now_s, step_time_s = self._full_tokens(request), view.at_s, self._cost.step_time_s
        completions = []
        for name, (
            spec,
            running_requests,
            running_tokens,
            _,
            batch_ends_s,
            _,
        ) in view.loads.items():
            step_s = step_time_s(running_tokens + extra, running_requests + 1, spec)
            wait_s = batch_ends_s - now_s
            completions.append((wait_s + step_s if wait_s > 0.0 else step_s, name))
        _, first = min(completions)
        return Placement((Segment(request.id, 0, progress.settled, None, first, epoch=0),))

"""Placement by the smallest predicted step completion time (DiLaServe, dilaserve.md A2.4, B7).

The predicted completion of the request's next step is the end of the batch that runs now,
plus the time of a batch of everything resident and the newcomer at full length (B7's
worst-case load). Deviation (C6): the published code leaves out the running batch's end.
"""

from collections.abc import Callable

from stepserve.core.instance import ClusterView, InstanceLoad
from stepserve.core.protocols import CostModel
from stepserve.core.request import Progress, Request
from stepserve.core.segment import Segment


class StepCompletion:
    """One open segment where the next step would end first; ties by instance id."""

    def __init__(self, cost: CostModel, full_tokens: Callable[[Request], int]) -> None:
        self._cost = cost
        self._full_tokens = full_tokens

    def place(self, request: Request, progress: Progress, view: ClusterView) -> tuple[Segment, ...]:
        """See ``PlacementPolicy.place``."""
        extra = self._full_tokens(request)

        def completion(load: InstanceLoad) -> tuple[float, str]:
            tokens = load.resident_tokens + extra
            wait_s = max(0.0, load.batch_ends_s - view.at_s)
            step_s = self._cost.step_time_s(tokens, load.residents + 1, load.spec)
            return wait_s + step_s, load.spec.id

        load = min(view.loads.values(), key=completion)
        return (Segment(request.id, 0, progress.settled, None, load.spec.id, epoch=0),)

"""The plain placement: fewest running tokens. Baseline of ``step_completion``."""

from stepserve.core.config import NoOptions
from stepserve.core.forecast import StepForecast
from stepserve.core.instance import ClusterView
from stepserve.core.protocols import Parts, Placement
from stepserve.core.request import Progress, Request
from stepserve.core.segment import Segment


class LeastLoaded:
    """One open segment on the instance with the smallest load; ties by instance id."""

    Options = NoOptions

    def __init__(self, options: NoOptions, parts: Parts) -> None:
        """Nothing is needed."""

    def place(
        self, request: Request, progress: Progress, forecast: StepForecast, view: ClusterView
    ) -> Placement:
        """See ``PlacementPolicy.place``."""
        load = min(view.loads.values(), key=lambda load: (load.running_tokens, load.spec.id))
        return Placement((Segment(request.id, 0, progress.settled, None, load.spec.id, epoch=0),))

"""As ``recompute_step``, but at once: the ablation that pays for every move (DiLaServe B7)."""

from stepserve.core.segment import ReleasePoint

from .recompute_step import RecomputeStep


class AnyStep(RecomputeStep):
    """A ``MigrationPolicy``: whoever moves recomputes its keys and values."""

    at = ReleasePoint.STEP

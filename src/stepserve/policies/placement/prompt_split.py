"""``tandem_split`` whose only cut is the prompt's end: disaggregation where that gains something.

The first probe of the bisection is the prompt's share: an ablation of DynaServe 3.5.
"""

from stepserve.core.protocols import Parts

from .tandem_split import TandemSplit


class PromptSplit(TandemSplit):
    """A ``PlacementPolicy``; ``probes`` and ``epsilon`` mean nothing to it."""

    def __init__(self, options: TandemSplit.Options, parts: Parts) -> None:
        super().__init__(options, parts)
        self._probes = 1

"""``tandem_split`` whose only cut is the prompt's end: disaggregation where that gains something.

The first probe of the bisection is the prompt's share: an ablation of DynaServe 3.5.
"""

from dataclasses import asdict, dataclass

from stepserve.core.bounds import Bounded, Count, NotNegative, Whole
from stepserve.core.protocols import Parts

from .tandem_split import TandemSplit


@dataclass(frozen=True, slots=True)
class PromptSplitOptions(Bounded):
    """As of ``tandem_split``, but for those of its search."""

    gain: NotNegative = 0.6  # share of the request's time that a cut must save; published: 0.05
    margin_tokens: Whole = 20  # added to the predicted output length
    least_segment_tokens: Whole = 64  # shorter segments are not made
    pairs: Count = 4  # ordered pairs of instances that are looked at
    ignore_ttft: bool = False  # false: no cut that misses a TTFT target; published: true


class PromptSplit(TandemSplit):
    """A ``PlacementPolicy``."""

    Options = PromptSplitOptions  # type: ignore[assignment]

    def __init__(self, options: PromptSplitOptions, parts: Parts) -> None:
        super().__init__(TandemSplit.Options(probes=1, **asdict(options)), parts)

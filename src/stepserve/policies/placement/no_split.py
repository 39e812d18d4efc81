"""``tandem_split`` that never cuts: an ablation of DynaServe 3.5."""

from dataclasses import asdict, dataclass

from stepserve.core.bounds import Bounded, Whole
from stepserve.core.protocols import Parts

from .split_search import Plan, Search, Side
from .tandem_split import TandemSplit


@dataclass(frozen=True, slots=True)
class NoSplitOptions(Bounded):
    """Those of ``tandem_split`` that do not concern cuts."""

    margin_tokens: Whole = 20  # added to the predicted output length
    ignore_ttft: bool = False  # false: the instance that keeps a TTFT target; published: true


class NoSplit(TandemSplit):
    """A ``PlacementPolicy``."""

    Options = NoSplitOptions  # type: ignore[assignment]

    def __init__(self, options: NoSplitOptions, parts: Parts) -> None:
        super().__init__(TandemSplit.Options(**asdict(options)), parts)

    def _best_cut(self, search: Search, sides: list[Side], whole: Plan) -> Plan:
        return whole

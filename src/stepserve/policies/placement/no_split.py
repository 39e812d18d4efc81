"""``tandem_split`` that never cuts: an ablation of DynaServe 3.5."""

from stepserve.core.protocols import Parts

from .tandem_split import TandemSplit


class NoSplit(TandemSplit):
    """A ``PlacementPolicy``; of the options, ``margin_tokens`` and ``ignore_ttft`` count."""

    def __init__(self, options: TandemSplit.Options, parts: Parts) -> None:
        super().__init__(options, parts)
        self._probes = 0

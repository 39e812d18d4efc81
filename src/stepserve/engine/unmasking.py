"""Which masked positions a step settles: the confidence-threshold rule (DiLaServe B4)."""

import struct
from collections.abc import Sequence


def choose(
    confidence: Sequence[float], threshold: float, settle_all: bool = False
) -> tuple[list[int], int]:
    """Indices of the candidates to settle, and how many of them are forced.

    ``confidence``: float32 values of the candidates of one row, never empty. Those strictly
    above ``threshold`` settle; if there are none, the single most confident one does (the
    first of equals), so every step makes progress. ``settle_all``: a hard cap is reached and
    all settle. Forced are the settled ones at or below the threshold.
    """
    (level,) = struct.unpack("f", struct.pack("f", threshold))  # compare float32 with float32
    above = [i for i, value in enumerate(confidence) if value > level]
    if settle_all:
        return list(range(len(confidence))), len(confidence) - len(above)
    if above:
        return above, 0
    return [max(range(len(confidence)), key=confidence.__getitem__)], 1

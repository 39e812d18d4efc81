"""A policy of threshold caps that does as it is told, and keeps what it was asked."""

from typing import ClassVar

from stepserve.core.config import NoOptions


class ToldCaps:
    """``levels``: by request, which candidate is its highest (0: the preferred one)."""

    Options = NoOptions
    levels: ClassVar = {}
    asked: ClassVar = []

    def __init__(self, options, parts):
        pass

    def caps(self, demands, specs, now_s):
        self.asked.append(([d.request.id for d in demands], [spec.id for spec in specs]))
        return [d.thresholds[self.levels.get(d.request.id, 0)] for d in demands]

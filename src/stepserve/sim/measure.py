"""Measures how long schedulers take on this machine while a run is simulated."""

from collections.abc import Callable, Sequence
from typing import Any

from stepserve.core.events import Predicted

from .results import Row, percentile_or_none

SCHEDULERS = ("global", "local")
Clock = Callable[[], float]


class Meter:
    """Sums the seconds spent in parts that are called, and counts the calls.

    ``placed_us``: of each call that placed requests, which is when a forecast comes.
    """

    def __init__(self, clock: Clock, parts: Sequence[str] = SCHEDULERS) -> None:
        """``parts``: which ones; measuring costs about a microsecond a call."""
        self._clock = clock
        self._parts = parts
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self.placed_us: list[float] = []

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, measured if the part is: see ``world.Timed``."""
        if part not in self._parts:
            return call
        clock, seconds, calls, placed_us = self._clock, self.seconds, self.calls, self.placed_us
        seconds.setdefault(part, 0.0)
        calls.setdefault(part, 0)

        def measured(*args: Any) -> Any:
            start = clock()
            result = call(*args)
            took = clock() - start
            seconds[part] += took
            calls[part] += 1
            if part == "global" and isinstance(args[1], Predicted):
                placed_us.append(1e6 * took)
            return result

        return measured

    def row(self) -> Row:
        """Microseconds: mean of all calls, percentiles of those that placed requests."""
        calls = sum(self.calls.values())
        return {
            "scheduler_us_per_event": 1e6 * sum(self.seconds.values()) / calls if calls else None,
            "place_us_p50": percentile_or_none(self.placed_us, 50.0),
            "place_us_p99": percentile_or_none(self.placed_us, 99.0),
        }

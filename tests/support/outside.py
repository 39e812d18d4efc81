"""Parts as a package outside of ours would have them; named by path in tests."""

from dataclasses import dataclass

from stepserve.core.config import NoOptions
from stepserve.core.errors import check
from stepserve.policies.batching.all_running import AllRunning
from stepserve.policies.placement.least_loaded import LeastLoaded
from stepserve.policies.threshold.deadline_fit import DeadlineFit


class LowEarly:
    """A threshold policy: the floor for the first tokens, then whatever fits the deadline."""

    @dataclass(frozen=True)
    class Options:
        floor_tokens: int = 8
        margin: float | None = None

        def __post_init__(self):
            check(self.floor_tokens >= 0, "floor_tokens", "must not be negative")

    def __init__(self, options, parts):
        self._floor_tokens = options.floor_tokens
        self._fit = DeadlineFit(DeadlineFit.Options(options.margin), parts)

    def pick(self, running, pace, now_s):
        if running.progress.settled - running.request.prompt_tokens < self._floor_tokens:
            return running.forecast.thresholds[-1]
        return self._fit.pick(running, pace, now_s)


class MostLoaded(LeastLoaded):
    """A placement: everybody on the fullest instance, ties to the last by id."""

    def place(self, request, progress, forecast, view):
        load = max(view.loads.values(), key=lambda load: (load.running_tokens, load.spec.id))
        only = type(view)(view.at_s, {load.spec.id: load})
        return super().place(request, progress, forecast, only)


class Unfinished:
    """A class that is no part: it has no options."""


class Everybody(AllRunning):
    """A batching of its own for autoregressive models alone."""

    family = "autoregressive"
    Options = NoOptions

"""How long a batch takes, from measured tables that heal themselves.

The key is the number of tokens executed in the batch, rounded up to the next profiled size
(DiLaServe B2 and DiLaServe D9: profiles are jagged, so they are neither interpolated nor smoothed).
Beyond the largest size the last entry is scaled in proportion. A host overhead per step and per
further row, which profiles of the forward pass alone do not contain, is added (DiLaServe D5).
Observed batches correct the table: a common factor learns that the machine is faster or slower than
the profiled one, a factor per size learns the rest (DiLaServe E6).
"""

import bisect
import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepserve.core.bounds import Bounded, FiniteNotNegative, ascends
from stepserve.core.errors import FieldError
from stepserve.core.instance import InstanceSpec
from stepserve.core.step import Mix
from stepserve.files import content_of, read_json

COMMON_RATE = 0.02
SIZE_RATE = 0.05
LOG_LIMIT = math.log(8.0)
"""One observation counts as at most 8 times off: a stall must not poison the table."""


@dataclass(frozen=True, slots=True)
class StepProfile(Bounded, path="profile"):
    """Measured seconds per batch size; sizes ascend. ``source`` says where it was measured.

    ``host_s`` and ``host_row_s``: seconds outside the table, per step and per row beyond the
    first.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    source: str
    host_s: FiniteNotNegative = 0.0
    host_row_s: FiniteNotNegative = 0.0

    def __post_init__(self) -> None:
        """Raises FieldError for an empty, unsorted or non-positive table."""
        Bounded.__post_init__(self)
        if not self.sizes or len(self.sizes) != len(self.seconds):
            raise FieldError("profile.sizes", "needs one entry in seconds per size, at least one")
        whole = all(type(size) is int for size in self.sizes)
        if not whole or not ascends(self.sizes) or self.sizes[0] < 1:
            raise FieldError("profile.sizes", "must be whole numbers that ascend from at least 1")
        if not all(s > 0 and math.isfinite(s) for s in self.seconds):
            raise FieldError("profile.seconds", "must be positive and finite")

    @classmethod
    def load(cls, path: Path) -> "StepProfile":
        """Read a profile written by ``save``. Raises FieldError (``profile``) for another file."""
        table = read_json(path, "profile")
        with content_of(path, "profile", "step-time table"):
            host = table.get("host_s", 0.0), table.get("host_row_s", 0.0)
            return cls(tuple(table["sizes"]), tuple(table["seconds"]), table["source"], *host)

    def save(self, path: Path) -> None:
        """Write the profile as JSON."""
        table = {
            "source": self.source,
            "host_s": self.host_s,
            "host_row_s": self.host_row_s,
            "sizes": self.sizes,
            "seconds": self.seconds,
        }
        path.write_text(json.dumps(table, indent=1) + "\n")

    def step_time_s(self, tokens: int, rows: int) -> float:
        """Seconds of a batch, as profiled; 0 for no tokens."""
        if tokens <= 0:
            return 0.0
        return self.forward_s(self.entry(tokens), tokens) + self.host_time_s(rows)

    def entry(self, tokens: int) -> int:
        """Index of the profiled size used for this many tokens."""
        return min(bisect.bisect_left(self.sizes, tokens), len(self.sizes) - 1)

    def forward_s(self, entry: int, tokens: int) -> float:
        """Seconds of the forward pass alone."""
        return self.seconds[entry] * max(1.0, tokens / self.sizes[entry])

    def host_time_s(self, rows: int) -> float:
        """Seconds of a step outside of the forward pass."""
        return self.host_s + self.host_row_s * (rows - 1)


@functools.cache
def by_tokens(profile: StepProfile) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """``forward_s`` and ``entry`` of every token count up to the largest size, from 0 on.

    Schedulers ask several times a step: looking up takes a fifth of working it out.
    """
    entries = tuple(profile.entry(n) for n in range(profile.sizes[-1] + 1))
    return tuple(profile.forward_s(e, n) for n, e in enumerate(entries)), entries


@dataclass(frozen=True, slots=True)
class StepProfiles:
    """A profile for each tensor-parallel degree."""

    by_degree: Mapping[int, StepProfile]

    def cost_model(self, degrees: Sequence[int]) -> "StepTable":
        """A table that begins with all of them."""
        return StepTable(self.by_degree)


class StepTable:
    """A ``CostModel`` over one profile per tensor-parallel degree. Every scheduler owns its own."""

    def __init__(self, profiles: Mapping[int, StepProfile]) -> None:
        self._profiles = dict(profiles)
        self._by_tokens = {
            degree: (*by_tokens(p), p.host_s, p.host_row_s) for degree, p in profiles.items()
        }
        self._common = dict.fromkeys(profiles, 1.0)
        self._sizes = {degree: [1.0] * len(p.sizes) for degree, p in profiles.items()}

    def step_time_s(
        self, tokens: int, rows: int, spec: InstanceSpec, mix: Mix | None = None
    ) -> float:
        """See ``CostModel.step_time_s``. Raises KeyError for a degree without a profile."""
        if tokens <= 0:
            return 0.0
        degree = spec.tp_degree
        forward_s, entries, host_s, host_row_s = self._by_tokens[degree]
        if tokens < len(entries):
            entry = entries[tokens]
            seconds = forward_s[tokens] + (host_s + host_row_s * (rows - 1))
        else:
            entry = entries[-1]
            seconds = self._profiles[degree].step_time_s(tokens, rows)
        return seconds * (self._common[degree] * self._sizes[degree][entry])

    def observe(
        self, tokens: int, rows: int, spec: InstanceSpec, seconds: float, mix: Mix | None = None
    ) -> None:
        """Move the factors towards what was measured."""
        predicted = self.step_time_s(tokens, rows, spec)
        if predicted <= 0.0 or seconds <= 0.0 or seconds == predicted:
            return
        error = max(-LOG_LIMIT, min(LOG_LIMIT, math.log(seconds / predicted)))
        degree = spec.tp_degree
        self._common[degree] *= math.exp(COMMON_RATE * error)
        entry = self._profiles[degree].entry(tokens)
        self._sizes[degree][entry] *= math.exp(SIZE_RATE * error)

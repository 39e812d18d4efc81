"""How long a batch takes, from a measured table that heals itself.

The key is the number of tokens executed in the batch, rounded up to the next profiled size
(dilaserve.md B2 and D9: profiles are jagged, so they are neither interpolated nor smoothed).
Beyond the largest size the last entry is scaled in proportion. Observed batches correct the
table: a common factor learns that the machine is faster or slower than the profiled one, a
factor per size learns the rest (dilaserve.md Part E 6).
"""

import bisect
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stepserve.core.errors import FieldError
from stepserve.core.instance import InstanceSpec
from stepserve.core.step import Step

COMMON_RATE = 0.02
SIZE_RATE = 0.05
LOG_LIMIT = math.log(8.0)
"""One observation counts as at most 8 times off: a stall must not poison the table."""


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Measured seconds per batch size; sizes ascend. ``source`` says where it was measured."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    source: str

    def __post_init__(self) -> None:
        """Raises FieldError for an empty, unsorted or non-positive table."""
        if not self.sizes or len(self.sizes) != len(self.seconds):
            raise FieldError("profile.sizes", "needs one entry in seconds per size, at least one")
        if list(self.sizes) != sorted(set(self.sizes)) or self.sizes[0] < 1:
            raise FieldError("profile.sizes", "must ascend from at least 1")
        if not all(s > 0 and math.isfinite(s) for s in self.seconds):
            raise FieldError("profile.seconds", "must be positive and finite")

    @classmethod
    def load(cls, path: Path) -> "StepProfile":
        """Read a profile written by ``save``."""
        table = json.loads(path.read_text())
        return cls(tuple(table["sizes"]), tuple(table["seconds"]), table["source"])

    def save(self, path: Path) -> None:
        """Write the profile as JSON."""
        table = {"source": self.source, "sizes": self.sizes, "seconds": self.seconds}
        path.write_text(json.dumps(table, indent=1) + "\n")


class StepTable:
    """A ``CostModel`` over one profile. Every scheduler owns its own."""

    def __init__(self, profile: StepProfile) -> None:
        self._profile = profile
        self._common = 0.0
        self._sizes = [0.0] * len(profile.sizes)

    def step_time_s(self, steps: Sequence[Step], spec: InstanceSpec) -> float:
        """Seconds of a batch of these steps on this instance; 0 for an empty batch."""
        if len(steps) == 1:  # the common question: "what would this many tokens cost?"
            tokens = steps[0].query_tokens
        else:
            tokens = sum(step.query_tokens for step in steps)
        if tokens <= 0:
            return 0.0
        index, seconds = self._entry(tokens)
        return seconds * math.exp(self._common + self._sizes[index])

    def observe(self, steps: Sequence[Step], spec: InstanceSpec, seconds: float) -> None:
        """Move the factors towards what was measured."""
        predicted = self.step_time_s(steps, spec)
        if predicted <= 0.0 or seconds <= 0.0:
            return
        error = max(-LOG_LIMIT, min(LOG_LIMIT, math.log(seconds / predicted)))
        index, _ = self._entry(sum(step.query_tokens for step in steps))
        self._common += COMMON_RATE * error
        self._sizes[index] += SIZE_RATE * error

    def _entry(self, tokens: int) -> tuple[int, float]:
        """Index of the profiled size used for this many tokens, and its seconds unhealed."""
        sizes, seconds = self._profile.sizes, self._profile.seconds
        index = bisect.bisect_left(sizes, tokens)
        if index < len(sizes):
            return index, seconds[index]
        return len(sizes) - 1, seconds[-1] * tokens / sizes[-1]

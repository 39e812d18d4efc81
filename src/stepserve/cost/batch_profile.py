"""Measured batches of an autoregressive model: what its batch-time tables begin with."""

import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stepserve.core.errors import check
from stepserve.core.ids import InstanceId
from stepserve.core.instance import InstanceSpec
from stepserve.core.step import Mix
from stepserve.cost.batch_table import BatchTable
from stepserve.cost.roofline import Roofline
from stepserve.files import content_of, read_json

_RATES = {"flops_per_s": 1e12, "bytes_per_s": 1e11}
"""To begin the fit with; it leaves one of them if no batch was bound by it."""

_ANYWHERE = InstanceSpec(InstanceId("profiled"), 1, 1, 1, 1)


@dataclass(frozen=True, slots=True)
class BatchProfile:
    """``steps``: batches and their seconds, measured as ``source`` says; ``line`` fits them.

    ``learned``: what was measured later, while serving. Of instances of one tensor-parallel degree.
    """

    line: Roofline
    steps: tuple[tuple[Mix, float], ...]
    source: str
    learned: tuple[tuple[Mix, float], ...] = ()

    @classmethod
    def fitted(
        cls,
        *,
        parameters: float,
        layers: int,
        hidden: int,
        kv_bytes_per_token: float,
        weight_bytes: float,
        steps: Sequence[tuple[Mix, float]],
        source: str,
    ) -> "BatchProfile":
        """The profile of a model of that shape (see ``Roofline``).

        Raises FieldError without any measured batch.
        """
        shape = Roofline(parameters, layers, hidden, kv_bytes_per_token, weight_bytes, **_RATES)
        return cls(shape.fitted(steps), tuple(steps), source)

    def extended(self, learned: Sequence[tuple[Mix, float]]) -> "BatchProfile":
        """With what was measured while serving, in place of what was learned before."""
        line = self.line.fitted((*self.steps, *learned))
        return dataclasses.replace(self, line=line, learned=tuple(learned))

    def cost_model(self, degrees: Sequence[int] = (1,)) -> BatchTable:
        """A table that has learned the measured batches and nothing else.

        Every tensor-parallel degree begins with the same times, and learns its own.
        """
        table = BatchTable(dict.fromkeys(degrees, self.line))
        measured = (*self.steps, *self.learned)
        for degree, (mix, seconds) in itertools.product(degrees, measured):
            spec = dataclasses.replace(_ANYWHERE, tp_degree=degree)
            rows = mix.decodes + (mix.prefill_tokens > 0)
            table.observe(mix.prefill_tokens + mix.decodes, rows, spec, seconds, mix)
        return table

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        table = {
            "source": self.source,
            "line": dataclasses.asdict(self.line),
            "steps": [[*mix, seconds] for mix, seconds in self.steps],
            "learned": [[*mix, seconds] for mix, seconds in self.learned],
        }
        path.write_text(json.dumps(table, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path, field: str = "profile") -> "BatchProfile":
        """Read what ``save`` wrote. Raises FieldError (``field``) for a file of another kind."""
        table = read_json(path, field)
        with content_of(path, field, "batch profile"):
            steps, learned = (
                tuple((Mix(*map(int, mix)), _seconds(s)) for *mix, s in rows)
                for rows in (table["steps"], table.get("learned", ()))
            )
            return cls(Roofline(**table["line"]), steps, table["source"], learned)


def _seconds(value: float) -> float:
    check(0.0 < value < math.inf, "profile.steps", "must have seconds that are positive and finite")
    return float(value)

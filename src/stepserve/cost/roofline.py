"""Seconds of a batch of autoregressive steps from a model's shape: what a table starts from.

Source: DynaServe 3.2 (the formula) and DynaServe 2.3 (the constants of the published models).
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepserve.core.errors import FieldError
from stepserve.core.step import Mix


@dataclass(frozen=True, slots=True)
class Roofline:
    """Seconds of a batch from a model's shape: the larger of compute and memory time, and a base.

    ``hidden`` is the width of attention (query heads times head size); ``flops_per_s`` and
    ``bytes_per_s`` are what all GPUs of an instance sustain together. All-reduces are left to the
    rates. Source: DynaServe 3.2; ``pctx`` is not known of several chunks together, their mean
    (by tokens) stands in for it.
    """

    parameters: float
    layers: int
    hidden: int
    kv_bytes_per_token: float
    weight_bytes: float
    flops_per_s: float
    bytes_per_s: float
    base_s: float = 0.005

    def __post_init__(self) -> None:
        """Raises FieldError for a number that no time can be made of."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < math.inf or (value == 0 and field.name != "base_s"):
                raise FieldError(f"roofline.{field.name}", "must be positive and finite")

    @property
    def pair_s(self) -> float:
        """Seconds of one query-key pair."""
        return 4.0 * self.layers * self.hidden / self.flops_per_s

    def terms(self, mix: Mix) -> tuple[float, float]:
        """Floating-point operations, and bytes read."""
        prefill, pairs, decodes, context = mix
        flops = 2.0 * self.parameters * (prefill + decodes)
        flops += 4.0 * self.layers * self.hidden * (pairs + context)
        held = max(0.0, pairs / prefill - (prefill + 1) / 2.0) if prefill else 0.0
        return flops, self.weight_bytes + self.kv_bytes_per_token * (context + held)

    def seconds(self, mix: Mix) -> float:
        """Seconds of a batch; of an empty one too, as if it were run."""
        flops, read = self.terms(mix)
        return max(flops / self.flops_per_s, read / self.bytes_per_s) + self.base_s

    def fitted(self, steps: Sequence[tuple[Mix, float]], rounds: int = 10) -> "Roofline":
        """The same shape with both rates and the base as measured: least squared relative error.

        Each round takes a batch for compute or memory bound as the rates so far say. A rate that
        no batch tells of stays. Raises FieldError (``steps``) for none, or one of no time.
        """
        if not steps or min(seconds for _, seconds in steps) <= 0.0:
            raise FieldError("steps", "needs batches of positive seconds")
        flops, read = (np.array(t) for t in zip(*(self.terms(m) for m, _ in steps), strict=True))
        measured = np.array([seconds for _, seconds in steps])
        line = self
        for _ in range(rounds):
            compute = flops / line.flops_per_s >= read / line.bytes_per_s
            unit = (flops.max(), read.max(), 1.0)
            columns = (flops / unit[0] * compute, read / unit[1] * ~compute, np.ones(len(steps)))
            least = np.linalg.lstsq(np.column_stack(columns) / measured[:, None], measured**0)[0]
            per_flop, per_byte, base_s = (float(x) / u for x, u in zip(least, unit, strict=True))
            line = dataclasses.replace(
                line,
                flops_per_s=1.0 / per_flop if per_flop > 0.0 else line.flops_per_s,
                bytes_per_s=1.0 / per_byte if per_byte > 0.0 else line.bytes_per_s,
                base_s=max(0.0, base_s),
            )
        return line


A100_FLOPS_PER_S = 0.55 * 312e12
A100_BYTES_PER_S = 0.8 * 2.0e12
QWEN = {  # parameters, layers, hidden, bytes of keys and values per token
    "qwen2.5-14b": (14.77e9, 48, 5120, 196_608),
    "qwen2.5-32b": (32.76e9, 64, 5120, 262_144),
    "qwen2.5-72b": (72.71e9, 80, 8192, 327_680),
}
"""From the model cards; 8 key-value heads of 128 values each (DynaServe 2.3)."""


def roofline_on_a100(model: str, tp: int = 1) -> Roofline:
    """A published model in 16 bits on ``tp`` A100 (DynaServe 2.3: 55 % and 80 % of the peaks).

    Raises FieldError (``model``) for one that is not known.
    """
    if model not in QWEN:
        raise FieldError("model", f"no shape of {model!r}; known: {', '.join(QWEN)}")
    shape = QWEN[model]
    return Roofline(*shape, 2.0 * shape[0], tp * A100_FLOPS_PER_S, tp * A100_BYTES_PER_S)

"""How long a batch of an autoregressive model takes on A100 GPUs: the simulator's truth.

Source: DynaServe 3.10.1 (the models and their TP degrees), fitted to public operator
profiles by ``experiments/calibration/fit_a100.py``; docs/cost-model.md has the fit's error. The
constants are in ``data/a100.json``. Two profiles: ``a100`` (operators of the same generation as
the published system) and ``a100-aic`` (matrix products of a newer stack, without the small
operators between them: lower, for sensitivity).

Deviations from hardware: the time is a sum of parts, each with a constant rate or a few knots,
so it has none of the kernels' jags (up to a third between neighbouring sizes); decodes and
chunks of one batch are two attention kernels, one after the other; how a context is spread over
its rows or chunks does not matter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from stepserve.core.errors import FieldError, check_known
from stepserve.core.instance import InstanceSpec
from stepserve.core.step import Mix
from stepserve.sim.data import facts
from stepserve.sim.known_steps import Truth

GPU_BYTES = 80e9
PEAK_FLOPS_PER_S = 312e12
USABLE = 0.9
ACTIVATIONS = 0.04
"""Of the GPU's memory: what the engine may use, and what of that is no weights and no pages."""
VALUE_BYTES = 2
TABLE_TOKENS, TABLE_ROWS = 8192, 1024
"""Sizes to which the knots are tabled; above, the last slope goes on."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a dense model (from its public card) and the TP degree it is served at."""

    tp: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int

    @property
    def layer_parameters(self) -> int:
        """Weights of all matrix products but the output projection."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.mlp)

    @property
    def parameters(self) -> int:
        """Weights with embedding and output projection, which are not tied."""
        return self.layer_parameters + 2 * self.vocab * self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers, over the whole TP group."""
        return 2 * self.layers * self.kv_heads * self.head_dim * VALUE_BYTES

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values fit beside the weights, over the whole TP group."""
        room = self.tp * GPU_BYTES * (USABLE - ACTIVATIONS) - VALUE_BYTES * self.parameters
        return int(room / self.kv_bytes_per_token)

    def flops(self, mix: Mix) -> float:
        """Useful operations of a batch: 2 per weight and token, 4 per head size and pair.

        The embedding counts nothing, the output projection for decodes only.
        """
        tokens, pairs, decodes, context = mix
        linear = (tokens + decodes) * self.layer_parameters + decodes * self.vocab * self.hidden
        return 2.0 * linear + 4.0 * self.layers * self.heads * self.head_dim * (pairs + context)

    def mfu(self, flops: float, seconds: float) -> float:
        """Model FLOPs utilisation: relative to dense bf16 of the TP group."""
        return flops / (seconds * self.tp * PEAK_FLOPS_PER_S)


def known_models() -> tuple[str, ...]:
    """The models whose times on A100 are known."""
    return tuple(facts("a100")["models"])


@cache
def model_shape(model: str) -> ModelShape:
    """The shape of a known model. Raises FieldError for another."""
    models = facts("a100")["models"]
    if model not in models:
        raise FieldError("model", f"no A100 times of {model!r}; known: {', '.join(models)}")
    return ModelShape(**models[model])


class A100Truth(Truth):
    """Seconds of a batch of one model, at the TP degree of its shape. Learns nothing.

    Never falls as any part of the mix grows; a jump only between no batch and one. Does not read
    the ``spec``: an instance of another TP degree needs another model's times.
    """

    def __init__(self, model: str, profile: str = "a100") -> None:
        """Raises FieldError for an unknown ``model`` or ``profile``."""
        self.shape = model_shape(model)
        profiles = facts("a100")["profiles"]
        check_known(profile, profiles, "profile")
        fit = profiles["a100"][model] | profiles[profile][model]
        ms, reduce_ms = fit["linear_ms"], fit["all_reduce_ms"]
        by_tokens = [a + b for a, b in zip(ms, reduce_ms, strict=True)]
        self._tokens, self._per_token = _table(fit["tokens"], by_tokens, TABLE_TOKENS)
        by_rows = [fit["floor_ms"] + head for head in fit["head_ms"]]
        self._rows, self._per_row = _table(fit["rows"], by_rows, TABLE_ROWS)
        self._prefill_token_s: float = fit["prefill_ms"] / 1e3
        self._pair_s: float = fit["pair_ms"] / 1e3
        self._decode_s: float = fit["decode_ms"] / 1e3
        self._context_s: float = fit["context_ms"] / 1e3
        host_s, host_row_s = fit["host_ms"] / 1e3, fit["host_row_ms"] / 1e3
        self._rows = [s + host_s + host_row_s * n for n, s in enumerate(self._rows)]
        self._per_row += host_row_s

    def step_time_s(
        self, tokens: int, rows: int, spec: InstanceSpec, mix: Mix | None = None
    ) -> float:
        """Seconds of a batch; without ``mix`` its tokens are one prefill; 0 for no tokens.

        ``rows`` are requests, each of which pays for host time and the output projection.
        """
        if mix is None:
            mix = Mix(tokens, tokens * (tokens + 1) // 2)
        prefill, pairs, decodes, context = mix
        tokens = prefill + decodes
        if tokens <= 0:
            return 0.0
        time_s = prefill * self._prefill_token_s + pairs * self._pair_s
        time_s += decodes * self._decode_s + context * self._context_s
        time_s += self._tokens[min(tokens, TABLE_TOKENS)] + self._rows[min(rows, TABLE_ROWS)]
        if tokens > TABLE_TOKENS:
            time_s += (tokens - TABLE_TOKENS) * self._per_token
        if rows > TABLE_ROWS:
            time_s += (rows - TABLE_ROWS) * self._per_row
        return time_s


def _table(sizes: Sequence[int], ms: Sequence[float], until: int) -> tuple[list[float], float]:
    """Seconds at 0, 1, ... ``until``, linear between knots; and the slope beyond the last."""
    table: list[float] = [ms[0] / 1e3] * (sizes[0] + 1)
    slope = 0.0
    for (low, a), (high, b) in pairwise(zip(sizes, ms, strict=True)):
        slope = (b - a) / (high - low) / 1e3
        table += [a / 1e3 + slope * n for n in range(1, high - low + 1)]
    table += [table[-1] + slope * n for n in range(1, until - len(table) + 2)]
    return table[: until + 1], slope

"""From logits to one token and its confidence per position; vectorised over rows.

The distribution of a position is the softmax over the tokens that may stand there. A token
is its mode (temperature 0) or a draw from it after temperature, top-k, top-p and min-p.
**Confidence is the probability of the chosen token at temperature 1, before truncation**,
whatever the temperature it was drawn at; a log probability is the logarithm of the same.

Randomness is counter-based: one uniform number from (seed, output offset, step number of the
row), turned into a token by inverting the cumulative distribution. Rows share no generator,
so neither the company nor the instance of a row changes what it draws.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from stepserve.core.payload import SamplingParams

_MASK64 = (1 << 64) - 1


class Position(NamedTuple):
    """An output position that wants a token.

    ``step`` is the row's step number; ``forbidden`` are token ids that must not stand here,
    beside those that never may.
    """

    offset: int
    step: int
    params: SamplingParams
    forbidden: tuple[int, ...] = ()


@dataclass(slots=True)
class Answers:
    """Per position: chosen token, its confidence and log probability, and alternatives.

    ``top`` maps indices of positions that asked for alternatives to (token id, log
    probability) pairs, best first.
    """

    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: dict[int, tuple[tuple[int, float], ...]] = field(default_factory=dict)

    def extend(self, more: "Answers") -> None:
        """Append the answers to further positions."""
        self.top.update({len(self.tokens) + i: best for i, best in more.top.items()})
        self.tokens += more.tokens
        self.confidence += more.confidence
        self.logprobs += more.logprobs


def answer(logits: Tensor, positions: Sequence[Position], suppressed: Tensor) -> Answers:
    """Choose a token at each position. Overwrites ``logits``.

    logits is float32 ``[n, vocab]``; suppressed int64 ``[s]`` are ids that are never chosen.
    A position with a logit that is not a number has a confidence that is not one either.
    """
    logits[:, suppressed] = float("-inf")
    forbid(logits, positions)
    tokens = logits.argmax(-1)
    drawn = [i for i, p in enumerate(positions) if p.params.temperature > 0.0]
    if drawn:
        index = torch.tensor(drawn, device=logits.device)
        tokens[index] = draw(logits[index], [positions[i] for i in drawn])
    norm = logits.logsumexp(-1)
    logprobs = logits.gather(1, tokens[:, None])[:, 0] - norm
    return Answers(
        tokens.tolist(),
        logprobs.exp().tolist(),
        logprobs.tolist(),
        alternatives(logits, norm, positions, _largest),
    )


def forbid(logits: Tensor, positions: Sequence[Position], first: int = 0) -> None:
    """Rule out what may not stand at a position. Logits ``[n, ids]``, of ids from ``first`` on."""
    stop = first + logits.shape[1]
    pairs = [
        (i, token - first)
        for i, position in enumerate(positions)
        for token in position.forbidden
        if first <= token < stop
    ]
    if pairs:
        rows, ids = torch.tensor(pairs).to(logits.device, non_blocking=True).unbind(1)
        logits[rows, ids] = float("-inf")


def truncates(params: SamplingParams) -> bool:
    """Whether top-k, top-p or min-p cut something off."""
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def alternatives(
    logits: Tensor,
    norm: Tensor,
    positions: Sequence[Position],
    largest: Callable[[Tensor, int], tuple[Tensor, Tensor]],
) -> dict[int, tuple[tuple[int, float], ...]]:
    """``Answers.top`` of these positions.

    ``largest`` gives the k largest of some rows of ``logits``, largest first, and their ids, both
    ``[rows, k]``; ``norm`` ``[n]`` is the logarithm of the sum of exponentials.
    """
    counts = {i: p.params.logprobs for i, p in enumerate(positions) if p.params.logprobs}
    if not counts:
        return {}
    index = torch.tensor(list(counts), device=logits.device)
    best, tokens = largest(logits[index], max(counts.values()))
    values, ids = (best - norm[index, None]).float().tolist(), tokens.tolist()
    return {
        i: tuple(zip(ids[row][:count], values[row][:count], strict=True))
        for row, (i, count) in enumerate(counts.items())
    }


def _largest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    best = logits.topk(min(k, logits.shape[1]))
    return best.values, best.indices


def draw(logits: Tensor, positions: Sequence[Position]) -> Tensor:
    """Draw one token per position; logits float32 ``[n, vocab]`` -> int64 ``[n]``."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=logits.device, dtype=torch.float64)[:, None]

    params, vocab = [p.params for p in positions], logits.shape[1]
    probs = (logits.double() / column([p.temperature for p in params])).softmax(-1)
    if any(map(truncates, params)):
        top_k = column([p.top_k or vocab for p in params])
        top_p, min_p = column([p.top_p for p in params]), column([p.min_p for p in params])
        probs = truncate(probs, top_k, top_p, min_p)
    cumulative = probs.cumsum(-1)
    chance = column([uniform(p.params.seed, p.offset, p.step) for p in positions])
    # the first token whose cumulative probability exceeds the target has itself some
    picked = torch.searchsorted(cumulative, chance * cumulative[:, -1:], right=True)
    return picked[:, 0].clamp(max=vocab - 1)


def truncate(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Zero what top-k, then top-p, then min-p cut off. Probs ``[n, vocab]``, the rest ``[n, 1]``.

    The best token always stays. The result is not normalised.
    """
    ordered, order = probs.sort(-1, descending=True)
    rank = torch.arange(probs.shape[1], device=probs.device)
    ordered = ordered * (rank < top_k)
    ordered = ordered / ordered.sum(-1, keepdim=True)
    before = ordered.cumsum(-1) - ordered
    keep = (before < top_p) & (ordered >= min_p * ordered[:, :1])
    keep[:, 0] = True
    return torch.zeros_like(probs).scatter_(1, order, ordered * keep)


def uniform(seed: int, offset: int, step: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments (chained SplitMix64)."""
    state = 0
    for value in (seed, offset, step):
        state = (state + value + 0x9E3779B97F4A7C15) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return (state >> 11) / (1 << 53)

"""Tokens and confidences from logits of which every rank has a share of the vocabulary.

The same answers as ``sampling.answer``, up to rounding, with the same random numbers. What ranks
exchange of a row is its best logit, that one's token, and the logarithm of the sum of
exponentials; of a row that draws also its sum at that temperature, and the token drawn; of one
that asks for alternatives, so many candidates. A draw stays exact: ranks lie side by side on one
cumulative distribution, and the rank that the random number falls on finds the token within its
own part.

Top-k, top-p and min-p need the order of all tokens. Only rows that ask for them are gathered
whole, and go through ``sampling.draw`` itself: no bound on the candidates could be exact for
every distribution.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stepserve.engine.parallel import Group
from stepserve.engine.sampling import (
    Answers,
    Position,
    alternatives,
    draw,
    forbid,
    truncates,
    uniform,
)


def answer_apart(
    logits: Tensor, positions: Sequence[Position], suppressed: Tensor, vocab: int, group: Group
) -> Answers:
    """Choose a token at each position, on every rank alike. Overwrites ``logits``.

    logits is float32 ``[n, share]``, the rows of the vocabulary of ``vocab`` tokens from
    ``rank * share`` on, padded at the end; for the rest see ``sampling.answer``.
    """
    first = group.rank * logits.shape[1]
    _exclude(logits, positions, suppressed, first, vocab)
    best = logits.max(-1)
    mine = torch.stack((best.values, best.indices + first, logits.logsumexp(-1).double()), -1)
    found = group.all_gather(mine)  # [ranks, n, 3], float64: token ids are exact
    norm = found[..., 2].logsumexp(0)
    winner = found[..., 0].argmax(0)
    chosen = found[winner, torch.arange(len(winner), device=logits.device)]
    values, tokens = chosen[:, 0].clone(), chosen[:, 1].long()
    drawing = [i for i, p in enumerate(positions) if p.params.temperature > 0.0]
    for rows, drawn in (
        ([i for i in drawing if not truncates(positions[i].params)], _draw_apart),
        ([i for i in drawing if truncates(positions[i].params)], _draw_whole),
    ):
        if rows:
            index = torch.tensor(rows, device=logits.device)
            asked = [positions[i] for i in rows]
            tokens[index], values[index] = drawn(
                logits[index], asked, chosen[index, 0], vocab, group
            )
    logprobs = (values - norm).float()
    return Answers(
        tokens.tolist(),
        logprobs.exp().tolist(),
        logprobs.tolist(),
        alternatives(logits, norm, positions, lambda rows, k: _largest(rows, k, vocab, group)),
    )


def _exclude(
    logits: Tensor, positions: Sequence[Position], suppressed: Tensor, first: int, vocab: int
) -> None:
    """Rule out padding, and of the tokens that may not stand somewhere those of this rank."""
    share = logits.shape[1]
    logits[:, max(0, vocab - first) :] = float("-inf")
    own = suppressed - first
    logits[:, own[(own >= 0) & (own < share)]] = float("-inf")
    forbid(logits, positions, first)


def _draw_apart(
    logits: Tensor, positions: Sequence[Position], best: Tensor, vocab: int, group: Group
) -> tuple[Tensor, Tensor]:
    """Tokens drawn from the whole distribution, and their logits; best float64 ``[n]``."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=logits.device, dtype=torch.float64)

    temperature = column([p.params.temperature for p in positions])
    chance = column([uniform(p.params.seed, p.offset, p.step) for p in positions])
    cumulative = ((logits.double() - best[:, None]) / temperature[:, None]).exp().cumsum(-1)
    ends = group.all_gather(cumulative[:, -1]).cumsum(0)  # [ranks, n]
    target = chance * ends[-1]
    # the first rank whose end exceeds the target has some of the distribution itself
    owner = torch.minimum((ends <= target).sum(0), (ends < ends[-1]).sum(0))
    start = ends[group.rank - 1] if group.rank else torch.zeros_like(target)
    inside = torch.searchsorted(cumulative, (target - start)[:, None], right=True)[:, 0]
    last = (cumulative < cumulative[:, -1:]).sum(-1)  # what follows has no probability
    picked = torch.minimum(inside, last).clamp(max=logits.shape[1] - 1)
    value = logits.gather(1, picked[:, None])[:, 0]
    mine = torch.stack((picked + group.rank * logits.shape[1], value.double()), -1)
    drawn = group.all_gather(mine)[owner, torch.arange(len(owner), device=logits.device)]
    return drawn[:, 0].long(), drawn[:, 1]


def _draw_whole(
    logits: Tensor, positions: Sequence[Position], best: Tensor, vocab: int, group: Group
) -> tuple[Tensor, Tensor]:
    """Tokens drawn after truncation, and their logits: these rows are gathered."""
    whole = group.all_gather(logits).transpose(0, 1).flatten(1)[:, :vocab]
    tokens = draw(whole, positions)
    return tokens, whole.gather(1, tokens[:, None])[:, 0].double()


def _largest(logits: Tensor, k: int, vocab: int, group: Group) -> tuple[Tensor, Tensor]:
    """The k largest of every rank's largest; float64 and int64 ``[rows, k]``."""
    share = logits.shape[1]
    most = min(k, vocab)
    mine = logits.topk(min(most, share))
    pairs = torch.stack((mine.values.double(), mine.indices + group.rank * share), -1)
    found = group.all_gather(pairs).transpose(0, 1).flatten(1, 2)  # [rows, candidates, 2]
    best = found[..., 0].topk(most)
    return best.values, found[..., 1].long().gather(1, best.indices)

"""The most probable token and its confidence, without all logits of a position in memory.

A slice of the vocabulary at a time, with a running maximum and a running sum. What comes out is
what ``sampling.answer`` says of the same logits; with one slice, bit for bit.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stepserve.engine.models.transformer import DecoderModel
from stepserve.engine.sampling import Answers, Position, forbid

IDS_PER_SLICE = 1 << 15
LEAST_IDS_PER_SLICE = 1 << 10
LOGITS_PER_SLICE = 1 << 24
"""Most logits that exist at once (64 MB of float32), unless there are 16,384 positions."""


def wants_mode(position: Position) -> bool:
    """Whether the most probable token is all that is asked for: no draw, no alternatives."""
    return position.params.temperature <= 0.0 and not position.params.logprobs


def modes(
    model: DecoderModel, hidden: Tensor, positions: Sequence[Position], never: Tensor
) -> Answers:
    """The most probable token at each of n positions; of equally probable ones the lowest id.

    ``hidden`` is ``[n, hidden]``; ``never`` bool ``[vocab]`` marks ids that are never chosen. As of
    ``answer``: a logit that is not a number makes a confidence that is not one either.
    """
    vocab = len(never)
    size = min(IDS_PER_SLICE, max(LEAST_IDS_PER_SLICE, LOGITS_PER_SLICE // len(positions)))
    best, tokens, norm = _slice(model, hidden, positions, never, 0, min(size, vocab))
    for start in range(size, vocab, size):
        stop = min(start + size, vocab)
        value, token, total = _slice(model, hidden, positions, never, start, stop)
        tokens = torch.where(value > best, token, tokens)
        best, norm = torch.maximum(best, value), torch.logaddexp(norm, total)
    logprobs = best - norm
    # one read-back, which waits for the device; float64 holds ids and float32 exactly
    table = torch.stack([tokens.double(), logprobs.exp().double(), logprobs.double()])
    ids, confidence, logs = table.tolist()
    return Answers(list(map(int, ids)), confidence, logs)


def _slice(
    model: DecoderModel,
    hidden: Tensor,
    positions: Sequence[Position],
    never: Tensor,
    start: int,
    stop: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Largest logit, its id, and the log of the sum, over ids from ``start`` to ``stop``."""
    logits = model.logits(hidden, slice(start, stop))
    logits.masked_fill_(never[start:stop], float("-inf"))
    forbid(logits, positions, start)
    value, token = logits.max(-1)
    return value, token + start, logits.logsumexp(-1)


def in_order(answers: Answers, order: Sequence[int]) -> Answers:
    """Answers whose i-th is to position ``order[i]``, by position."""
    at = sorted(range(len(order)), key=order.__getitem__)
    return Answers(
        [answers.tokens[i] for i in at],
        [answers.confidence[i] for i in at],
        [answers.logprobs[i] for i in at],
        {order[i]: best for i, best in answers.top.items()},
    )

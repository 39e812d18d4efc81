"""Training batches: problems as token rows, noised the way a response is decoded.

A third of the rows each is masked anywhere in the response (the LLaDA objective), shows a state
of block-wise decoding (a clean prefix, one noisy block, everything after it masked), or asks for
the next few tokens only (a clean prefix, everything after it masked).
"""

import random
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from stepserve.engine.bundled.tasks import sample
from stepserve.engine.bundled.vocabulary import EOS, MASK, PAD, prompt_ids, response_ids

BLOCK_LENGTHS = (8, 16, 32)
CANVAS_STEP = 8  # canvases are multiples of this many tokens
MAX_CANVAS = 128
EOS_FILL_WEIGHT = 0.1
FRONTIER_SHARE = 0.35  # of the rows
BLOCK_SHARE = 0.325  # of the rows; the rest is masked at random anywhere in the response
FRONTIER_TOKENS = 3


@dataclass(frozen=True, slots=True)
class Row:
    """One training row before noising; ``answer`` is the length of the response with one EOS."""

    prompt: list[int]
    canvas: list[int]
    answer: int

    @property
    def length(self) -> int:
        """Tokens of the whole row."""
        return len(self.prompt) + len(self.canvas)


@dataclass(frozen=True, slots=True)
class Batch:
    """Tensors of one micro-batch, all ``[rows, length]``; weights sum to about 1 over it."""

    inputs: Tensor
    targets: Tensor
    weights: Tensor
    valid: Tensor


def make_row(tokenizer: Tokenizer, rng: random.Random, shares: dict[str, float]) -> Row:
    """A training problem on a canvas that is filled up with EOS, of varied size."""
    problem = sample(rng, shares)
    response = response_ids(tokenizer, problem.response)
    size = -(-len(response) // CANVAS_STEP) * CANVAS_STEP
    chance = rng.random()
    if chance > 0.85:
        size = rng.randrange(size, MAX_CANVAS + 1, CANVAS_STEP)
    elif chance > 0.5:
        size += CANVAS_STEP
    fill = [EOS] * (size - len(response))
    return Row(prompt_ids(tokenizer, problem.prompt), response + fill, len(response))


def noise(row: Row, level: float, rng: random.Random) -> tuple[list[bool], list[bool]]:
    """Which canvas positions are masked, and which of those carry loss.

    ``level`` is the chance of a position to be masked, where masking is random.
    """
    chance = rng.random()
    if chance < FRONTIER_SHARE:
        return _frontier(row, rng)
    size = len(row.canvas)
    masked = [rng.random() < max(level, 1 / size) for _ in range(size)]
    if chance < FRONTIER_SHARE + BLOCK_SHARE:
        return _block(row, masked, rng)
    if not any(masked):
        masked[rng.randrange(row.answer)] = True
    return masked, masked


def _frontier(row: Row, rng: random.Random) -> tuple[list[bool], list[bool]]:
    """Everything from a random position on is masked; loss on the next few tokens.

    Random masking rarely asks what a look-up needs: a name occurs twice in a chain, and a
    masked one is mostly copied from its visible twin. Here the answer must come from the prompt.
    """
    size = len(row.canvas)
    start = rng.randrange(row.answer)
    end = min(start + FRONTIER_TOKENS, row.answer)
    masked = [False] * start + [True] * (size - start)
    return masked, [start <= index < end for index in range(size)]


def _block(row: Row, masked: list[bool], rng: random.Random) -> tuple[list[bool], list[bool]]:
    """A state of block-wise decoding: clean prefix, one noisy block, masked suffix."""
    size, length = len(row.canvas), rng.choice(BLOCK_LENGTHS)
    blocks_with_answer = -(-row.answer // length)
    start = rng.randrange(blocks_with_answer) * length
    end = min(start + length, size)
    middle = masked[start:end]
    if not any(middle):
        middle[rng.randrange(len(middle))] = True
    before, after = [False] * start, size - end
    return before + middle + [True] * after, before + middle + [False] * after


def make_batch(rows: list[Row], rng: random.Random) -> Batch:
    """Noise the rows at stratified levels and pad them to one length."""
    count, length = len(rows), max(row.length for row in rows)
    inputs = torch.full((count, length), PAD)
    targets = torch.full((count, length), PAD)
    weights = torch.zeros(count, length)
    valid = torch.zeros(count, length, dtype=torch.bool)
    levels = [(index + rng.random()) / count for index in range(count)]
    rng.shuffle(levels)
    for index, row in enumerate(rows):
        masked, lossy = (torch.tensor(flags) for flags in noise(row, levels[index], rng))
        start, end = len(row.prompt), row.length
        canvas = torch.tensor(row.canvas)
        inputs[index, :start] = torch.tensor(row.prompt)
        inputs[index, start:end] = canvas.masked_fill(masked, MASK)
        targets[index, start:end] = canvas
        weight = lossy.float()
        weight[row.answer :] *= EOS_FILL_WEIGHT
        total = float(weight.sum())
        # mean over the row's masked tokens; a row with few of them says less and counts less
        weights[index, start:end] = weight / total * min(1.0, 0.4 + 0.6 * total / 8) / count
        valid[index, :end] = True
    return Batch(inputs, targets, weights, valid)

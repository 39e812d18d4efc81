"""Plain block-wise sampler without a cache: the reference that training is judged by.

It is the algorithm of the public LLaDA code with a confidence threshold. The serving engine has
its own executor; this one forwards whole rows and keeps nothing between steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from stepserve.engine.bundled.tasks import Problem, correct
from stepserve.engine.bundled.train import PaddedAttention
from stepserve.engine.bundled.vocabulary import EOS, MASK, PAD, SUPPRESSED, prompt_ids
from stepserve.engine.models.transformer import DiffusionTransformer


@dataclass(frozen=True, slots=True)
class Decoding:
    """How responses are decoded. ``threshold`` None unmasks one token per step."""

    threshold: float | None
    block_length: int = 16
    max_tokens: int = 96


@dataclass(frozen=True, slots=True)
class Outcome:
    """One decoded problem: ``steps`` forward passes wrote ``tokens`` tokens (with the EOS)."""

    task: str
    kind: str
    size: int
    text: str
    correct: bool
    steps: int
    tokens: int


class Rows:
    """A batch of rows in decoding: prompts, then canvases, then padding to one length."""

    def __init__(self, prompts: Sequence[list[int]], decoding: Decoding) -> None:
        self.decoding = decoding
        self.starts = torch.tensor([len(prompt) for prompt in prompts])
        length = int(self.starts.max()) + decoding.max_tokens
        self.ids = torch.full((len(prompts), length), PAD)
        for index, prompt in enumerate(prompts):
            end = len(prompt) + decoding.max_tokens
            self.ids[index, : len(prompt)] = torch.tensor(prompt)
            self.ids[index, len(prompt) : end] = MASK
        self.blocks = torch.zeros(len(prompts), dtype=torch.long)
        self.steps = torch.zeros(len(prompts), dtype=torch.long)

    def step(self, model: DiffusionTransformer, active: Tensor) -> Tensor:
        """One forward pass of the active rows (indices); returns those not finished."""
        ids = self.ids[active]
        positions = torch.arange(ids.shape[1]).expand(ids.shape)
        hidden = model.hidden(ids, positions, PaddedAttention(ids != PAD))
        size = self.decoding.block_length
        first = self.starts[active] + self.blocks[active] * size
        where = first[:, None] + torch.arange(size)
        rows = torch.arange(len(active))[:, None]
        logits = model.logits(hidden[rows, where])
        block = unmask(ids[rows, where], logits, self.decoding.threshold)
        self.ids[active[:, None], where] = block
        self.steps[active] += 1
        full = ~(block == MASK).any(1)
        ended = full & (block == EOS).any(1)
        self.blocks[active] += full.long()
        ended |= self.blocks[active] * size >= self.decoding.max_tokens
        return active[~ended]

    def response(self, index: int) -> list[int]:
        """The response tokens of a row, up to and with the first EOS."""
        start = int(self.starts[index])
        canvas: list[int] = self.ids[index, start : start + self.decoding.max_tokens].tolist()
        return canvas[: canvas.index(EOS) + 1] if EOS in canvas else canvas


def unmask(block: Tensor, logits: Tensor, threshold: float | None) -> Tensor:
    """Fill confident masked positions; block ``[rows, size]``, logits ``[rows, size, vocab]``.

    Positions with a confidence strictly above the threshold are filled, and where a row has
    none, its single most confident masked position.
    """
    logits[..., list(SUPPRESSED)] = -torch.inf
    confidence, best = logits.softmax(-1).max(-1)
    masked = block == MASK
    confidence = confidence.masked_fill(~masked, -1.0)
    top = confidence.argmax(1, keepdim=True)
    chosen = torch.zeros_like(masked).scatter(1, top, True) & masked
    if threshold is not None:
        above = confidence > threshold
        chosen = torch.where(above.any(1, keepdim=True), above, chosen)
    return torch.where(chosen, best, block)


@torch.inference_mode()
def decode(
    model: DiffusionTransformer,
    tokenizer: Tokenizer,
    problems: Sequence[Problem],
    decoding: Decoding,
    batch_rows: int = 32,
) -> list[Outcome]:
    """Decode the problems in batches and check every answer."""
    outcomes: list[Outcome] = []
    for begin in range(0, len(problems), batch_rows):
        group = problems[begin : begin + batch_rows]
        rows = Rows([prompt_ids(tokenizer, problem.prompt) for problem in group], decoding)
        active = torch.arange(len(group))
        while len(active):
            active = rows.step(model, active)
        for index, problem in enumerate(group):
            tokens = rows.response(index)
            text = tokenizer.decode([t for t in tokens if t != EOS]).strip()
            outcomes.append(
                Outcome(
                    problem.task,
                    problem.kind,
                    problem.size,
                    text,
                    correct(problem, text),
                    int(rows.steps[index]),
                    len(tokens),
                )
            )
    return outcomes

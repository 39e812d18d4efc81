"""Frequencies of rotary position embeddings, plain or stretched to longer contexts."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's: slow frequencies are divided by ``factor``, fast ones are kept.

    Source: ``rope_type: llama3`` of Hugging Face transformers 5.19. What lies between the
    wavelengths ``original_positions / low`` and ``original_positions / high`` is interpolated.
    """

    factor: float
    low: float
    high: float
    original_positions: int

    def apply(self, frequencies: Tensor, theta: float) -> tuple[Tensor, float]:
        """Scaled ``[dim / 2]`` frequencies in radians per position, and 1 for the tables."""
        turns = self.original_positions * frequencies / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
        return frequencies * (kept + (1.0 - kept) / self.factor), 1.0


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071), as Qwen2.5 and Qwen3 document it for long contexts.

    Source: ``rope_type: yarn`` of Hugging Face transformers 5.19, without its options of
    DeepSeek's. ``attention``: factor on the tables; the paper's is 1 + ln(factor) / 10.
    """

    factor: float
    original_positions: int
    attention: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def apply(self, frequencies: Tensor, theta: float) -> tuple[Tensor, float]:
        """Scaled ``[dim / 2]`` frequencies in radians per position, and a factor on the tables."""
        dim = 2 * len(frequencies)

        def index(turns: float) -> float:
            """Where a frequency makes so many turns within the original positions."""
            length = self.original_positions / (2 * math.pi * turns)
            return dim * math.log(length) / (2 * math.log(theta))

        first = max(math.floor(index(self.beta_fast)), 0)
        last = min(math.ceil(index(self.beta_slow)), dim - 1)
        steps = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device)
        slow = ((steps - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
        return frequencies * (1.0 - slow + slow / self.factor), self.attention


Scaling = Llama3Scaling | YarnScaling


def rotary_tables(
    *,
    dim: int,
    theta: float,
    positions: int,
    scaling: Scaling | None,
    device: torch.device | None,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 ``[positions, dim / 2]`` each."""
    exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=device)
    frequencies, factor = 1.0 / theta ** (exponent / dim), 1.0
    if scaling is not None:
        frequencies, factor = scaling.apply(frequencies, theta)
    steps = torch.arange(positions, dtype=torch.float32, device=device)
    angle = torch.outer(steps, frequencies)
    return angle.cos() * factor, angle.sin() * factor

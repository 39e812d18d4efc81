"""A model as everybody but its engine knows it, and the port of engines."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stepserve.core.instance import InstanceSpec
from stepserve.core.protocols import Executor
from stepserve.core.request import Family


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a server knows of a model. Facts need no weights, and can be pickled.

    ``folder`` has the tokenizer's files and, where they were measured or trained, profiles and
    predictors. ``context_tokens`` bounds prompt plus output canvas. A diffusion model has a
    ``mask_token_id`` and ``block_lengths``; a ``block_causal`` one never computes a finished block
    again. The last five are the shape of the weights, which batch times are fitted with;
    ``kv_bytes_per_token`` bounds what a hand-over moves.
    """

    name: str
    family: Family
    folder: Path
    context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    default_max_tokens: int
    mask_token_id: int | None
    block_lengths: tuple[int, ...]
    default_block_length: int
    block_causal: bool
    layers: int
    hidden_size: int
    parameters: int
    weight_bytes: int
    kv_bytes_per_token: int


class Engine(Protocol):
    """Makes what runs the steps of instances: a class ``(options, config: ServeConfig)``.

    Making one reads what ``facts`` need and no weights: it is also made where no instance lives.
    """

    @property
    def facts(self) -> ModelFacts:
        """Of the configured model."""
        ...

    def check(self, degrees: Sequence[int]) -> None:
        """Get ready for instances of these tensor-parallel degrees.

        What instances in this process will share, such as weights, is loaded here. Raises
        FieldError naming what cannot be had. Called before anything is served.
        """
        ...

    def executor(self, spec: InstanceSpec, threads: int) -> Executor:
        """What runs an instance's steps, with so many CPU threads for each of its shares.

        Called on the thread that will run it. One of an autoregressive model implements
        ``KvPages``, too: its requests are handed over.
        """
        ...

"""The built-in engine: models of ``architectures`` on PyTorch.

Instances of degree 1 in one process share the weights. An instance of degree g is g processes,
or GPUs, each of which reads its share of them (``workers``).
"""

import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from stepserve.core.config import NoOptions, ServeConfig
from stepserve.core.errors import FieldError, check_known
from stepserve.core.instance import InstanceSpec
from stepserve.core.model import ModelFacts
from stepserve.core.request import Family
from stepserve.engine.ar_executor import AutoregressiveExecutor
from stepserve.engine.diffusion_executor import DiffusionExecutor
from stepserve.engine.hub import model_folder
from stepserve.engine.loader import LoadedModel, load_model
from stepserve.engine.parallel import Share
from stepserve.engine.workers import (
    ParallelAutoregressiveExecutor,
    ParallelExecutor,
    Setup,
    prepare,
)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class TorchEngine:
    """An ``Engine`` (``core.model``)."""

    Options = NoOptions

    def __init__(
        self, options: NoOptions, config: ServeConfig, loaded: LoadedModel | None = None
    ) -> None:
        """``loaded``: a model to be used in place of the configured folder's.

        Raises FieldError for a device or dtype that does not exist, and for a checkpoint that
        cannot be served: names and shapes of its tensors are compared, none is read.
        """
        check_known(config.dtype, DTYPES, "dtype")
        self._config, self._dtype = config, DTYPES[config.dtype]
        self._device = _device(config.device)
        self._folder = model_folder(config.model)
        self._loaded = loaded
        self._described = loaded or load_model(self._folder, "meta", self._dtype)
        self._loading = threading.Lock()
        self.facts = facts_of(self._described, self._folder)

    def check(self, degrees: Sequence[int]) -> None:
        """See ``Engine.check``: models are split by whole heads, layouts change on a CPU only."""
        if max(degrees) > 1:
            self._check_split(degrees)
        if self._config.cluster == "local" and 1 in degrees:
            self._whole()

    def _check_split(self, degrees: Sequence[int]) -> None:
        config = self._config
        for degree in degrees:
            Share.of(self._described.config, 0, degree)
        if self._described.folder is None:
            raise FieldError("model", "only a model in a folder can be split over processes")
        if self._device.type != "cpu":
            if config.cluster != "local":
                raise FieldError("layout", "degrees above 1 on GPUs need --cluster local")
            if min(degrees) == 1:
                raise FieldError("layout", "degree 1 beside others needs --device cpu")
            if set(degrees) - set(config.degrees):
                raise FieldError("control.tp_degrees", "a layout can change on --device cpu only")
            gpus = sum(config.degrees)
            if config.device != "cuda" or torch.cuda.device_count() < gpus:
                raise FieldError("device", f"must be cuda, with {gpus} GPUs, or cpu")
        if config.cluster == "local":
            prepare()

    def _whole(self) -> LoadedModel:
        """The model with all its weights, loaded once."""
        with self._loading:
            if self._loaded is None:
                try:
                    torch.empty(1, device=self._device)
                except (RuntimeError, AssertionError) as error:
                    raise _no_device(self._config.device, error) from error
                self._loaded = load_model(self._folder, self._device, self._dtype)
            return self._loaded

    def executor(
        self, spec: InstanceSpec, threads: int
    ) -> DiffusionExecutor | AutoregressiveExecutor | ParallelExecutor:
        """See ``Engine.executor``: on one device, or over a group of processes."""
        torch.set_num_threads(threads)
        tokens, pages = spec.page_tokens, spec.page_capacity
        autoregressive = self.facts.family is Family.AUTOREGRESSIVE
        if spec.tp_degree == 1:
            kind = AutoregressiveExecutor if autoregressive else DiffusionExecutor
            return kind(self._whole(), page_tokens=tokens, page_capacity=pages, threads=threads)
        assert spec.slot is not None, "instances are formed on slots"
        devices = tuple(
            "cpu" if self._device.type == "cpu" else f"{self._config.device}:{gpu}"
            for gpu in spec.slot.gpus
        )
        folder, hang_s = str(self._described.folder), self._config.hang_s
        setup = Setup(folder, devices, self._dtype, tokens, pages, threads, hang_s)
        return ParallelAutoregressiveExecutor(setup) if autoregressive else ParallelExecutor(setup)


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise _no_device(name, error) from error


def _no_device(name: str, error: Exception) -> FieldError:
    return FieldError("device", f"{name!r} cannot be used: {error}")


def facts_of(loaded: LoadedModel, folder: Path) -> ModelFacts:
    """The facts of a model, with its weights or without, whose tokenizer is in ``folder``."""
    shape, values = loaded.config, next(loaded.model.parameters()).element_size()
    parameters = list(loaded.model.parameters())
    return ModelFacts(
        name=loaded.name,
        family=loaded.family,
        folder=folder,
        context_tokens=shape.max_positions,
        vocab_size=shape.vocab_size,
        eos_token_ids=shape.eos_token_ids,
        default_max_tokens=loaded.default_max_tokens,
        mask_token_id=shape.mask_token_id,
        block_lengths=loaded.block_lengths,
        default_block_length=loaded.default_block_length,
        block_causal=shape.attention_block is not None,
        layers=shape.layers,
        hidden_size=shape.heads * shape.head_dim,
        parameters=sum(p.numel() for p in parameters),
        weight_bytes=sum(p.numel() * p.element_size() for p in parameters),
        kv_bytes_per_token=2 * shape.layers * shape.kv_heads * shape.head_dim * values,
    )

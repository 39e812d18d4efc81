"""A live cluster over a tiny random model, for tests that need no sensible text."""

import asyncio
import contextlib
import subprocess
import sys
import unittest.mock
from dataclasses import dataclass, field
from pathlib import Path

import torch

from stepserve.core.config import NoOptions, ServeConfig
from stepserve.core.frontend import RequestEnded, RequestRejected, TokensEmitted
from stepserve.core.ids import RequestId
from stepserve.core.payload import Payload, SamplingParams
from stepserve.core.request import (
    SLO,
    CacheMode,
    DiffusionOptions,
    Family,
    Request,
    ThresholdBounds,
)
from stepserve.cost.measured_batches import measure_profile
from stepserve.engine import torch_engine
from stepserve.engine.ar_executor import AutoregressiveExecutor
from stepserve.engine.loader import LoadedModel, load_model
from stepserve.engine.models.transformer import DecoderModel, ModelConfig
from stepserve.engine.torch_engine import TorchEngine, facts_of
from stepserve.families.profiles import BATCH_PROFILE
from stepserve.live import deploy
from support.diffusion_models import save_checkpoint

VOCABULARY = 64

MAKE = Path(__file__).parents[2] / "tools" / "random_checkpoint.py"


def tiny_model(seed=0, **changes):
    torch.manual_seed(seed)
    config = ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        layers=2,
        heads=2,
        kv_heads=2,
        mlp_size=64,
        max_positions=256,
        mask_token_id=1,
        eos_token_id=2,
        **changes,
    )
    model = DecoderModel(config).eval()
    return LoadedModel(model, config, "tiny", (8, 16), 8, 32, (0, 1))


def tiny_checkpoint(folder, seed=0):
    """``tiny_model`` in files: what processes can have shares of."""
    raw = {
        "architectures": ["LLaDAModelLM"],
        "d_model": 32,
        "n_heads": 2,
        "n_layers": 2,
        "mlp_hidden_size": 64,
        "vocab_size": VOCABULARY,
        "max_sequence_length": 256,
        "mask_token_id": 1,
        "eos_token_id": 2,
        "stepserve": {"block_lengths": [8, 16], "suppressed_token_ids": [0, 1]},
    }
    return save_checkpoint(folder, raw, tiny_model(seed).model)


def write_random(folder):
    """A small autoregressive model with a tokenizer and batch times, to be served over HTTP."""
    options = ("--layers", "2", "--hidden", "64", "--positions", "512")
    subprocess.run([sys.executable, MAKE, folder, *options], check=True, capture_output=True)
    quick_profile(load_model(folder)).save(folder / BATCH_PROFILE)


def make_live_request(
    frontend, name, *, output=24, prompt=10, cache=CacheMode.NONE, slo=None, floor=0.9
):
    """Greedy, no early end; with the threshold pinned, as by default, the same tokens
    whatever happens around it."""
    generator = torch.Generator().manual_seed(int(name))
    ids = tuple(torch.randint(3, VOCABULARY, (prompt,), generator=generator).tolist())
    options = DiffusionOptions(ThresholdBounds(0.9, floor), block_tokens=8, cache_mode=cache)
    request = Request(
        RequestId(name),
        Family.DIFFUSION,
        "tiny",
        prompt,
        output,
        frontend.now_s(),
        slo or SLO(),
        options,
    )
    return request, Payload(ids, SamplingParams(ignore_eos=True))


@dataclass
class Collected:
    tokens: list = field(default_factory=list)
    end: RequestEnded | RequestRejected | None = None


async def collect(frontend, request, payload, on_tokens=None):
    """Serve one request to its end; offsets must come in order, each once."""
    collected = Collected()
    async for update in frontend.submit(request, payload):
        if isinstance(update, TokensEmitted):
            for token in update.tokens:
                assert token.offset == len(collected.tokens), "emitted once, in order"
                collected.tokens.append(token.token_id)
            if on_tokens is not None:
                on_tokens(request)
        else:
            assert collected.end is None, "one end"
            collected.end = update
    assert collected.end is not None
    return collected


def engine_of(config, loaded):
    """The engine of a server, of a model that is there already."""
    return TorchEngine(NoOptions(), config, loaded)


def quick_profile(loaded):
    """Batch times of an autoregressive model, from a few batches."""
    executor = AutoregressiveExecutor(loaded, threads=1)
    facts, grid = facts_of(loaded, loaded.folder), ((0, 16), (0,), (0, 1))
    return measure_profile(executor, facts, "1 threads", *grid, repeats=1)


@contextlib.asynccontextmanager
async def running_cluster(config=None, listeners=(), loaded=None, planner=None, host=None):
    config = config or ServeConfig(
        instances=2, threads_per_instance=1, kv_pages=64, max_running_requests=8
    )
    executors = []

    def counted(name):
        class CountedExecutor(getattr(torch_engine, name)):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                executors.append(self)

        return unittest.mock.patch.object(torch_engine, name, CountedExecutor)

    with contextlib.ExitStack() as patches:
        for name in ("Diffusion", "Autoregressive", "Parallel", "ParallelAutoregressive"):
            patches.enter_context(counted(f"{name}Executor"))
        engine = engine_of(config, loaded or tiny_model())
        cluster = deploy.build_cluster(config, engine, listeners, planner, host)
        cluster.start()
        try:
            while not cluster.frontend.ready():
                await asyncio.sleep(0)
            yield cluster
        finally:
            idle = not cluster.loop.records
            await cluster.stop()
        if idle and executors:  # only that of a lost instance still holds what it held
            leaking = [executor for executor in executors if executor.used_pages]
            assert len(leaking) <= cluster.loop.losses < len(executors)


def assert_at_rest(cluster):
    """Nothing is left of any request."""
    scheduler = cluster.loop.supervisor.scheduler
    assert not cluster.loop.records
    assert not scheduler.ledger.requests
    assert scheduler.status().queued == 0
    for instance in scheduler.ledger.instances.values():
        assert instance.free_pages == instance.spec.page_capacity
        assert not instance.claims

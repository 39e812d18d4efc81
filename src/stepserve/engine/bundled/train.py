"""Training recipe of the bundled model: CPU only, seeded, data-parallel over processes.

Each process draws its own problems, works through micro-batches on one thread, and shares
gradients in one flat tensor per update. Run it with
``python -m stepserve.engine.bundled.train --minutes 95 --processes 2 --seed 0 --out DIR``.
"""

import argparse
import json
import os
import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from stepserve.engine.bundled.batches import Batch, Row, make_batch, make_row
from stepserve.engine.bundled.export import CONFIG, export_model
from stepserve.engine.bundled.tasks import MIX
from stepserve.engine.bundled.vocabulary import build_tokenizer
from stepserve.engine.models.transformer import DecoderModel

MICRO_ROWS = 16
POOL_BATCHES = 64  # micro-batches that are drawn and sorted by length together
WARMUP_UPDATES = 200
DECAY_FROM = 0.6  # share of the time after which the learning rate falls
EMBEDDING_RATE = 0.2  # of the learning rate; embeddings are multiplied by sqrt(hidden_size)
NEIGHBOURS = (-1, -2, 1)  # relative positions that the first heads start by attending to
NEIGHBOUR_STRENGTH = 7.0  # attention weight of about 0.97 on the position itself
FINAL_RATE = 0.02  # of the peak learning rate
EMA_DECAY = 0.997
START_MIX = {"lookup": 0.30, "list": 0.20, "story": 0.15, "arithmetic": 0.35}
"""Shares at the beginning: the tasks that are learned slowly come first."""
MIX_MOVES = (0.4, 0.6)  # shares of the time between which START_MIX gives way to the mix
MALLOC = {
    # keep freed activations instead of returning them to the system: twice the throughput
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "OMP_WAIT_POLICY": "PASSIVE",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run is asked for. ``minutes`` is wall time, the whole schedule follows it."""

    minutes: float
    processes: int
    seed: int
    out: Path
    rows_per_update: int = 64
    peak_rate: float = 1e-3
    save_every: float = 120.0  # seconds between checkpoints
    resume: bool = False


class PaddedAttention:
    """Full attention within padded rows, as explicit products: faster backward on a CPU."""

    def __init__(self, valid: Tensor) -> None:
        """``valid`` is ``[rows, length]``, False at padding."""
        self.bias: Tensor | None = None
        if not bool(valid.all()):
            self.bias = torch.zeros(valid.shape).masked_fill(~valid, -1e4)[:, None, None, :]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k and v are ``[rows, length, heads, head_dim]``, and so is the result."""
        scores = (q.transpose(1, 2) * q.shape[-1] ** -0.5) @ k.permute(0, 2, 3, 1)
        if self.bias is not None:
            scores = scores + self.bias
        mixed: Tensor = scores.softmax(-1) @ v.transpose(1, 2)
        return mixed.transpose(1, 2)


def new_model(seed: int) -> DecoderModel:
    """A freshly initialised model; embeddings have unit scale after their multiplication."""
    torch.manual_seed(seed)
    model = DecoderModel(CONFIG)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(".bias"):
                weight.zero_()
            if weight.ndim == 2:
                weight.normal_(0.0, CONFIG.hidden_size**-0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_((2 * CONFIG.layers) ** -0.5)
        for head, offset in enumerate(NEIGHBOURS):
            look_at(model, head, offset)
    return model


def look_at(model: DecoderModel, head: int, offset: int) -> None:
    """Make a head of the first layer attend to the token at a relative offset, at first.

    A look-up binds words to their neighbours, which needs such heads; from biases of zero they
    did not form in 20 M tokens. Rotating a query and a key by their positions turns the bias
    product into a sum of cosines of the distance, which peaks where the key is ``offset`` away.
    """
    size = CONFIG.head_dim
    angles = offset * CONFIG.rope_theta ** (-torch.arange(0, size, 2) / size)
    rows = slice(head * size, (head + 1) * size)
    for name in ("q_proj", "k_proj"):
        model.get_parameter(f"layers.0.{name}.weight")[rows] *= 0.3
    query = torch.cat([torch.ones_like(angles), torch.zeros_like(angles)])
    key = torch.cat([angles.cos(), -angles.sin()])
    model.get_parameter("layers.0.q_proj.bias")[rows] = NEIGHBOUR_STRENGTH * query
    model.get_parameter("layers.0.k_proj.bias")[rows] = NEIGHBOUR_STRENGTH * key


def batch_loss(model: DecoderModel, batch: Batch) -> Tensor:
    """Weighted cross-entropy over the positions that carry loss."""
    positions = torch.arange(batch.inputs.shape[1]).expand(batch.inputs.shape)
    hidden = model.hidden(batch.inputs, positions, PaddedAttention(batch.valid))
    lossy = batch.weights > 0
    logits = model.logits(hidden[lossy])
    losses = F.cross_entropy(logits, batch.targets[lossy], reduction="none")
    return (losses * batch.weights[lossy]).sum()


def rate_at(settings: Settings, update: int, done: float) -> float:
    """Learning rate at an update, ``done`` being the share of the time that has passed."""
    warm = min(1.0, (update + 1) / WARMUP_UPDATES)
    decay = min(1.0, max(FINAL_RATE, (1.0 - done) / (1.0 - DECAY_FROM)))
    return settings.peak_rate * warm * decay


def shares_at(done: float) -> dict[str, float]:
    """Task shares: START_MIX first, then linearly to the evaluation mix."""
    begin, end = MIX_MOVES
    part = min(1.0, max(0.0, (done - begin) / (end - begin)))
    return {task: (1 - part) * START_MIX[task] + part * MIX[task] for task in MIX}


class Stream:
    """Endless micro-batches of one process.

    Every process orders its pool in the same way, so that at each update all of them work on
    rows of about the same length and none waits long for the others.
    """

    def __init__(self, tokenizer: Tokenizer, seed: str, order_seed: str) -> None:
        self.tokenizer = tokenizer
        self.rng = random.Random(seed)
        self.order = random.Random(order_seed)
        self.pool: list[list[Row]] = []

    def take(self, count: int, done: float) -> list[Batch]:
        """``count`` micro-batches; ``done`` sets the task shares of newly drawn problems."""
        while len(self.pool) < count:
            shares = shares_at(done)
            rows = [
                make_row(self.tokenizer, self.rng, shares) for _ in range(POOL_BATCHES * MICRO_ROWS)
            ]
            rows.sort(key=lambda row: row.length)
            groups = [rows[i : i + MICRO_ROWS] for i in range(0, len(rows), MICRO_ROWS)]
            self.order.shuffle(groups)
            self.pool.extend(groups)
        return [make_batch(self.pool.pop(), self.rng) for _ in range(count)]


class Worker:
    """One training process. Process 0 also keeps the clock, the averages and the files."""

    def __init__(self, rank: int, settings: Settings) -> None:
        self.rank, self.settings = rank, settings
        self.model = new_model(settings.seed)
        self.weights = list(self.model.parameters())
        self.average = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        groups: list[dict[str, Any]] = [
            {"params": self.weights[:1], "share": EMBEDDING_RATE},  # the embeddings come first
            {"params": self.weights[1:], "share": 1.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=settings.peak_rate,
            betas=(0.9, 0.98),
            weight_decay=0.01,
            fused=True,
        )
        self.update, self.tokens, self.seconds_before = 0, 0, 0.0
        self.state_file = settings.out / "state.pt"
        if settings.resume:
            self._load()
        self.stream = Stream(
            build_tokenizer(),
            f"{settings.seed}/{rank}/{self.update}",
            f"{settings.seed}/order/{self.update}",
        )
        self.started = time.monotonic()

    def _load(self) -> None:
        state = torch.load(self.state_file, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.average = state["average"]
        self.update, self.tokens = state["update"], state["tokens"]
        self.seconds_before = state["seconds"]

    def seconds(self) -> float:
        """Training time so far, over all resumed runs."""
        return self.seconds_before + time.monotonic() - self.started

    def save(self) -> None:
        """Write the resumable state and the exported averaged model, each atomically."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": self.average,
            "update": self.update,
            "tokens": self.tokens,
            "seconds": self.seconds(),
        }
        partial = self.state_file.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.state_file)
        export_model(self.average, self.stream.tokenizer, self.settings.out / "model")

    def step(self, done: float) -> tuple[float, float]:
        """One update; returns the mean loss and process 0's view of the elapsed share."""
        count = self.settings.rows_per_update // MICRO_ROWS // self.settings.processes
        loss_sum, tokens = 0.0, 0
        self.optimizer.zero_grad(set_to_none=True)
        for batch in self.stream.take(count, done):
            loss = batch_loss(self.model, batch) / count
            loss.backward()
            loss_sum += loss.item()
            tokens += int(batch.valid.sum())
        clock = self.seconds() / (60 * self.settings.minutes) if self.rank == 0 else 0.0
        extra = torch.tensor([loss_sum, float(tokens), clock])
        flat = torch.cat([w.grad.flatten() for w in self.weights if w.grad is not None] + [extra])
        dist.all_reduce(flat)
        loss_mean, token_sum, done = flat[-3:].tolist()
        flat /= self.settings.processes
        parts = flat[:-3].split([weight.numel() for weight in self.weights])
        for weight, part in zip(self.weights, parts, strict=True):
            weight.grad = part.view_as(weight)
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        for group in self.optimizer.param_groups:
            rate = rate_at(self.settings, self.update, done)
            group["lr"] = rate * group["share"]
        self.optimizer.step()
        self.update += 1
        self.tokens += int(token_sum)
        return loss_mean / self.settings.processes, done

    def follow(self) -> None:
        """Move the averaged weights towards the current ones."""
        keep = min(EMA_DECAY, self.update / (self.update + 20))
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                self.average[name].lerp_(weight, 1 - keep)

    def run(self) -> None:
        """Train until the time is over."""
        saved = time.monotonic()
        done = self.seconds() / (60 * self.settings.minutes)
        recent: list[float] = []
        if self.rank == 0:
            self.save()
        while done < 1.0:
            loss, done = self.step(done)
            if self.rank != 0:
                continue
            self.follow()
            recent.append(loss)
            if self.update % 100 == 0:
                self.log(recent, done)
                recent = []
            if time.monotonic() - saved > self.settings.save_every:
                saved = time.monotonic()
                self.save()
        if self.rank == 0:
            self.save()

    def log(self, losses: list[float], done: float) -> None:
        """Append one line to the log of the run and print it."""
        line = json.dumps(
            {
                "update": self.update,
                "minutes": round(self.seconds() / 60, 2),
                "loss": round(sum(losses) / len(losses), 4),
                "tokens": self.tokens,
                "rate": round(rate_at(self.settings, self.update, done), 6),
            }
        )
        print(line, flush=True)
        with (self.settings.out / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(line + "\n")


def _process(rank: int, settings: Settings, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=settings.processes,
    )
    try:
        Worker(rank, settings).run()
    finally:
        dist.destroy_process_group()


def train(settings: Settings) -> Path:
    """Train and export; returns the folder of the finished model."""
    micro_batches, rest = divmod(settings.rows_per_update, MICRO_ROWS)
    if rest or micro_batches % settings.processes:
        raise ValueError(
            f"rows_per_update: {settings.rows_per_update} is not a multiple of "
            f"{MICRO_ROWS} x processes ({settings.processes})"
        )
    settings.out.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with _environment(MALLOC):  # the allocator reads it when a process starts
        spawn(_process, (settings, port), nprocs=settings.processes)
    return settings.out / "model"


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables for child processes, and put the old ones back."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def main(arguments: list[str] | None = None) -> None:
    """Command line of the recipe."""
    parser = argparse.ArgumentParser(description="Train the bundled model.")
    parser.add_argument("--minutes", type=float, default=95.0, help="wall time of the schedule")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true", help="continue from OUT/state.pt")
    given = parser.parse_args(arguments)
    print(train(Settings(**vars(given))))


if __name__ == "__main__":
    main()

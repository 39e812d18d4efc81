"""Emitted tokens per second: the executor against a plain sampler, in one run.

The plain sampler is the algorithm of the public LLaDA reference, written for our model: one
request at a time, a forward pass over the whole sequence at every step, no cache, the most
confident masked position of the block at each step. The reference fills its whole canvas;
the variant "to EOS" is kinder to it and stops after the block that holds the end.

Tokens are counted up to and including the end token, for everybody. All variants run on the
same weights, problems and threads, in turns, and the best of ``--repeats`` counts. Seconds are
wall time; ``--cpu-time`` counts CPU seconds instead: with one thread the same on a machine of
one's own, and the fairer figure on a shared one. ``--help`` lists the settings.
"""

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

import stepserve.engine.bundled as bundled
from stepserve.core.ids import RequestId
from stepserve.core.payload import Payload
from stepserve.core.request import CacheMode, DiffusionOptions, Family, RefreshScope, Request
from stepserve.engine.attention import attend
from stepserve.engine.bundled.tasks import sample
from stepserve.engine.bundled.vocabulary import prompt_ids
from stepserve.engine.diffusion_executor import DiffusionExecutor
from stepserve.engine.diffusion_offline import Result, denoise
from stepserve.engine.loader import LoadedModel, load_model

Prompts = list[tuple[int, ...]]
Counts = tuple[int, int]
"""Tokens, and forward passes."""


def whole_sequence(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of the plain sampler: all of ``[1, length, heads, head_dim]``."""
    return attend(q, k, v)


@torch.inference_mode()
def plain_sampler(
    loaded: LoadedModel, prompt: tuple[int, ...], canvas: int, block: int, to_eos: bool
) -> tuple[int, int]:
    """Emitted tokens and forward passes of one request, one token per step."""
    config = loaded.config
    ids = torch.tensor([[*prompt, *[config.mask_token_id] * canvas]])
    positions = torch.arange(ids.shape[1])[None]
    forwards = 0
    for start in range(len(prompt), ids.shape[1], block):
        for _ in range(block):
            hidden = loaded.model.hidden(ids, positions, whole_sequence)
            logits = loaded.model.logits(hidden)
            logits[..., list(loaded.suppressed_token_ids)] = float("-inf")
            confidence, tokens = logits.softmax(-1).max(-1)
            confidence[ids != config.mask_token_id] = -1.0
            best = start + int(confidence[0, start : start + block].argmax())
            ids[0, best] = tokens[0, best]
            forwards += 1
        if to_eos and bool((ids[0, start : start + block] == config.eos_token_id).any()):
            break
    output = ids[0, len(prompt) :].tolist()
    ends = [k for k, token in enumerate(output) if token == config.eos_token_id]
    return (ends[0] + 1 if ends else len(output)), forwards


def run_plain(
    loaded: LoadedModel, prompts: Prompts, given: argparse.Namespace, to_eos: bool
) -> Counts:
    """Tokens and forward passes of all prompts, one after the other."""
    done = [plain_sampler(loaded, p, given.max_tokens, given.block, to_eos) for p in prompts]
    return sum(tokens for tokens, _ in done), sum(forwards for _, forwards in done)


def run_executor(
    executor: DiffusionExecutor,
    prompts: Prompts,
    given: argparse.Namespace,
    options: DiffusionOptions,
    concurrent: int,
) -> Counts:
    """Tokens and forward passes of all prompts, ``concurrent`` of them at a time."""
    results: list[Result] = []
    batches = 0
    for first in range(0, len(prompts), concurrent):
        rows = []
        for i, ids in enumerate(prompts[first : first + concurrent]):
            request = Request(
                RequestId(f"{first + i}"),
                Family.DIFFUSION,
                "bundled",
                len(ids),
                given.max_tokens,
                0.0,
                diffusion=options,
            )
            rows.append((request, Payload(ids)))
        done = list(denoise(executor, rows, given.threshold).values())
        batches += max(result.steps for result in done)
        results += done
    return sum(len(result.tokens) for result in results), batches


def best_seconds(
    variants: dict[str, Callable[[], Counts]], repeats: int, clock: Callable[[], float]
) -> dict[str, tuple[int, int, float]]:
    """Tokens, forward passes and best seconds of each variant; the variants take turns."""
    best: dict[str, tuple[int, int, float]] = {}
    for _ in range(repeats):
        for name, variant in variants.items():
            began = clock()
            tokens, forwards = variant()
            seconds = clock() - began
            if name not in best or seconds < best[name][2]:
                best[name] = tokens, forwards, seconds
    return best


def main() -> None:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path(bundled.__file__).parent / "model")
    parser.add_argument("--problems", type=int, default=8)
    parser.add_argument("--concurrent", type=int, default=8)
    parser.add_argument("--threshold", type=float, default=0.9)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu-time", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    loaded = load_model(given.model)
    tokenizer = Tokenizer.from_file(str(given.model / "tokenizer.json"))
    rng = random.Random(given.seed)
    problems = [sample(rng, evaluation=True) for _ in range(given.problems)]
    prompts = [tuple(prompt_ids(tokenizer, problem.prompt)) for problem in problems]
    executor = DiffusionExecutor(loaded)

    def engine(cache: CacheMode, concurrent: int, **refresh: Any) -> Callable[[], Counts]:
        options = DiffusionOptions(block_tokens=given.block, cache_mode=cache, **refresh)
        return lambda: run_executor(executor, prompts, given, options, concurrent)

    many = given.concurrent
    best = best_seconds(
        {
            "plain, whole canvas": lambda: run_plain(loaded, prompts, given, to_eos=False),
            "plain, to EOS": lambda: run_plain(loaded, prompts, given, to_eos=True),
            "executor, 1 at a time, no cache": engine(CacheMode.NONE, 1),
            "executor, 1 at a time, dual cache": engine(CacheMode.DUAL, 1),
            f"executor, {many} at a time, no cache": engine(CacheMode.NONE, many),
            f"executor, {many} at a time, prefix cache": engine(CacheMode.PREFIX, many),
            f"executor, {many} at a time, dual cache": engine(CacheMode.DUAL, many),
            f"executor, {many} at a time, dual cache, output scope": engine(
                CacheMode.DUAL, many, refresh_scope=RefreshScope.OUTPUT
            ),
            f"executor, {many} at a time, dual cache, every 2nd block": engine(
                CacheMode.DUAL, many, refresh_blocks=2
            ),
        },
        given.repeats,
        time.process_time if given.cpu_time else time.perf_counter,
    )
    rates = {name: tokens / seconds for name, (tokens, _, seconds) in best.items()}
    print(
        f"{given.problems} problems, threshold {given.threshold}, block {given.block}, canvas "
        f"{given.max_tokens}, {given.threads} thread(s), best of {given.repeats}"
        f"{', CPU seconds' * given.cpu_time}\n"
    )
    print("| variant | tokens | forwards | tokens/s | against plain | against plain to EOS |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, (tokens, forwards, _) in best.items():
        ratios = [rates[name] / rates[base] for base in ("plain, whole canvas", "plain, to EOS")]
        print(
            f"| {name} | {tokens} | {forwards} | {rates[name]:.1f} "
            f"| {ratios[0]:.1f}x | {ratios[1]:.1f}x |"
        )


if __name__ == "__main__":
    main()

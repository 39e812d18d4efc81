"""The price in quality of every knob of denoising, paired on held-out problems.

``python -m stepserve.engine.bundled.knobs --problems 600 --seed 2`` prints two tables: what may be
refreshed and how often, and which threshold rules in which part of a request. Every setting
decodes the same problems; its price is the mean difference in right answers per problem to the
first row of its group, with the standard error of that paired difference.

Source: DiLaServe E2, DiLaServe E3 and DiLaServe D4; the settings are this project's.
"""

import argparse
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer

from stepserve.core.request import CacheMode, DiffusionOptions, RefreshScope, Request
from stepserve.engine.bundled.evaluate import (
    BUNDLED_MODEL,
    Outcome,
    decode,
    held_out_problems,
    kind,
)
from stepserve.engine.bundled.vocabulary import prompt_ids, response_ids
from stepserve.engine.diffusion_executor import DiffusionExecutor
from stepserve.engine.diffusion_offline import ThresholdRule
from stepserve.engine.loader import load_model

REFRESHES = (
    (RefreshScope.FULL, 1),
    (RefreshScope.OUTPUT, 1),
    (RefreshScope.FULL, 2),
    (RefreshScope.OUTPUT, 2),
    (RefreshScope.FULL, 3),
    (RefreshScope.OUTPUT, 3),
)
FIXED = (0.9, 0.8, 0.7, 0.6, 0.5)
SCHEDULES = (
    (0.5, 0.9, 0.9),
    (0.9, 0.5, 0.9),
    (0.9, 0.9, 0.5),
    (0.7, 0.9, 0.9),
    (0.9, 0.7, 0.9),
    (0.9, 0.9, 0.7),
    (0.7, 0.8, 0.9),
    (0.9, 0.8, 0.7),
)
"""Threshold of the first, second and last third of the response."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A row of a table."""

    label: str
    threshold: float | ThresholdRule
    scope: RefreshScope = RefreshScope.FULL
    refresh_blocks: int = 1


def by_thirds(
    thresholds: tuple[float, float, float],
    length: Callable[[Request], int],
    request: Request,
    settled: int,
) -> float:
    """Threshold of the third that a request is in by settled tokens; beyond the end, the last."""
    return thresholds[min(2, 3 * settled // length(request))]


def expected_tokens(request: Request) -> int:
    """Length of the problem's own response: what a perfect length predictor would say."""
    assert request.diffusion.expected_output_tokens is not None
    return request.diffusion.expected_output_tokens


def limit_tokens(request: Request) -> int:
    """The output limit, which is all that is known without a prediction."""
    return request.max_output_tokens


def refresh_settings(threshold: float) -> list[Setting]:
    """Every scope and interval at one threshold; the first is what the published systems do."""
    return [
        Setting(f"{threshold}, {scope} every {_nth(blocks)}block", threshold, scope, blocks)
        for scope, blocks in REFRESHES
    ]


def _nth(blocks: int) -> str:
    return {1: "", 2: "2nd ", 3: "3rd "}[blocks]


def threshold_settings(scheduled: Sequence[tuple[float, float, float]]) -> list[Setting]:
    """Fixed thresholds, then schedules by thirds of the response; one by thirds of the limit."""
    settings = [Setting(f"fixed {threshold}", threshold) for threshold in FIXED]
    for thirds in scheduled:
        label = " / ".join(map(str, thirds))
        settings.append(Setting(label, partial(by_thirds, thirds, expected_tokens)))
    settings.append(
        Setting("0.7 / 0.9 / 0.9 of the limit", partial(by_thirds, SCHEDULES[3], limit_tokens))
    )
    return settings


def paired(base: Sequence[Outcome], outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """Mean difference in right answers to ``base``, and its standard error; both in points.

    The same problems in the same order, at least two.
    """
    gains = [float(o.correct) - float(b.correct) for b, o in zip(base, outcomes, strict=True)]
    return 100 * statistics.fmean(gains), 100 * statistics.stdev(gains) / len(gains) ** 0.5


def line(label: str, base: Sequence[Outcome], outcomes: Sequence[Outcome]) -> str:
    """One row of a Markdown table; steps and tokens per request."""

    def mean(of: Callable[[Outcome], float]) -> float:
        return statistics.fmean(map(of, outcomes))

    tokens = mean(lambda o: o.executed_tokens)
    share = tokens / statistics.fmean(b.executed_tokens for b in base)
    difference, error = paired(base, outcomes)
    price = "-" if base is outcomes else f"{difference:+.1f} ± {error:.1f}"
    return (
        f"| {label} | {mean(lambda o: o.correct):.3f} | {price} | {mean(lambda o: o.steps):.2f} "
        f"| {mean(lambda o: o.recomputes):.2f} | {tokens:.0f} | {share:.2f} |"
    )


def lost_by_kind(base: Sequence[Outcome], outcomes: Sequence[Outcome]) -> Counter[str]:
    """Answers of each kind of problem that are wrong here and right in ``base``, net of others."""
    net: Counter[str] = Counter()
    for before, after in zip(base, outcomes, strict=True):
        net[kind(after.problem)] += before.correct - after.correct
    return Counter({name: count for name, count in net.items() if count})


def compare(settings: Sequence[Setting], outcomes: Iterable[Sequence[Outcome]]) -> None:
    """Print a table of the settings against the first of them."""
    print("| setting | accuracy | points | steps | recompute | tokens executed | share |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    base: Sequence[Outcome] = ()
    for setting, row in zip(settings, outcomes, strict=True):
        base = base or row
        print(line(setting.label, base, row), flush=True)


def tables(
    settings: Sequence[Setting],
    run: Callable[[Setting], list[Outcome]],
    is_long: Callable[[Outcome], bool],
) -> None:
    """Print all problems' table, the long ones', and which kinds of problem lost how much."""
    done: list[list[Outcome]] = []

    def running() -> Iterator[list[Outcome]]:
        for setting in settings:
            done.append(run(setting))
            yield done[-1]

    compare(settings, running())
    long = [list(filter(is_long, outcomes)) for outcomes in done]
    if len(long[0]) > 1:
        print(f"\nOf these, the {len(long[0])} problems with a long response:\n")
        compare(settings, long)
    print("\nAnswers lost, net, by kind of problem:\n")
    for setting, outcomes in list(zip(settings, done, strict=True))[1:]:
        print(f"- {setting.label}: {dict(lost_by_kind(done[0], outcomes).most_common())}")
    print()


def price(given: argparse.Namespace) -> None:
    """Decode the problems in every setting asked for and print the tables."""
    torch.set_num_threads(given.threads)
    loaded = load_model(given.model)
    executor = DiffusionExecutor(loaded, threads=given.threads)
    tokenizer = Tokenizer.from_file(str(given.model / "tokenizer.json"))
    problems = held_out_problems(given.problems, given.seed)
    block = given.block_length or loaded.default_block_length
    canvas = loaded.default_max_tokens

    def run(setting: Setting) -> list[Outcome]:
        options = DiffusionOptions(
            block_tokens=block,
            cache_mode=CacheMode(given.cache),
            refresh_blocks=setting.refresh_blocks,
            refresh_scope=setting.scope,
        )
        return decode(executor, tokenizer, problems, setting.threshold, options, canvas)

    def is_long(outcome: Outcome) -> bool:
        """Three blocks or more, so that a refresh of every 2nd block is skipped and one is run."""
        return len(response_ids(tokenizer, outcome.problem.response)) > 2 * block

    prompts = [len(prompt_ids(tokenizer, problem.prompt)) for problem in problems]
    responses = [len(response_ids(tokenizer, problem.response)) for problem in problems]
    print(
        f"{given.problems} problems, seed {given.seed}, {given.cache} cache, block {block}; prompt "
        f"{statistics.fmean(prompts):.1f} tokens (at most {max(prompts)}), canvas {canvas}, "
        f"response {statistics.fmean(responses):.1f} (at most {max(responses)})\n"
    )
    if given.knob != "thresholds":
        for threshold in given.thresholds:
            tables(refresh_settings(threshold), run, is_long)
    if given.knob != "refresh":
        tables(threshold_settings(SCHEDULES), run, is_long)


def main(arguments: list[str] | None = None) -> None:
    """Command line of the evaluation."""
    parser = argparse.ArgumentParser(description="Price every knob on the bundled model.")
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL)
    parser.add_argument("--knob", choices=["refresh", "thresholds", "all"], default="all")
    parser.add_argument("--problems", type=int, default=600)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--block-length", type=int)
    parser.add_argument("--cache", choices=["prefix", "dual"], default="dual")
    parser.add_argument(
        "--thresholds", nargs="+", type=float, default=[0.9, 0.7], help="of the refresh knobs"
    )
    parser.add_argument("--threads", type=int, default=1)
    price(parser.parse_args(arguments))


if __name__ == "__main__":
    main()

"""Accuracy and steps of the bundled model over thresholds, on held-out problems.

``python -m stepserve.engine.bundled.evaluate --problems 400 --seed 2`` prints a table and, with
``--json FILE``, writes it together with the figures of every task. Decoding is done by the
serving engine itself, in any cache mode, so these are the figures that a server reaches.
"""

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from stepserve.core.ids import RequestId
from stepserve.core.payload import Payload
from stepserve.core.request import CacheMode, DiffusionOptions, Family, Request
from stepserve.engine.bundled.tasks import Problem, correct, sample
from stepserve.engine.bundled.vocabulary import EOS, prompt_ids, response_ids
from stepserve.engine.diffusion_executor import DiffusionExecutor
from stepserve.engine.diffusion_offline import ThresholdRule, denoise
from stepserve.engine.loader import load_model

BUNDLED_MODEL = Path(__file__).parent / "model"
THRESHOLDS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
"""No confidence exceeds 1.0, which therefore means one token per step."""
BATCH_ROWS = 32


@dataclass(frozen=True, slots=True)
class Outcome:
    """One decoded problem: ``steps`` forward passes wrote ``tokens`` tokens (with the EOS).

    ``recomputes`` of the steps were recompute steps; all steps together executed
    ``executed_tokens``.
    """

    problem: Problem
    text: str
    correct: bool
    steps: int
    tokens: int
    recomputes: int
    executed_tokens: int


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a set of outcomes; steps are forward passes per request."""

    problems: int
    accuracy: float
    steps_mean: float
    steps_p10: int
    steps_p50: int
    steps_p90: int
    tokens_per_step: float


def held_out_problems(count: int, seed: int) -> list[Problem]:
    """The first ``count`` evaluation problems of a seed."""
    rng = random.Random(f"evaluation/{seed}")
    return [sample(rng, evaluation=True) for _ in range(count)]


def decode(
    executor: DiffusionExecutor,
    tokenizer: Tokenizer,
    problems: Sequence[Problem],
    threshold: float | ThresholdRule,
    options: DiffusionOptions,
    max_tokens: int,
) -> list[Outcome]:
    """Decode the problems in batches and check every answer.

    A threshold rule finds the length of the problem's own response, EOS included, in
    ``expected_output_tokens``.
    """
    outcomes: list[Outcome] = []
    for begin in range(0, len(problems), BATCH_ROWS):
        group = problems[begin : begin + BATCH_ROWS]
        requests = []
        for index, problem in enumerate(group):
            ids = tuple(prompt_ids(tokenizer, problem.prompt))
            expected = len(response_ids(tokenizer, problem.response))
            request = Request(
                id=RequestId(str(index)),
                family=Family.DIFFUSION,
                model="bundled",
                prompt_tokens=len(ids),
                max_output_tokens=max_tokens,
                arrival_s=0.0,
                diffusion=replace(options, expected_output_tokens=expected),
            )
            requests.append((request, Payload(ids)))
        for problem, result in zip(
            group, denoise(executor, requests, threshold).values(), strict=True
        ):
            written = result.token_ids
            text = tokenizer.decode([token for token in written if token != EOS]).strip()
            outcomes.append(
                Outcome(
                    problem,
                    text,
                    correct(problem, text),
                    result.steps,
                    len(written),
                    result.recomputes,
                    result.executed_tokens,
                )
            )
    return outcomes


def summarize(outcomes: Sequence[Outcome]) -> Summary:
    """Accuracy, the spread of steps (nearest rank) and tokens written per step."""
    steps = sorted(outcome.steps for outcome in outcomes)
    count = len(steps)
    p10, p50, p90 = (steps[min(count - 1, int(count * part))] for part in (0.1, 0.5, 0.9))
    return Summary(
        problems=count,
        accuracy=sum(outcome.correct for outcome in outcomes) / count,
        steps_mean=sum(steps) / count,
        steps_p10=p10,
        steps_p50=p50,
        steps_p90=p90,
        tokens_per_step=sum(outcome.tokens for outcome in outcomes) / sum(steps),
    )


def breakdown(outcomes: Sequence[Outcome], key: Callable[[Problem], str]) -> dict[str, Summary]:
    """Summaries per group of problems that share a key."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(key(outcome.problem), []).append(outcome)
    return {name: summarize(group) for name, group in sorted(groups.items())}


def kind(problem: Problem) -> str:
    """Task and kind of a problem."""
    return f"{problem.task}/{problem.kind}"


def kind_and_size(problem: Problem) -> str:
    """Task, kind and size of a problem."""
    return f"{kind(problem)}/{problem.size}"


def line(label: str, summary: Summary) -> str:
    """One row of a Markdown table."""
    return (
        f"| {label} | {summary.problems} | {summary.accuracy:.3f} | {summary.steps_mean:.1f} "
        f"| {summary.steps_p10} / {summary.steps_p50} / {summary.steps_p90} "
        f"| {summary.tokens_per_step:.2f} |"
    )


def show_failures(outcomes: Sequence[Outcome], count: int) -> None:
    """Print the first wrong answers next to a valid one."""
    for outcome in [o for o in outcomes if not o.correct][:count]:
        print(f"  prompt {outcome.problem.prompt}\n  got    {outcome.text}")
        print(f"  valid  {outcome.problem.response}")


def run(
    given: argparse.Namespace, executor: DiffusionExecutor, options: DiffusionOptions
) -> dict[str, object]:
    """All thresholds in one cache mode, printing as it goes; returns the figures."""
    tokenizer = Tokenizer.from_file(str(given.model / "tokenizer.json"))
    problems = held_out_problems(given.problems, given.seed)
    report: dict[str, object] = {}
    print(f"cache {options.cache_mode}, refresh every {options.refresh_blocks} block(s)")
    print("| threshold | problems | accuracy | steps | p10 / p50 / p90 | tokens per step |")
    print("| --- | --- | --- | --- | --- | --- |")
    for threshold in given.thresholds:
        outcomes = decode(executor, tokenizer, problems, threshold, options, given.max_tokens)
        print(line(f"**{threshold}**", summarize(outcomes)), flush=True)
        kinds = breakdown(outcomes, kind)
        if given.kinds:
            print("\n".join(line(f"{threshold} {name}", part) for name, part in kinds.items()))
        show_failures(outcomes, given.failures)
        report[str(threshold)] = {
            "all": asdict(summarize(outcomes)),
            "kinds": {name: asdict(part) for name, part in kinds.items()},
            "sizes": {n: asdict(p) for n, p in breakdown(outcomes, kind_and_size).items()},
        }
    return {
        "cache": options.cache_mode.value,
        "refresh_blocks": options.refresh_blocks,
        "thresholds": report,
    }


def evaluate(given: argparse.Namespace) -> dict[str, object]:
    """Evaluate in every cache mode and refresh interval asked for."""
    torch.set_num_threads(given.threads)
    loaded = load_model(given.model)
    executor = DiffusionExecutor(loaded, threads=given.threads)
    given.max_tokens = given.max_tokens or loaded.default_max_tokens
    block = given.block_length or loaded.default_block_length
    runs = []
    for mode in map(CacheMode, given.cache):
        intervals = given.refresh_blocks if mode is not CacheMode.NONE else [1]
        for blocks in intervals:
            options = DiffusionOptions(block_tokens=block, cache_mode=mode, refresh_blocks=blocks)
            runs.append(run(given, executor, options))
    return {
        "problems": given.problems,
        "seed": given.seed,
        "block_length": block,
        "max_tokens": given.max_tokens,
        "runs": runs,
    }


def main(arguments: list[str] | None = None) -> None:
    """Command line of the evaluation."""
    parser = argparse.ArgumentParser(description="Evaluate the bundled model.")
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL)
    parser.add_argument("--problems", type=int, default=400)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--block-length", type=int)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument(
        "--cache", nargs="+", choices=[mode.value for mode in CacheMode], default=["none"]
    )
    parser.add_argument("--refresh-blocks", nargs="+", type=int, default=[1])
    parser.add_argument("--thresholds", nargs="+", type=float, default=THRESHOLDS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kinds", action="store_true", help="print every task, too")
    parser.add_argument("--failures", type=int, default=0, help="wrong answers to print")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    report = evaluate(given)
    if given.json:
        given.json.write_text(json.dumps(report, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

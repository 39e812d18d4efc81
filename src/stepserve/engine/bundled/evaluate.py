"""Accuracy and steps of the bundled model over thresholds, on held-out problems.

``python -m stepserve.engine.bundled.evaluate --problems 400 --seed 2`` prints the table and,
with ``--json FILE``, writes it together with the figures of every task.
"""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from stepserve.engine.bundled.export import DEFAULT_MAX_TOKENS, load_exported
from stepserve.engine.bundled.sampler import Decoding, Outcome, decode
from stepserve.engine.bundled.tasks import Problem, sample

BUNDLED_MODEL = Path(__file__).parent / "model"
THRESHOLDS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, None)
"""None is one token per step."""


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


def held_out_problems(count: int, seed: int) -> list[Problem]:
    """The first ``count`` evaluation problems of a seed."""
    rng = random.Random(f"evaluation/{seed}")
    return [sample(rng, evaluation=True) for _ in range(count)]


def breakdown(outcomes: Sequence[Outcome], by_size: bool) -> dict[str, Summary]:
    """Summaries per task and kind, or per task, kind and size."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        key = f"{outcome.task}/{outcome.kind}" + (f"/{outcome.size}" if by_size else "")
        groups.setdefault(key, []).append(outcome)
    return {key: summarize(group) for key, group in sorted(groups.items())}


def line(label: str, summary: Summary) -> str:
    """One row of a Markdown table."""
    return (
        f"| {label} | {summary.problems} | {summary.accuracy:.3f} | {summary.steps_mean:.1f} "
        f"| {summary.steps_p10} / {summary.steps_p50} / {summary.steps_p90} "
        f"| {summary.tokens_per_step:.2f} |"
    )


def main(arguments: list[str] | None = None) -> None:
    """Command line of the evaluation."""
    parser = argparse.ArgumentParser(description="Evaluate the bundled model.")
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL)
    parser.add_argument("--problems", type=int, default=400)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--block-length", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=DEFAULT_MAX_TOKENS)
    parser.add_argument("--thresholds", nargs="*", help="numbers, or 'one' for one token a step")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--failures", type=int, default=0, help="wrong answers to print")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    model = load_exported(given.model)
    tokenizer = Tokenizer.from_file(str(given.model / "tokenizer.json"))
    problems = held_out_problems(given.problems, given.seed)
    thresholds: Sequence[float | None] = THRESHOLDS
    if given.thresholds:
        thresholds = [None if t == "one" else float(t) for t in given.thresholds]
    report: dict[str, object] = {}
    print("| threshold | problems | accuracy | steps | p10 / p50 / p90 | tokens per step |")
    print("| --- | --- | --- | --- | --- | --- |")
    for threshold in thresholds:
        decoding = Decoding(threshold, given.block_length, given.max_tokens)
        outcomes = decode(model, tokenizer, problems, decoding)
        label = "one token" if threshold is None else str(threshold)
        print(line(f"**{label}**", summarize(outcomes)), flush=True)
        for key, summary in breakdown(outcomes, by_size=False).items():
            print(line(f"{label} {key}", summary), flush=True)
        report[label] = {
            "all": asdict(summarize(outcomes)),
            "kinds": {k: asdict(s) for k, s in breakdown(outcomes, by_size=False).items()},
            "sizes": {k: asdict(s) for k, s in breakdown(outcomes, by_size=True).items()},
        }
        show_failures(problems, outcomes, given.failures)
    if given.json:
        settings = {k: v for k, v in vars(given).items() if k not in ("json", "model", "failures")}
        content = {"settings": settings, "cache": "none", "thresholds": report}
        given.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def show_failures(problems: Sequence[Problem], outcomes: Sequence[Outcome], count: int) -> None:
    """Print the first wrong answers next to a valid one."""
    wrong = [(p, o) for p, o in zip(problems, outcomes, strict=True) if not o.correct]
    for problem, outcome in wrong[:count]:
        print(f"  {problem.prompt}\n    got    {outcome.text}\n    valid  {problem.response}")


if __name__ == "__main__":
    main()

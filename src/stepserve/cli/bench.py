"""``stepserve bench``: load a server open-loop; report what it delivered, in time and right."""

import argparse
import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from stepserve.cli.bench_plan import DEFAULT_RATE, DEFAULT_REQUESTS, PRESETS, BenchConfig, make_plan
from stepserve.cli.client import Client, Outcome, Reply
from stepserve.cli.measure import Result, Stage, measure
from stepserve.cli.options import check_output, write_json
from stepserve.cli.report import LAG_WARNING_S, tables, three_digits

_DESCRIPTION = """\
Send requests to any OpenAI-compatible server at the times an arrival process gives, whatever
became of earlier ones, and report deadlines met, latency, goodput and measured accuracy."""

_EXAMPLES = """\
examples:
  stepserve bench --rate 4 --requests 200 --slo-multiple 2 --compare fixed,deadline_fit
      what deadline-aware thresholds gain, and what they cost in accuracy, on one server

  stepserve bench --rate 4 --arrivals gamma:3 --deadline-ms 1500 --on-miss reject --json out.json
      bursty arrivals, one deadline for all, refusal of what would be late

  stepserve bench --url http://host:8000 --slo-mode none --deadline-ms 5000 \\
      --dataset random --arrivals trace:windows/steady_chat_20m.csv.gz --rate 2 --requests 300
      a server that knows nothing of deadlines, at the lengths and times of a trace

Latencies count from the time a request was due, so a client that cannot keep up never makes a
server look fast; its lag is reported. Exit status: 0, or 1 if the server cannot be reached or
a run completed nothing. OPENAI_API_KEY, if set, is sent as the bearer token."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the ``bench`` parser."""
    parser = subparsers.add_parser(
        "bench",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _server_options(parser.add_argument_group("server"))
    _arrival_options(parser.add_argument_group("arrivals"))
    _content_options(parser.add_argument_group("content"))
    _deadline_options(parser)
    _policy_options(parser.add_argument_group("quality and policies"))
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    output.add_argument("--detailed", action="store_true", help="with a record of every request")


def _server_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--url", default="http://127.0.0.1:8000", help="default: %(default)s")
    group.add_argument("--model", help="default: the first that the server lists")
    group.add_argument("--endpoint", choices=("chat", "completions"), default="chat")
    group.add_argument(
        "--timeout-s", type=float, default=600.0, metavar="S", help="give a request up after this"
    )


def _arrival_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--rate",
        type=float,
        metavar="R",
        help=f"mean requests per second; default: {DEFAULT_RATE:g}, or the trace's",
    )
    group.add_argument(
        "--arrivals",
        default="poisson",
        metavar="PROCESS",
        help="poisson, constant, gamma:CV (CV above 1 is bursty), or trace:FILE, a CSV or CSV.gz "
        "by its path or its path below STEPSERVE_DATA; default: %(default)s",
    )
    group.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help=f"stop after N; default: {DEFAULT_REQUESTS} without --duration-s, or the whole trace",
    )
    group.add_argument("--duration-s", type=float, metavar="S", help="stop sending after S seconds")
    group.add_argument(
        "--burst", type=_burst, metavar="START:SECONDS:FACTOR", help="multiply the rate for a while"
    )
    group.add_argument(
        "--rescale",
        choices=("resample", "stretch"),
        default="resample",
        help="bring a trace to --rate by thinning or replicating requests, or by compressing time",
    )
    group.add_argument(
        "--jitter-s",
        type=float,
        default=0.0,
        metavar="S",
        help="delay each request of a trace by up to S, where its times are rounded",
    )
    group.add_argument(
        "--max-total-tokens",
        type=int,
        metavar="N",
        help="drop requests of a trace longer than the model's context",
    )
    group.add_argument("--seed", type=int, default=0, help="of arrivals and content; default: 0")
    group.add_argument(
        "--warmup", type=int, default=2, metavar="N", help="uncounted requests first; default: 2"
    )


def _content_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dataset",
        choices=("bundled", "random"),
        default="bundled",
        help="bundled: held-out problems of the bundled model, scored exactly; "
        "random: readable text of the lengths of the trace or of the two options below",
    )
    group.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="for random; about a word each"
    )
    group.add_argument(
        "--long-prompts",
        type=_long_prompts,
        metavar="SHARE:TOKENS",
        help="for random: this share of the requests has prompts of so many tokens",
    )
    group.add_argument("--max-tokens", type=int, metavar="N", help="output limit of every request")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0")
    group.add_argument("--ignore-eos", action="store_true", help="always run to the output limit")
    group.add_argument(
        "--body", type=_json_object, metavar="JSON", help="fields to lay over every request"
    )


def _deadline_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("deadlines (arrival to last byte)")
    choice = group.add_mutually_exclusive_group()
    choice.add_argument("--deadline-ms", type=float, metavar="MS", help="the same for all")
    choice.add_argument(
        "--slo-multiple",
        type=float,
        metavar="X",
        help="X times the mean latency of single requests, measured first, the same for all",
    )
    choice.add_argument(
        "--slo-per-token-ms",
        type=float,
        metavar="MS",
        help="of each request by the expected length of its answer",
    )
    group.add_argument(
        "--tbt-ms",
        type=float,
        metavar="MS",
        help="target between two text events, judged on the 99th percentile of each answer",
    )
    group.add_argument(
        "--base-requests",
        type=int,
        default=8,
        metavar="K",
        help="single requests that --slo-multiple measures; default: 8",
    )
    group.add_argument(
        "--slo-mode",
        choices=("body", "none"),
        default="body",
        help="tell the server the deadline in its body field slo, or judge by it only",
    )
    group.add_argument(
        "--on-miss",
        choices=("degrade", "best_effort", "reject"),
        help="what the server shall do when a deadline cannot be met at the preferred quality",
    )


def _policy_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--threshold", type=float, metavar="T", help="preferred confidence threshold"
    )
    group.add_argument(
        "--min-threshold", type=float, metavar="T", help="floor it may be lowered to"
    )
    group.add_argument(
        "--compare",
        type=lambda text: tuple(text.split(",")),
        default=(),
        metavar="A,B",
        help=f"one run for each policy, on the same arrivals and problems: {', '.join(PRESETS)} "
        "(threshold 0.9 pinned, and 0.9 down to 0.5, unless the two options above say otherwise)",
    )
    group.add_argument(
        "--variant",
        type=_variant,
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="one run with these fields laid over its requests; may be repeated",
    )


def _burst(text: str) -> tuple[float, float, float]:
    try:
        start_s, duration_s, factor = (float(part) for part in text.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError("must be three numbers, START:SECONDS:FACTOR") from None
    return start_s, duration_s, factor


def _long_prompts(text: str) -> tuple[float, int]:
    try:
        share, tokens = text.split(":")
        found = float(share), int(tokens)
    except ValueError:
        raise argparse.ArgumentTypeError("must be SHARE:TOKENS, as 0.2:1500") from None
    if not 0.0 <= found[0] <= 1.0 or found[1] < 1:
        raise argparse.ArgumentTypeError("must be a share in [0, 1] and at least 1 token")
    return found


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def _variant(text: str) -> tuple[str, dict[str, Any]]:
    name, equals, body = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError("must be NAME=JSON")
    return name, _json_object(body)


def run(args: argparse.Namespace) -> int:
    """Measure, print and write. Raises StepserveError for what the user can put right."""
    config = BenchConfig(**{f.name: getattr(args, f.name) for f in fields(BenchConfig)})
    check_output("--json", args.json)
    result = asyncio.run(_measure(config))
    try:
        print_report(result, Console(highlight=False, soft_wrap=True))
    finally:  # a run is long: whatever fails, its result is kept
        write_json("--json", args.json, result.as_json(args.detailed))
    return 0 if all(run.summary.completed for run in result.runs.values()) else 1


async def _measure(config: BenchConfig) -> Result:
    plan = make_plan(config)
    async with Client(config.url, config.endpoint, config.timeout_s) as client:
        with _progress() as stage:
            return await measure(config, plan, client, stage)


@contextmanager
def _progress() -> Iterator[Stage]:
    """A bar for each stage on a terminal; silence elsewhere."""
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bars:

        @contextmanager
        def stage(name: str, total: int) -> Iterator[Callable[[Reply], None]]:
            bar = bars.add_task(name, total=total)
            yield lambda reply: bars.advance(bar)

        yield stage


def print_report(result: Result, out: Console) -> None:
    """The tables, and in sentences what it does not show."""
    config, sent = result.config, len(result.plan.arrivals)
    rate = "at the trace's times" if config.rate is None else f"{config.rate:g} a second"
    out.print(f"{result.model} at {config.url}: {sent} requests, {rate}", markup=False)
    runs = result.runs.items()
    for table in tables({n: run.summary for n, run in runs}, {n: run.server for n, run in runs}):
        out.print(table)
    if deadline := _deadline_line(result):
        out.print(deadline)
    if result.plan.dropped:
        out.print(f"{result.plan.dropped} arrivals longer than --max-total-tokens were not sent")
    reference = result.runs[result.reference].summary
    for name, difference in result.accuracy_differences().items():
        met, met_before = result.runs[name].summary.slo_attainment, reference.slo_attainment
        gain = "" if met is None or met_before is None else _points("SLO met", met - met_before)
        out.print(
            f"{name} against {result.reference}: {gain}{_points('accuracy', difference.value)}"
            f"standard error {100 * difference.standard_error:.1f}, "
            f"paired over {difference.problems} problems"
        )
    for name, run in result.runs.items():
        if run.summary.client_lag_p99_s > LAG_WARNING_S:
            out.print(f"{name}: the client fell behind its schedule; its machine is too busy")
        errors = [s.record.reply for s in run.scored if not s.completed]
        for outcome in (Outcome.REJECTED, Outcome.FAILED):
            said = next((reply.error for reply in errors if reply.outcome is outcome), None)
            if said:
                out.print(f"{name}: first of the {outcome}: {said}", markup=False)
        if odd := set[str]().union(*(s.record.reply.odd for s in run.scored)):
            names = ", ".join(sorted(odd))
            out.print(
                f"{name}: ignored {names} in the replies of this server: not a number", markup=False
            )
        if not run.summary.completed:
            out.print(f"{name}: no request was completed")


def _points(name: str, difference: float) -> str:
    return f"{name} {100 * difference:+.1f} points, "


def _deadline_line(result: Result) -> str:
    limits_ms = [1e3 * limit for limit in result.deadlines_s if limit is not None]
    if not limits_ms:
        return ""
    low, high = three_digits(min(limits_ms)), three_digits(max(limits_ms))
    line = f"deadline: {low} ms" if low == high else f"deadlines: {low} to {high} ms"
    if (base := result.base) is None or base.e2e_s is None:
        return line
    at = "" if base.threshold_mean is None else f" at threshold {base.threshold_mean:.3g}"
    return (
        f"{line}, {result.config.slo_multiple:g} x the mean of {base.requests} single requests"
        f"{at}, {three_digits(1e3 * base.e2e_s.mean)} ms"
    )

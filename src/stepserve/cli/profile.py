"""``stepserve profile``: measure the step-time table of a model on this machine."""

import argparse
import contextlib
import platform
from pathlib import Path

from stepserve.cli.options import check_numbers, check_output
from stepserve.core.bounds import AT_LEAST_1
from stepserve.core.config import Choice, ServeConfig
from stepserve.core.model import ModelFacts
from stepserve.core.protocols import Executor
from stepserve.core.request import Family
from stepserve.cost import measured_batches as grid
from stepserve.cost.batch_profile import BatchProfile
from stepserve.cost.measured_steps import measure_steps
from stepserve.cost.step_table import StepProfile


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "profile",
        help="measure how long steps of each size take on this machine",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    defaults = ServeConfig()
    parser.add_argument(
        "--model",
        default=defaults.model,
        help="'bundled', a model folder, or organisation/name on the hub",
    )
    parser.add_argument("--engine", default=defaults.engine.use, help="what runs the steps")
    parser.add_argument("--device", default=defaults.device, help="torch device")
    parser.add_argument("--dtype", default=defaults.dtype, help="float32, float16 or bfloat16")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each share")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel degree: so many shares")
    parser.add_argument("--repeats", type=int, default=15, help="timed runs of each size")
    default = "step_profile.json, or step_profile_tp2.json, ..."
    parser.add_argument("--out", type=Path, help=f"result; {default}", default=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write it; ``serve --profile OUT`` uses it.

    Of an autoregressive model, batches of prefills and decodes are measured instead of steps.

    Degree g is measured as it is served: g processes with a share of the model each.
    """
    from stepserve.families.profiles import BATCH_PROFILE, lone_executor, machine
    from stepserve.live.instance_factory import make_engine

    check_numbers(args, dict.fromkeys(("threads", "tp", "repeats"), AT_LEAST_1))
    check_output("--out", vars(args).get("out"))
    config = ServeConfig(
        model=args.model,
        engine=Choice(args.engine),
        device=args.device,
        dtype=args.dtype,
        layout=str(args.tp),
    )
    engine = make_engine(config)
    autoregressive = engine.facts.family is Family.AUTOREGRESSIVE
    measure = _measure_batches if autoregressive else _measure_steps
    default = "step_profile.json" if args.tp == 1 else f"step_profile_tp{args.tp}.json"
    out = vars(args).get("out") or Path(BATCH_PROFILE if autoregressive else default)
    check_output("--out", out)
    runs_on = f"{args.device}, {args.dtype}, {machine(args.tp, args.threads)}"
    with contextlib.closing(lone_executor(config, engine, args.tp, args.threads)) as executor:
        profile = measure(executor, engine.facts, runs_on, args.repeats)
    profile.save(out)
    print(f"written to {out}")
    return 0


def _measure_steps(
    executor: Executor, facts: ModelFacts, runs_on: str, repeats: int
) -> StepProfile:
    seconds = measure_steps(executor, facts, repeats)
    source = f"measured: {facts.name}, {runs_on}, {platform.machine()}, median of {repeats}"
    print(source)
    for tokens, value in seconds.items():
        print(f"{tokens:6d} tokens {value * 1e3:9.3f} ms {value / tokens * 1e6:8.1f} us/token")
    return StepProfile(tuple(seconds), tuple(seconds.values()), source)


def _measure_batches(
    executor: Executor, facts: ModelFacts, runs_on: str, repeats: int
) -> BatchProfile:
    axes = grid.PREFILL_TOKENS, grid.CONTEXT_TOKENS, grid.DECODES
    profile = grid.measure_profile(executor, facts, runs_on, *axes, repeats=repeats)
    print(profile.source)
    for mix, seconds in profile.steps:
        what = f"{mix.prefill_tokens:5d} prefilled, {mix.decodes:3d} decoded"
        print(f"{what}, {mix.decode_context:6d} context tokens {seconds * 1e3:9.3f} ms")
    return profile

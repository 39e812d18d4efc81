"""``stepserve profile``: measure the step-time table of a model on this machine."""

import argparse
import contextlib
import platform
from pathlib import Path
from typing import TYPE_CHECKING

from stepserve.core.config import ServeConfig
from stepserve.core.request import Family
from stepserve.cost.step_table import StepProfile

if TYPE_CHECKING:
    from stepserve.engine.loader import LoadedModel
    from stepserve.live.families import AnyExecutor


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
    import torch

    from stepserve.engine.diffusion_profiling import measure
    from stepserve.live.families import BATCH_PROFILE, load, lone_executor

    out: Path = vars(args).get("out") or Path(
        "step_profile.json" if args.tp == 1 else f"step_profile_tp{args.tp}.json"
    )
    config = ServeConfig(
        model=args.model, device=args.device, dtype=args.dtype, layout=str(args.tp)
    )
    loaded = load(config)
    torch.set_num_threads(args.threads)
    with contextlib.closing(lone_executor(config, loaded, args.tp, args.threads)) as executor:
        if loaded.family is Family.AUTOREGRESSIVE:
            out = vars(args).get("out") or Path(BATCH_PROFILE)
            return _batches(loaded, executor, args.threads, args.repeats, out)
        seconds = measure(executor, loaded.default_block_length, args.repeats)
    source = (
        f"measured: {loaded.name}, {args.device}, {args.dtype}, degree {args.tp} of "
        f"{args.threads} threads, "
        f"{platform.machine()}, median of {args.repeats}"
    )
    StepProfile(tuple(seconds), tuple(seconds.values()), source).save(out)
    print(source)
    for tokens, value in seconds.items():
        print(f"{tokens:6d} tokens {value * 1e3:9.3f} ms {value / tokens * 1e6:8.1f} us/token")
    print(f"written to {out}")
    return 0


def _batches(
    loaded: "LoadedModel", executor: "AnyExecutor", threads: int, repeats: int, out: Path
) -> int:
    from stepserve.engine import ar_profiling as grid
    from stepserve.live.families import batch_profile

    axes = grid.PREFILL_TOKENS, grid.CONTEXT_TOKENS, grid.DECODES
    profile = batch_profile(loaded, threads, *axes, repeats=repeats, executor=executor)
    print(profile.source)
    for mix, seconds in profile.steps:
        what = f"{mix.prefill_tokens:5d} prefilled, {mix.decodes:3d} decoded"
        print(f"{what}, {mix.decode_context:6d} context tokens {seconds * 1e3:9.3f} ms")
    profile.save(out)
    print(f"written to {out}")
    return 0

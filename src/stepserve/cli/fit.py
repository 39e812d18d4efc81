"""``stepserve fit bundled-model``: train the bundled model from nothing but this package."""

import argparse
from pathlib import Path


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command's parser, with one subcommand per thing that can be fitted."""
    parser = subparsers.add_parser("fit", help="train the bundled model")
    what = parser.add_subparsers(dest="what", required=True)
    model = what.add_parser(
        "bundled-model",
        help="train the bundled diffusion model on this machine's CPU",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    model.add_argument("--out", type=Path, required=True, help="folder for checkpoints and log")
    model.add_argument("--minutes", type=float, default=95.0, help="wall time of the schedule")
    model.add_argument("--processes", type=int, default=2, help="data-parallel processes")
    model.add_argument("--seed", type=int, default=0, help="seed of weights and problems")
    model.add_argument("--resume", action="store_true", help="continue from OUT/state.pt")


def run(args: argparse.Namespace) -> int:
    """Train, and say where the model is."""
    from stepserve.engine.bundled.train import Settings, train

    settings = Settings(
        out=args.out,
        minutes=args.minutes,
        processes=args.processes,
        seed=args.seed,
        resume=args.resume,
    )
    print(f"model written to {train(settings)}")
    return 0

"""``stepserve fit``: train the bundled model, log its steps, train the step predictor on logs."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from stepserve.cli.options import check_folder, check_numbers, check_output
from stepserve.core.bounds import AT_LEAST_0, AT_LEAST_1, POSITIVE, SHARE

if TYPE_CHECKING:
    from stepserve.cost.boosted_fit import Study

PREDICTOR_FILE = "step_predictor.txt"


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command's parser, with one subcommand per thing that can be fitted."""
    parser = subparsers.add_parser("fit", help="train the bundled model or the step predictor")
    what = parser.add_subparsers(dest="what", required=True)
    show = argparse.ArgumentDefaultsHelpFormatter
    model = what.add_parser(
        "bundled-model",
        help="train the bundled diffusion model on this machine's CPU",
        formatter_class=show,
    )
    model.add_argument("--out", type=Path, required=True, help="folder for checkpoints and log")
    model.add_argument("--minutes", type=float, default=95.0, help="wall time of the schedule")
    model.add_argument("--processes", type=int, default=2, help="data-parallel processes")
    model.add_argument("--seed", type=int, default=0, help="seed of weights and problems")
    model.add_argument("--resume", action="store_true", help="continue from OUT/state.pt")
    model.set_defaults(do=_bundled_model)

    log = what.add_parser(
        "step-log",
        help="run the bundled model at fixed thresholds and log every step",
        formatter_class=show,
    )
    log.add_argument("--out", type=Path, required=True, help="the log, gzipped CSV")
    log.add_argument("--problems", type=int, default=300, help="problems per threshold")
    log.add_argument(
        "--thresholds", type=float, nargs="+", default=[0.9, 0.8, 0.7, 0.6, 0.5], metavar="T"
    )
    log.add_argument(
        "--limits", type=int, nargs="+", default=[48, 96, 96, 192], help="output limits, in turn"
    )
    log.add_argument("--seed", type=int, default=11, help="seed of the problems")
    log.set_defaults(do=_step_log)

    predictor = what.add_parser(
        "predictor", help="train the remaining-step predictor on step logs", formatter_class=show
    )
    predictor.add_argument("--log", type=Path, nargs="+", required=True, help="step logs")
    predictor.add_argument(
        "--out", type=Path, required=True, help=f"file, or folder for {PREDICTOR_FILE}"
    )
    predictor.add_argument("--seed", type=int, default=0, help="seed of the split and the trees")
    predictor.set_defaults(do=_predictor)


def run(args: argparse.Namespace) -> int:
    """Fit what was asked for, and say where it is."""
    args.do(args)
    return 0


def _bundled_model(args: argparse.Namespace) -> None:
    from stepserve.engine.bundled.train import Settings, train

    check_numbers(args, {"minutes": POSITIVE, "processes": AT_LEAST_1, "seed": AT_LEAST_0})
    check_folder("--out", args.out)
    settings = Settings(
        out=args.out,
        minutes=args.minutes,
        processes=args.processes,
        seed=args.seed,
        resume=args.resume,
    )
    print(f"model written to {train(settings)}")


def _step_log(args: argparse.Namespace) -> None:
    from stepserve.cli.step_logging import log_bundled

    check_numbers(args, {"problems": AT_LEAST_1, "seed": AT_LEAST_0})
    for name, rule in (("thresholds", SHARE), ("limits", AT_LEAST_1)):
        for value in getattr(args, name):
            check_numbers(argparse.Namespace(**{name: value}), {name: rule})
    check_output("--out", args.out)
    count = log_bundled(args.out, args.problems, args.thresholds, args.limits, args.seed)
    print(f"steps of {count} requests written to {args.out}")


def _predictor(args: argparse.Namespace) -> None:
    """Train on four fifths of the requests, measure on the others, save."""
    from dataclasses import replace

    from stepserve.cost.boosted_fit import study
    from stepserve.cost.features import split, training_rows
    from stepserve.cost.step_log import read_step_logs

    check_numbers(args, {"seed": AT_LEAST_0})
    path = args.out
    if path.is_dir() or not path.suffix:
        path = path / PREDICTOR_FILE
    check_folder("--out", path.parent)
    rows = training_rows(read_step_logs(args.log))
    left_out = ", ".join(f"{count} {why}" for why, count in rows.left_out.items())
    print(f"{rows.requests} requests, {len(rows.remaining)} steps; left out: {left_out}")
    model, result = study(*split(rows, args.seed), args.seed)
    print(_report(result))
    names = ", ".join(path.name for path in args.log)
    model = replace(
        model,
        wmape=result.by_features["confidence"],
        source=f"{names}: {rows.requests} requests, four fifths of them trained on",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    model.save(path)
    print(f"written to {path} ({path.stat().st_size // 1000} KB)")


def _report(result: "Study") -> str:
    """The errors beside the published ones, as two tables."""
    from stepserve.cost.boosted_fit import PUBLISHED_BY_FEATURES, PUBLISHED_BY_REFRESH

    lines = ["WMAPE in %, on requests not trained on (published: LLaDA-8B)"]
    lines.append(f"{'features':24}{'here':>8}{'published':>11}")
    labels = {"length": "length", "progress": "+ progress", "confidence": "+ confidence"}
    for name, value in result.by_features.items():
        published = PUBLISHED_BY_FEATURES[name]
        lines.append(f"{labels[name]:24}{value * 100:8.1f}{published * 100:11.1f}")
    lines.append(f"{'new tokens per forecast':24}{'here':>8}{'published':>11}")
    for every, value in result.by_refresh.items():
        label = "first only" if every is None else str(every)
        published = PUBLISHED_BY_REFRESH[every]
        lines.append(f"{label:24}{value * 100:8.1f}{published * 100:11.1f}")
    return "\n".join(lines)

"""Draws the figures of experiments, as PNG and SVG beside the results.

    python experiments/plot.py load-sweeps two-hours    # the figures of these folders
    python experiments/plot.py                          # all
    python experiments/plot.py --results out/quick

The ``[figure.NAME]`` tables of experiment files say what figures show (lib/figures.py).
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from lib import figures
from lib.results import ROOT


def main() -> None:
    """Draw what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help="default: all")
    parser.add_argument("--results", type=Path, default=ROOT, help="folder of the results")
    args = parser.parse_args()
    plans = figures.plans()
    if unknown := set(args.folders) - {plan.folder for plan in plans}:
        parser.error(f"no figures in {', '.join(sorted(unknown))}")
    for plan in plans:
        if args.folders and plan.folder not in args.folders:
            continue
        if figure := figures.draw(plan, args.results):
            path = args.results / plan.folder / plan.name
            figures.save(figure, path)
            print(path)


if __name__ == "__main__":
    main()

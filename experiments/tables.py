"""Tables of simulated results, with published numbers beside them.

    python experiments/tables.py                        # committed results
    python experiments/tables.py --results out/quick    # of `make experiments-quick`
    python experiments/tables.py --write                # into docs/simulator-fidelity-tables.md

A dash means: not run.
"""

import argparse
from pathlib import Path

from lib import dynaserve, figures, published
from lib.columns import COLUMNS
from lib.dynaserve import Judge
from lib.markdown import DASH, Lines, ranged, table
from lib.results import ROOT, Rows, experiments, read

DOCUMENT = ROOT.parent / "docs" / "simulator-fidelity-tables.md"
HEAD = """# Tables of simulated results

`python experiments/tables.py --write` makes this page from the committed results.
[simulator-fidelity.md](simulator-fidelity.md) says what they mean and how far to trust them.
Brackets hold the smallest and the largest value over seeds. A dash means: not run.
"""
SETTINGS = ("rate_per_s", "rate_per_gpu_per_s", "slo_multiple")


def document(root: Path) -> Lines:
    """The whole page."""
    folders = dict.fromkeys(name.split("/")[0] for name in experiments())
    modules = {folder: found for folder in folders if (found := figures.module(folder))}
    judges: dict[int, Judge] = {}
    lines = HEAD.splitlines()
    for folder, module in modules.items():
        judges |= getattr(module, "ROWS", {})
        if hasattr(module, "tables"):
            lines += ["", f"## {folder}", "", *module.tables(root)]
    lines += ["", "## Against the published numbers of DiLaServe", "", *published.fidelity(root)]
    lines += ["", "## Against the published numbers of DynaServe", ""]
    lines += ["Cells: published single run / simulated mean [smallest..largest over seeds].", ""]
    lines += dynaserve.published_rows(root, judges)
    return [*lines, "", "## What each experiment came to", *everything(root)]


def everything(root: Path) -> Lines:
    """A table of each experiment's results, over seeds."""
    lines: Lines = []
    for name in experiments():
        results = read(name, root)
        if results is None:
            continue
        quick = ", quick: too short to compare" if results.quick else ""
        lines += ["", f"`{name}`, seeds {', '.join(map(str, results.seeds))}{quick}:"]
        for kind in results.rows.distinct("kind"):
            lines += ["", *results_table(results.rows.where(kind=kind))]
    return lines


def results_table(rows: Rows) -> Lines:
    """Rows of one kind, over seeds: a line per workload, setting and system."""
    searched = rows.all[0]["kind"] == "capacity"
    settings = [] if searched else [s for s in SETTINGS if rows.numbers(s)]
    if len(settings) > 1 and rows.distinct("family") == ["diffusion"]:
        settings.remove("rate_per_s")
    elif "rate_per_gpu_per_s" in settings:
        settings.remove("rate_per_gpu_per_s")
    names = ["workload", *settings, "system"]
    shown = [c for c in COLUMNS if c not in SETTINGS and rows.spread(c)]
    head = [*(COLUMNS[n].heading if n in COLUMNS else n for n in names)]
    head += [*(COLUMNS[c].heading for c in shown)]
    lists = {"mfu": "MFU, %", "splits": "cut below/at/above the prompt's end, %"}
    lists = {c: text for c, text in lists.items() if any(row[c] for row in rows)}
    body = []
    for key in dict.fromkeys(tuple(row[name] for name in names) for row in rows):
        own = rows.where(**dict(zip(names, key, strict=True)))
        tuned = sorted({row["tuned"] for row in own} - {None})
        named = [f"{value:g}" if isinstance(value, float) else value for value in key]
        named[-1] += f" ({', '.join(tuned)})" if tuned else ""
        cells = [ranged(own.spread(c), COLUMNS[c].form, COLUMNS[c].factor) for c in shown]
        body.append([*named, *cells, *(_means(own, column) for column in lists)])
    return table([*head, *lists.values()], body)


def _means(rows: Rows, column: str) -> str:
    """Of columns with several values: instances, or where requests were cut."""
    found = [row[column] for row in rows if row[column]]
    if column == "splits":
        found = [[cuts["below"], cuts["at"], cuts["above"]] for cuts in found]
    means = [100.0 * sum(values) / len(found) for values in zip(*found, strict=True)]
    return "/".join(f"{mean:.0f}" for mean in means) or DASH


def main() -> None:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT, help="folder of other results")
    parser.add_argument("--write", action="store_true", help=f"into {DOCUMENT.name}")
    args = parser.parse_args()
    if args.write and args.results != ROOT:
        parser.error("--write takes committed results only")
    text = "\n".join(document(args.results)) + "\n"
    if args.write:
        DOCUMENT.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()

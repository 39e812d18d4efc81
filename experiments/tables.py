"""Tables of simulated results, with published numbers beside them.

    python experiments/tables.py                        # committed results
    python experiments/tables.py --results out/quick    # of `make experiments-quick`
    python experiments/tables.py --write                # into docs/simulator-fidelity.md

A dash means: not run.
"""

import argparse
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import readings
import token_tables
from cells import DASH, Lines, ranged, table
from readings import HERE, Rows, Spread, Study

DOCUMENT = HERE.parent / "docs" / "simulator-fidelity.md"
TARGET = 0.95
CLEAR_POINTS = 3.0
"""Published differences between systems that are larger than chance, in points."""
PLANNED = "dilaserve-reconfigured"
"""The published system of the 2-hour run: it plans layouts."""

UNITS = {  # column: heading, factor, format
    "attainment": ("SLO attainment, %", 100.0, "{:.1f}"),
    "accuracy": ("accuracy, % (simulated: proxy)", 100.0, "{:.1f}"),
    "latency_mean_s": ("mean latency, s", 1.0, "{:.2f}"),
    "latency_p99_s": ("99th percentile of latency, s", 1.0, "{:.2f}"),
    "threshold_mean": ("mean threshold", 1.0, "{:.3f}"),
}


def headline(folder: Path) -> Lines:
    """Per system: the load that it carries at 95 % attainment, at what accuracy."""
    result = readings.results("headline", folder)
    head = [
        "system",
        "load at 95 % attainment, requests/s per GPU (simulated)",
        "accuracy there, % (proxy)",
        "over dilaserve, same seed",
    ]
    if result is None:
        return table(head, [[DASH] * len(head)])
    rows = result["rows"]
    base = readings.capacities(rows, "dilaserve", TARGET)
    body = []
    for system in readings.systems(rows):
        found = readings.capacities(rows, system, TARGET)
        known = [capacity for capacity in found.values() if capacity]
        loads = Spread(tuple(c.rate for c in known)) if len(known) == len(found) else None
        accuracies = tuple(c.accuracy for c in known if c.accuracy is not None)
        ratios = tuple(
            own.rate / other.rate
            for seed, own in found.items()
            if own and (other := base.get(seed)) and other.exact
        )
        bound = "" if all(c.exact for c in known) else "at least "
        lowest = min(readings.swept(rows, "rate_per_gpu_per_s"))
        body.append(
            [
                system,
                bound + ranged(loads, "{:.2f}") if loads else f"below {lowest:g}",
                ranged(Spread(accuracies), "{:.1f}", 100.0) if accuracies else DASH,
                bound + ranged(Spread(ratios), "{:.2f}") + "x" if ratios else DASH,
            ]
        )
    return [*table(head, body), "", _basis(result)]


def _basis(result: Any) -> str:
    row, seeds = result["rows"][0], ", ".join(map(str, result["seeds"]))
    return (
        f"Simulated: {row['model']} on {row['dataset']}, {row['gpus']} GPUs, {row['requests']} "
        f"requests, seeds {seeds}; mean [smallest..largest] over seeds, linear between the loads "
        f"tried. `{result['command']}`"
    )


def rows_at(folder: Path, study: Study, system: str, x: float) -> Rows:
    """What we simulated of a published run: one row per seed, or none."""
    result = readings.results(study.experiment, folder)
    rows = result["rows"] if result else []
    return readings.select(rows, system=system, **{study.x_name: x}, **study.fixed)


def simulated(folder: Path, study: Study, system: str, metric: str, x: float) -> Spread | None:
    """Our values of a published one, over seeds."""
    return readings.spread(rows_at(folder, study, system, x), metric)


def differences(folder: Path, study: Study, system: str, metric: str) -> list[float]:
    """Simulated mean less published, at every load or deadline that has both."""
    found = []
    for x in study.xs:
        theirs, ours = study.value(system, metric, x), simulated(folder, study, system, metric, x)
        if theirs is not None and ours is not None:
            found.append(ours.mean - theirs)
    return found


def order(folder: Path, study: Study) -> tuple[int, int, Lines]:
    """(pairs in the published order, pairs checked, those that are not), by attainment.

    Checked are pairs whose published attainments differ by more than ``CLEAR_POINTS``.
    """
    agreed, checked, wrong = 0, 0, []
    for x in study.xs:
        for a, b in itertools.combinations(study.series, 2):
            theirs = [study.value(system, "attainment", x) for system in (a, b)]
            ours = [simulated(folder, study, system, "attainment", x) for system in (a, b)]
            if None in theirs or ours[0] is None or ours[1] is None:
                continue
            gap, own_gap = 100 * (theirs[0] - theirs[1]), 100 * (ours[0].mean - ours[1].mean)
            if abs(gap) <= CLEAR_POINTS:
                continue
            checked += 1
            agreed += gap * own_gap > 0
            if gap * own_gap <= 0:
                wrong.append(
                    f"{study.what}, {x:g}: {a} against {b}, published {gap:+.1f} points, "
                    f"simulated {own_gap:+.1f}"
                )
    return agreed, checked, wrong


def summary(folder: Path) -> Lines:
    """Mean absolute differences and order, per published sweep."""
    systems = ("infaas", "llumnix", "dilaserve")
    head = ["published sweep", *systems, "variants", "order of systems", "accuracy proxy, all"]
    body, wrong = [], []
    for study in readings.studies():
        if "attainment" not in study.metrics():
            continue
        by_system = {s: differences(folder, study, s, "attainment") for s in study.series}
        variants = [d for s, found in by_system.items() if s not in systems for d in found]
        accuracy = [d for s in study.series for d in differences(folder, study, s, "accuracy")]
        agreed, checked, failed = order(folder, study)
        wrong += failed
        body.append(
            [
                study.what,
                *(_mean_absolute(by_system.get(s, [])) for s in systems),
                _mean_absolute(variants),
                f"{agreed} of {checked}" if checked else DASH,
                _mean_absolute(accuracy),
            ]
        )
    lines = table(head, body)
    if wrong:
        lines += ["", "Not in the published order:", "", *(f"- {line}" for line in wrong)]
    return lines


def _mean_absolute(values: Sequence[float]) -> str:
    return f"{100 * sum(map(abs, values)) / len(values):.1f}" if values else DASH


def details(folder: Path, study: Study, metric: str) -> Lines:
    """Every published value of a sweep beside ours."""
    heading, factor, form = UNITS[metric]
    systems = [name for name, columns in study.series.items() if metric in columns]
    body = [
        [f"{x:g}", *(_cell(folder, study, system, metric, x, factor, form) for system in systems)]
        for x in study.xs
    ]
    x_head = "requests/s per GPU" if study.x_name == readings.SWEPT[0] else "SLO multiple"
    return [f"{study.what}. {heading}:", "", *table([x_head, *systems], body), ""]


def _cell(
    folder: Path, study: Study, system: str, metric: str, x: float, factor: float, form: str
) -> str:
    theirs = study.value(system, metric, x)
    ours = simulated(folder, study, system, metric, x)
    if theirs is None:
        return DASH
    text = f"{form.format(factor * theirs)} / {ranged(ours, form, factor)}"
    sign = form.replace(":", ":+")
    return text if ours is None else f"{text} ({sign.format(factor * (ours.mean - theirs))})"


def fidelity(folder: Path) -> Lines:
    """Summary, claims, and all values, folded."""
    lines = [
        *shortened(folder),
        "Mean absolute difference of SLO attainment in points, simulated mean over seeds less",
        "published single run. Order: pairs of systems at one load or deadline whose published",
        f"attainments differ by more than {CLEAR_POINTS:g} points, and how many of them come out "
        "in that order.",
        "",
        *summary(folder),
        "",
        *claims(folder),
        "",
        "<details><summary>Every published value beside the simulated one</summary>",
        "",
        "Cells: published / simulated mean [smallest..largest over seeds] (simulated mean less",
        "published).",
        "",
    ]
    for study in readings.studies():
        for metric in study.metrics():
            lines += details(folder, study, metric)
    return [*lines, "</details>"]


def shortened(folder: Path) -> Lines:
    """A warning, if some of the results are of quick runs."""
    names = sorted({study.experiment for study in readings.studies()})
    quick = [
        name
        for name in names
        if (result := readings.results(name, folder)) and "--quick" in result["command"]
    ]
    if not quick:
        return []
    return [
        f"Quick runs: {', '.join(quick)}. They have fewer requests than the published runs, so",
        "queues have less time to grow: they show that all runs, not how well it agrees.",
        "",
    ]


def study_named(name: str) -> Study:
    """A published sweep."""
    return next(study for study in readings.studies() if study.name == name)


def gains(folder: Path, study: Study, better: str, worse: str, metric: str) -> dict[float, float]:
    """Mean of ``better`` less mean of ``worse`` at each x that has both."""
    pairs = {
        x: [simulated(folder, study, system, metric, x) for system in (better, worse)]
        for x in study.xs
    }
    return {x: a.mean - b.mean for x, (a, b) in pairs.items() if a and b}


def claims(folder: Path) -> Lines:
    """The numbers of DiLaServe C10 that a simulation can answer, at their published runs."""
    ablations, hours = study_named("ablations"), study_named("two-hours")
    mmlu, gsm = study_named("load-llada-mmlu-pro"), study_named("load-llada-gsm8k")

    def at(
        study: Study, x: float, better: str, worse: str, metric: str = "attainment"
    ) -> tuple[str, str]:
        found = gains(folder, study, better, worse, metric)
        own = {at: gain for at, gain in found.items() if readings.same(at, x)}
        most = max(found.items(), key=lambda pair: abs(pair[1]), default=None)
        here = f"{100 * next(iter(own.values())):+.1f}" if own else DASH
        return here, f"{100 * most[1]:+.1f} at {most[0]:g}" if most else DASH

    body = [
        ["dilaserve over llumnix, LLaDA-8B MMLU-Pro at 1.5", "+56.6",
         *at(mmlu, 1.5, "dilaserve", "llumnix")],
        ["accuracy given for it", "-0.9", *at(mmlu, 1.5, "dilaserve", "llumnix", "accuracy")],
        ["dilaserve over llumnix, LLaDA-8B GSM8K at 1.875", "+57.1",
         *at(gsm, 1.875, "dilaserve", "llumnix")],
        ["accuracy given for it", "-0.9", *at(gsm, 1.875, "dilaserve", "llumnix", "accuracy")],
        ["dilaserve over llumnix, 2-hour curve", "+29.9",
         *at(hours, 1.2636, PLANNED, "llumnix")],
        ["dilaserve over infaas, 2-hour curve", "+20.7", *at(hours, 1.2636, PLANNED, "infaas")],
        ["without load control, 4 GPUs at 2.25", "-42.4",
         *at(ablations, 2.25, "dilaserve-no-load-control", "dilaserve")],
        ["SLO-aware threshold alone over infaas, 4 GPUs at 2.0", "+70.8",
         *at(ablations, 2.0, "dilaserve-no-load-control", "infaas")],
    ]  # fmt: skip
    head = ["difference in points", "published", "simulated, same run", "simulated, largest"]
    return [*table(head, body), "", *other_claims(folder)]


def other_claims(folder: Path) -> Lines:
    """Those about latency and layouts; simulated ones are the range over the loads run."""
    ablations, migration = study_named("ablations"), study_named("migration")
    body = [
        ["mean latency, dilaserve over infaas, 4 GPUs", "-25 to -63 %",
         _range(folder, ablations, "dilaserve", "infaas", "latency_mean_s")],
        ["99th percentile, migration over none", "-8 to -19 %",
         _range(folder, migration, "llumnix", "infaas", "latency_p99_s")],
        ["mean latency, migration at any step over recompute steps only, with cache",
         "+17 to +38 %", _range(folder, migration, "any-step", "llumnix", "latency_mean_s")],
        ["load from which 8 x TP1 beats 2 x TP4, requests/s, no cache", "1.0 to 1.25",
         crossing(folder)],
    ]  # fmt: skip
    return table(["claim", "published", "simulated"], body)


def _range(folder: Path, study: Study, system: str, base: str, metric: str) -> str:
    """Least and largest relative difference of means over the loads, in percent."""
    found = []
    for x in study.xs:
        ours, bases = (simulated(folder, study, name, metric, x) for name in (system, base))
        if ours and bases:
            found.append(100 * (ours.mean / bases.mean - 1))
    return f"{max(found, key=abs):+.0f} to {min(found, key=abs):+.0f} %" if found else DASH


def crossing(folder: Path) -> str:
    """Between which two loads of the whole cluster the layouts change places."""
    one, four = study_named("layout-tp1"), study_named("layout-tp4")
    last = None
    for x in one.xs:
        values = [simulated(folder, s, "infaas", "latency_mean_s", x) for s in (one, four)]
        if not values[0] or not values[1]:
            return DASH
        if values[0].mean < values[1].mean:
            return f"{8 * last:g} to {8 * x:g}" if last else f"below {8 * x:g}"
        last = x
    return f"above {8 * last:g}" if last else DASH


SECTIONS: dict[str, Callable[[Path], Lines]] = {
    "headline": headline,
    "fidelity": fidelity,
    "dynaserve": token_tables.dynaserve,
}


def written(text: str, folder: Path) -> str:
    """A document with every section made anew between its markers."""
    for name, make in SECTIONS.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        pattern = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"no markers for {name!r}")
        content = "\n".join([begin, *make(folder), end])
        text = pattern.sub(lambda _, content=content: content, text)
    return text


def main() -> None:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, help="folder of other results than the committed")
    parser.add_argument("--write", action="store_true", help=f"into {DOCUMENT.name}")
    args = parser.parse_args()
    if args.write and args.results:
        parser.error("--write takes committed results only")
    folder = args.results or HERE
    if args.write:
        DOCUMENT.write_text(written(DOCUMENT.read_text(), folder))
        return
    for name, make in SECTIONS.items():
        print(f"## {name} (simulated)\n")
        print("\n".join(make(folder)), "\n")


if __name__ == "__main__":
    main()

"""The published numbers of DynaServe (DynaServe 3.11) beside ours.

Every function of a row returns ``None`` where the experiment was not run.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import readings
from cells import DASH, Lines, ranged, table
from readings import HERE, Rows, Spread
from token_runs import causal, results_table

Fact = Mapping[str, Any]
CAPACITIES = {
    "azure-code": "ar-capacity",
    "burstgpt": "ar-capacity",
    "arxiv": "ar-capacity",
    "mini-reasoning": "ar-capacity-reasoning",
}
"""Workload -> experiment with the 14B model."""
LARGER = ("ar-capacity-32b", "ar-capacity-72b")
"""Experiments with all of these workloads and one other model."""
BASELINES = ("colocated", "disaggregated")
OURS = "dynaserve"
EXPOSED, GOOD = "exposed_transfer_mean_s", "goodput_tokens_per_s"
TIED = 0.98
"""Share of the best goodput from which a system counts as tied with it."""
KEPT = 0.99
"""Share of requests cut at the prompt's end from which roles count as kept."""
_COMPUTES = "tuned colocation computes nearly all that fits 100 ms already"
REASONS = {
    **dict.fromkeys((1, 2, 3, 5, 6, 7), _COMPUTES),
    8: "at half load ties go to the first instance; level nearer to capacity",
    13: "a prompt of 219 tokens adds 20 ms; 163 ms need several at once, so burstier arrivals",
    17: "grows with what instances hold",
}
"""Row -> why it is out of its band; what is behind it: docs/simulator-fidelity.md."""


@dataclass(frozen=True, slots=True)
class Ours:
    """Simulated cells (colocated, disaggregated, DynaServe), and whether they are in the band.

    ``inside`` is ``None`` where too little was run to tell.
    """

    cells: tuple[str, str, str]
    inside: bool | None
    remark: str = ""


@cache
def facts() -> Mapping[str, Any]:
    """The content of ``published_dynaserve.json``."""
    content: Mapping[str, Any] = json.loads((HERE / "published_dynaserve.json").read_text())
    return content


def rows_of(folder: Path, experiment: str, kind: str, **values: Any) -> Rows:
    """The rows of a kind with these values; none if it was not run."""
    result = readings.results(experiment, folder)
    return readings.select(result["rows"] if result else [], kind=kind, **values)


def ratio(rows: Rows, better: str, worse: str, metric: str) -> Spread | None:
    """Of a column, between rows of two systems with the same seed."""
    by_seed = [
        {row["seed"]: row[metric] for row in readings.select(rows, system=s) if metric in row}
        for s in (better, worse)
    ]
    one, other = by_seed
    found = tuple(one[s] / other[s] if other[s] else inf for s in one if s in other)
    return Spread(found) if found else None


def times(spread: Spread | None) -> str:
    """A ratio."""
    return DASH if spread is None else ranged(spread, "{:.2f}x")


def gains(folder: Path, base: str, metric: str = "capacity_per_s") -> dict[str, Spread]:
    """Workload -> what DynaServe has more than a baseline, with the 14B model."""
    return {w: gain for w, e in CAPACITIES.items() if (gain := _gain(folder, e, w, base, metric))}


def _gain(folder: Path, experiment: str, workload: str, base: str, metric: str) -> Spread | None:
    rows = rows_of(folder, experiment, "capacity", workload=workload)
    return ratio(rows, OURS, base, metric)


def _all_run(found: Sequence[Mapping[str, Spread]]) -> bool:
    return all(len(workloads) == len(CAPACITIES) for workloads in found)


def gain_range(folder: Path, fact: Fact) -> Ours | None:
    """Row 1."""
    found = [gains(folder, base) for base in BASELINES]
    means = [sorted(spread.mean for spread in gain.values()) for gain in found]
    if not all(means):
        return None
    cells = [f"{gain[0]:.2f}x..{gain[-1]:.2f}x" for gain in means]
    enough = zip(means, fact["largest"], strict=True)
    inside = all(gain[0] > 1.0 and gain[-1] >= largest for gain, largest in enough)
    remark = f"{len(means[0])} of {len(CAPACITIES)} workloads"
    return Ours((cells[0], cells[1], "1"), inside if _all_run(found) else None, remark)


def mean_gain(folder: Path, fact: Fact) -> Ours | None:
    """Row 2."""
    found = [gains(folder, base) for base in BASELINES]
    if not all(found):
        return None
    means = [sum(s.mean for s in gain.values()) / len(gain) for gain in found]
    inside = all(mean >= least for mean, least in zip(means, fact["least"], strict=True))
    return Ours((f"{means[0]:.2f}x", f"{means[1]:.2f}x", "1"), inside if _all_run(found) else None)


def azure_gain(folder: Path, fact: Fact) -> Ours | None:
    """Row 3."""
    found = gains(folder, "colocated")
    if "azure-code" not in found:
        return None
    largest = max(found, key=lambda workload: found[workload].mean)
    inside = largest == "azure-code" if _all_run([found]) else None
    return Ours((times(found["azure-code"]), DASH, "1"), inside, f"largest: {largest}")


def goodput_gain(folder: Path, fact: Fact) -> Ours | None:
    """Row 4: at the capacity of each, all models."""
    cells = [*CAPACITIES.items(), *((w, e) for e in LARGER for w in CAPACITIES)]
    pairs = [
        [_gain(folder, experiment, workload, base, GOOD) for base in BASELINES]
        for workload, experiment in cells
    ]
    found = [(one.mean, other.mean) for one, other in pairs if one and other]
    if not found:
        return None
    best = sum(min(means) >= TIED for means in found)
    largest = [f"{max(column):.2f}x" for column in zip(*found, strict=True)]
    inside = best >= fact["least_share"] * len(found) if len(found) == len(cells) else None
    return Ours((largest[0], largest[1], f"{best} of {len(found)}"), inside)


def hybrid(metric: str, form: str, folder: Path, fact: Fact) -> Ours | None:
    """Rows 5 and 6: a column at the capacity of each, and its ratios."""
    rows = rows_of(folder, "hybrid", "capacity")
    found = [ratio(rows, OURS, base, metric) for base in BASELINES]
    if not all(found):
        return None
    cells = [
        ranged(readings.spread(readings.select(rows, system=system), metric), form)
        for system in (*BASELINES, OURS)
    ]
    remark = f"gains {times(found[0])}, {times(found[1])}"
    return Ours((cells[0], cells[1], cells[2]), _near(found, fact), remark)


def _near(found: Sequence[Spread | None], fact: Fact) -> bool:
    pairs = zip(found, fact["ratios"], strict=True)
    return all(s is not None and abs(s.mean / r - 1.0) <= fact["within"] for s, r in pairs)


def hybrid_gain(folder: Path, fact: Fact) -> Ours | None:
    """Row 7."""
    rows = rows_of(folder, "hybrid", "capacity")
    found = [ratio(rows, OURS, base, "capacity_per_s") for base in BASELINES]
    if not all(found):
        return None
    more = [Spread(tuple(v - 1.0 for v in s.values)) for s in found if s]
    cells = [ranged(s, "{:.0f}", 100.0) + " %" for s in more]
    return Ours((cells[0], cells[1], DASH), _near(found, fact))


def shaped(folder: Path, workload: str) -> list[Rows]:
    """Rows of a fixed shape: colocated, disaggregated, DynaServe; none if one was not run.

    At the highest rate at which roles are kept, or else the lowest: beyond it requests for which
    one role has no room stay with the other, which is disaggregation no more.
    """
    names = ("colocated-2048", "disaggregated-1p1d", OURS)
    rows = rows_of(folder, "ar-fixed", "run", workload=workload)
    rows = [row for row in rows if row["system"] in names]
    if len(readings.systems(rows)) < len(names):
        return []
    split = readings.select(rows, system=names[1])
    mixed = {row["rate_per_s"] for row in split if row["splits"]["at"] < KEPT}
    rates = readings.swept(rows, "rate_per_s")
    rate = max((rate for rate in rates if rate not in mixed), default=rates[0])
    return [readings.select(rows, system=s, rate_per_s=rate) for s in names]


def busy(workload: str, folder: Path, fact: Fact) -> Ours | None:
    """Rows 8, 10, 12: MFU by instance."""
    shape = shaped(folder, workload)
    found = [
        [100.0 * sum(column) / len(rows) for column in zip(*(r["mfu"] for r in rows), strict=True)]
        for rows in shape
    ]
    if not found:
        return None
    (one, other), split = found[0], found[1]
    level = abs(one - other) < 0.2 * max(one, other)
    published = [float(text) for text in fact["published"][1].split("/")]
    inside = level and (split[0] > split[1]) == (published[0] > published[1])
    if published[1] < 1.0:
        inside = inside and split[1] < 0.1 * split[0]
    cells = ["/".join(f"{mfu:.2f}" for mfu in mfus) for mfus in found]
    remark = f"at {shape[0][0]['rate_per_s']:.2f}/s"
    return Ours((cells[0], cells[1], cells[2]), inside, remark)


def gaps(workload: str, folder: Path, fact: Fact) -> Ours | None:
    """Rows 9, 11, 13: 99th percentile of the gaps, and attainment."""
    shape = shaped(folder, workload)
    found = [
        (p99, met)
        for rows in shape
        if (p99 := readings.spread(rows, "tbt_p99_s"))
        and (met := readings.spread(rows, "attainment"))
    ]
    if not found:
        return None
    (p99, met), (split_p99, split_met), _ = found
    inside = p99.mean > split_p99.mean and met.mean < split_met.mean
    cells = [f"{ranged(a, '{:.0f}', 1e3)}; {ranged(b, '{:.2f}', 100.0)}" for a, b in found]
    remark = f"at {shape[0][0]['rate_per_s']:.2f}/s"
    return Ours((cells[0], cells[1], cells[2]), inside, remark)


def budget(folder: Path, fact: Fact) -> Ours | None:
    """Row 14."""
    rows = rows_of(folder, "ar-budget", "run")
    rates = readings.swept(rows, "rate_per_s")
    names = (OURS, f"{OURS}-static-2048", f"{OURS}-static-512")
    own = [readings.select(rows, system=s, rate_per_s=rates[-1]) for s in names if rates]
    found = [spread for r in own if (spread := readings.spread(r, "attainment"))]
    if len(found) < 3:
        return None
    kept, static, short = found
    inside = kept.mean >= fact["with"] and min(static.mean, short.mean) <= fact["without"]
    cells = [ranged(s, "{:.1f}", 100.0) for s in (static, kept, short)]
    remark = f"at {rates[-1]:.2f}/s, chunks of 2048; of 512: {cells[2]}"
    return Ours((DASH, DASH, f"{cells[0]} -> {cells[1]}"), inside, remark)


def changed(
    experiment: str, system: str, base: str, metric: str, bound: str, folder: Path, fact: Fact
) -> Ours | None:
    """Rows 15 and 16: a column of one system relative to another's, same seed."""
    rows = [r for r in rows_of(folder, experiment, "run") if r[metric] is not None]
    found = ratio(rows, system, base, metric)
    if found is None:
        return None
    change = Spread(tuple(v - 1.0 for v in found.values))
    inside = change.mean >= fact["least"] if bound == "least" else change.mean <= fact["most"]
    ends = [readings.spread(readings.select(rows, system=s), metric) for s in (base, system)]
    unit, factor = (" ms", 1e3) if metric.endswith("_s") and "per_s" not in metric else ("", 1.0)
    remark = " to ".join(ranged(s, "{:.3g}", factor) for s in ends) + unit
    return Ours((DASH, DASH, ranged(change, "{:+.1f}", 100.0) + " %"), inside, remark)


def placed(folder: Path, system: str) -> dict[float, float]:
    """Rate -> milliseconds that half the placements took, measured where they were simulated."""
    path = folder / "ar-overhead" / "timing.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {r["rate_per_s"]: r["place_us_p50"] / 1e3 for r in rows if r["system"] == system}


def overhead(folder: Path, fact: Fact) -> Ours | None:
    """Row 17."""
    ms = list(placed(folder, OURS).values())
    if not ms:
        return None
    inside = max(ms) < fact["below_ms"] and max(ms) < fact["flat"] * min(ms)
    cell = "/".join(f"{value:.2f}" for value in ms)
    return Ours((DASH, DASH, cell), inside, "measured: placing alone, median, Python")


def whole(folder: Path, fact: Fact) -> Ours | None:
    """Row 18."""
    rows = rows_of(folder, "ar-overhead", "run", system=OURS, rate_per_s=10.0)
    e2e, ms = readings.spread(rows, "e2e_mean_s"), placed(folder, OURS).get(10.0)
    if e2e is None or ms is None:
        return None
    share = ms / 1e3 / e2e.mean
    remark = f"placing takes {100.0 * share:.2f} % of it (measured)"
    return Ours((DASH, DASH, ranged(e2e, "{:.0f}", 1e3)), share < fact["share"], remark)


def probe(folder: Path, fact: Fact) -> Ours | None:
    """Row 19: a bound, from whole placements of one plan per instance and one per pair."""
    one, ms = placed(folder, f"{OURS}-K1").get(10.0), placed(folder, OURS).get(10.0)
    result = readings.results("ar-overhead", folder)
    if one is None or ms is None or result is None:
        return None
    config = result["config"]
    tokens, alone = config["system"][OURS]["control"]["tokens"], config["instances"]
    us = 1e3 * one / (alone + tokens["pairs"])
    cell = f"{tokens['probes']}, below {us:.0f} us"
    remark = f"measured: a whole placement with K = 1, by its {alone} plans without a cut and "
    remark += f"{tokens['pairs']} with"
    return Ours((DASH, DASH, cell), us < fact["below_us"], remark)


def _of(make: Callable[..., Ours | None], *given: Any) -> Callable[[Path, Fact], Ours | None]:
    return lambda folder, fact: make(*given, folder, fact)


MAKERS: dict[int, Callable[[Path, Fact], Ours | None]] = {
    1: gain_range,
    2: mean_gain,
    3: azure_gain,
    4: goodput_gain,
    5: _of(hybrid, "capacity_per_s", "{:.2f}"),
    6: _of(hybrid, GOOD, "{:.0f}"),
    7: hybrid_gain,
    8: _of(busy, "fixed-8192-32"),
    9: _of(gaps, "fixed-8192-32"),
    10: _of(busy, "fixed-2048-512"),
    11: _of(gaps, "fixed-2048-512"),
    12: _of(busy, "fixed-219-1467"),
    13: _of(gaps, "fixed-219-1467"),
    14: budget,
    15: _of(changed, "ar-push", OURS, f"{OURS}-serial-push", EXPOSED, "most"),
    16: _of(changed, "ar-noise", f"{OURS}-sigma100", OURS, GOOD, "least"),
    17: overhead,
    18: whole,
    19: probe,
}


def published_rows(folder: Path) -> Lines:
    """The table of DynaServe 3.11. Cells: published / simulated."""
    head = ["#", "experiment", *BASELINES, "DynaServe", "band", "in it?", "remark"]
    body = []
    for fact in facts()["rows"]:
        ours = MAKERS[fact["row"]](folder, fact)
        cells = ours.cells if ours else ("not run",) * 3
        both = [
            DASH if theirs == own == DASH or (theirs == DASH and ours is None) else
            f"{theirs} / {own}"
            for theirs, own in zip(fact["published"], cells, strict=True)
        ]  # fmt: skip
        inside = {None: DASH, True: "in", False: "out"}[ours.inside] if ours else "not run"
        reason = REASONS.get(fact["row"], "") if ours and ours.inside is False else ""
        remark = "; ".join(filter(None, [ours.remark if ours else "", reason]))
        body.append([str(fact["row"]), fact["what"], *both, fact["band"], inside, remark])
    return table(head, body)


def dynaserve(folder: Path) -> Lines:
    """Published rows; then all that was run, folded."""
    lines = [
        "Cells: published single run / simulated mean [smallest..largest over seeds].",
        "",
        *published_rows(folder),
    ]
    found = causal(folder)
    if quick := [name for name, result in found if "--quick" in result["command"]]:
        lines += ["", f"Quick runs: {', '.join(quick)}. They are too short to compare."]
    if found:
        lines += ["", "<details><summary>What each experiment came to (simulated)</summary>"]
        for name, result in found:
            seeds = ", ".join(map(str, result["seeds"]))
            lines += ["", f"`{name}`, {result['config']['instances']} instances, seeds {seeds}:"]
            for kind in ("capacity", "run"):
                rows = readings.select(result["rows"], kind=kind)
                lines += ["", *results_table(rows)] if rows else []
        lines += ["", "</details>"]
    return lines

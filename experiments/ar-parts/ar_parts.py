"""Rows 14 to 19 of DynaServe's published numbers: what each part contributes and costs."""

import json
from functools import partial
from pathlib import Path

from lib.dynaserve import OURS, Fact, Judge, Judged
from lib.markdown import DASH, ranged
from lib.results import Spread, rows_of

PLANS_PER_PLACEMENT = 8
"""Of ``dynaserve-K1`` on four instances: one for each instance alone, one for each of 4 pairs."""
PROBES = 6
"""Of ``dynaserve`` (K)."""


def budget(root: Path, fact: Fact) -> Judged | None:
    """Row 14."""
    rows = rows_of("ar-parts/budget", root, kind="run")
    names = (OURS, f"{OURS}-static-2048", f"{OURS}-static-512")
    rates = rows.numbers("rate_per_s")
    own = [rows.where(system=s, rate_per_s=rates[-1]) for s in names if rates]
    found = [spread for some in own if (spread := some.spread("tbt_attainment"))]
    if len(found) < len(names):
        return None
    kept, static, short = found
    inside = kept.mean >= fact["with"] and min(static.mean, short.mean) <= fact["without"]
    cells = [ranged(s, "{:.1f}", 100.0) for s in (static, kept, short)]
    remark = f"at {rates[-1]:.2f}/s, chunks of 2048; of 512: {cells[2]}"
    return Judged((DASH, DASH, f"{cells[0]} -> {cells[1]}"), inside, remark)


def changed(
    experiment: str, system: str, base: str, column: str, unit: str, root: Path, fact: Fact
) -> Judged | None:
    """Rows 15 and 16: a column of one system relative to another's, same seed."""
    rows = rows_of(experiment, root, kind="run")
    found = rows.ratio(system, base, column)
    if found is None:
        return None
    change = Spread(tuple(v - 1.0 for v in found.values))
    inside = change.mean >= fact["least"] if "least" in fact else change.mean <= fact["most"]
    ends = [rows.where(system=s).spread(column) for s in (base, system)]
    factor = 1e3 if unit == " ms" else 1.0
    remark = " to ".join(ranged(s, "{:.3g}", factor) for s in ends) + unit
    return Judged((DASH, DASH, change.text("{:+.1f}", 100.0) + " %"), inside, remark)


def placed(root: Path, system: str) -> dict[float, float]:
    """Rate -> milliseconds that half the placements took, measured where they were simulated."""
    path = root / "ar-parts" / "overhead.timing.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {r["rate_per_s"]: r["place_us_p50"] / 1e3 for r in rows if r["system"] == system}


def overhead(root: Path, fact: Fact) -> Judged | None:
    """Row 17."""
    ms = list(placed(root, OURS).values())
    if not ms:
        return None
    inside = max(ms) < fact["below_ms"] and max(ms) < fact["flat"] * min(ms)
    cell = "/".join(f"{value:.2f}" for value in ms)
    return Judged((DASH, DASH, cell), inside, "measured: placing alone, median, Python")


def whole(root: Path, fact: Fact) -> Judged | None:
    """Row 18."""
    rows = rows_of("ar-parts/overhead", root, kind="run", system=OURS, rate_per_s=10.0)
    e2e, ms = rows.spread("latency_mean_s"), placed(root, OURS).get(10.0)
    if e2e is None or ms is None:
        return None
    share = ms / 1e3 / e2e.mean
    remark = f"placing takes {100.0 * share:.2f} % of it (measured)"
    return Judged((DASH, DASH, e2e.text("{:.0f}", 1e3)), share < fact["share"], remark)


def probe(root: Path, fact: Fact) -> Judged | None:
    """Row 19: a bound, from whole placements of one plan per instance and one per pair."""
    ms = placed(root, f"{OURS}-K1").get(10.0)
    if ms is None:
        return None
    us = 1e3 * ms / PLANS_PER_PLACEMENT
    remark = "measured: a whole placement with K = 1, by its 4 plans without a cut and 4 with"
    return Judged((DASH, DASH, f"{PROBES}, below {us:.0f} us"), us < fact["below_us"], remark)


ROWS: dict[int, Judge] = {
    14: budget,
    15: partial(
        changed, "ar-parts/push", OURS, f"{OURS}-serial-push", "exposed_transfer_mean_s", " ms"
    ),
    16: partial(changed, "ar-parts/noise", f"{OURS}-sigma100", OURS, "goodput_tokens_per_s", ""),
    17: overhead,
    18: whole,
    19: probe,
}

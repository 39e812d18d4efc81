"""From which load on many instances of one GPU beat few of four."""

from pathlib import Path

from lib.markdown import DASH, Lines, table
from lib.results import read


def tables(root: Path) -> Lines:
    """The load at which the layouts change places, published and simulated."""
    head = ["claim", "published", "simulated"]
    claim = "load from which 8 x TP1 beats 2 x TP4, requests/s, no cache"
    return table(head, [[claim, "1.0 to 1.25", crossing(root)]])


def crossing(root: Path) -> str:
    """Between which two loads that is."""
    one, four = read("tp-tradeoff/tp1", root), read("tp-tradeoff/tp4", root)
    if one is None or four is None:
        return DASH
    last = None
    for x in one.rows.numbers("rate_per_s"):
        flat, steep = (r.rows.where(rate_per_s=x).spread("latency_mean_s") for r in (one, four))
        if flat is None or steep is None:
            return DASH
        if flat.mean < steep.mean:
            return f"{last:g} to {x:g}" if last else f"below {x:g}"
        last = x
    return f"above {last:g}" if last else DASH

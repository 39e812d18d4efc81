"""What two tenants got, one of which floods, and the other one alone."""

from pathlib import Path

from lib.markdown import DASH, Lines, table
from lib.results import Rows, Spread, read

MODEST, FLOODING = "modest", "flooding"
HEAD = ("system", "modest: attainment, %", "its mean threshold", "flooding: attainment, %",
        "its mean threshold")  # fmt: skip


def tables(root: Path) -> Lines:
    """A line per system, and one for each without the flood."""
    body = []
    for name, heading in (("alone", "{}, no flood"), ("flood", "{}")):
        results = read(f"tenants/{name}", root)
        for system in results.rows.distinct("system") if results else ():
            rows = results.rows.where(system=system) if results else Rows()
            cells = [cell for tenant in (MODEST, FLOODING) for cell in _cells(rows, tenant)]
            body.append([heading.format(system), *cells])
    return table(HEAD, body)


def _cells(rows: Rows, tenant: str) -> tuple[str, str]:
    """Attainment and threshold over seeds; of a run of one class they are the row's own."""
    own = [row["classes"].get(tenant) if row["classes"] else row for row in rows]
    if any(one is None for one in own) or (tenant == FLOODING and not rows.all[0]["classes"]):
        return DASH, DASH
    met = Spread(tuple(one["attainment"] for one in own))
    threshold = Spread(tuple(one["threshold_mean"] for one in own))
    return met.text("{:.1f}", 100.0), threshold.text("{:.3f}")

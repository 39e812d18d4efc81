"""Tables in Markdown."""

from collections.abc import Sequence

from .results import Spread

DASH = "-"
Lines = list[str]


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> Lines:
    """Rows of cells below a head."""
    rows = [head, ["---"] * len(head), *body]
    return ["| " + " | ".join(row) + " |" for row in rows]


def ranged(spread: Spread | None, form: str, factor: float = 1.0) -> str:
    """Mean [smallest..largest] over seeds, or a dash."""
    return spread.text(form, factor) if spread else DASH

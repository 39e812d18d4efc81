"""Tables in Markdown, and what stands in them."""

from collections.abc import Sequence

from readings import Spread

DASH = "-"
Lines = list[str]


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> Lines:
    """In Markdown."""
    rows = [head, ["---"] * len(head), *body]
    return ["| " + " | ".join(row) + " |" for row in rows]


def ranged(spread: Spread | None, form: str, factor: float = 1.0) -> str:
    """Mean [smallest..largest] over seeds."""
    if spread is None:
        return DASH
    mean, low, high = (form.format(factor * v) for v in (spread.mean, spread.low, spread.high))
    return mean if len(spread.values) == 1 else f"{mean} [{low}..{high}]"

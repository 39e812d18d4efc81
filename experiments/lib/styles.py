"""One style per system, the same in every figure: colour, dash and marker.

The colours are Okabe and Ito's, which all readers tell apart; dashes let a line show through.
"""

from collections.abc import Iterable
from typing import NamedTuple

GREY, GREEN, BLUE, ORANGE, SKY = "#7f7f7f", "#009e73", "#0072b2", "#e69f00", "#56b4e9"
PINK, BLACK, RED, BROWN, VIOLET = "#cc79a7", "#000000", "#d55e00", "#8c510a", "#5e4fa2"

Dash = tuple[float, ...]
SOLID: Dash = ()
LONG: Dash = (6.0, 2.0)
SHORT: Dash = (3.0, 1.5)
DOTS: Dash = (1.2, 1.2)
MIXED: Dash = (6.0, 1.5, 1.2, 1.5)


class Style(NamedTuple):
    """How a system is drawn. ``dash``: lengths of ink and gap, in points; none: solid."""

    color: str
    dash: Dash
    marker: str


STYLES = {
    "stepserve": Style(RED, SOLID, "D"),
    "stepserve-full-refresh": Style(BROWN, LONG, "<"),
    "dilaserve": Style(BLUE, SOLID, "o"),
    "dilaserve-two-settings": Style(BLUE, SHORT, "s"),
    "dilaserve-no-load-control": Style(PINK, SHORT, "v"),
    "dilaserve-no-slo-aware": Style(ORANGE, MIXED, "P"),
    "dilaserve-one-shot": Style(SKY, SHORT, "<"),
    "dilaserve-oracle": Style(BLACK, DOTS, "*"),
    "dilaserve-no-migration": Style(VIOLET, LONG, "d"),
    "dilaserve-any-step-migration": Style(BROWN, MIXED, ">"),
    "dilaserve-reconfigured": Style(SKY, SOLID, "X"),
    "dilaserve-five-thresholds": Style(BLUE, LONG, "p"),
    "infaas": Style(GREY, LONG, "s"),
    "llumnix": Style(GREEN, SHORT, "^"),
    "any-step": Style(BROWN, SOLID, ">"),
    "oracle": Style(BLACK, DOTS, "X"),
    "online": Style(BLUE, DOTS, "h"),
    "one-shot": Style(SKY, DOTS, "<"),
    "mean": Style(ORANGE, LONG, "d"),
    "fixed": Style(GREY, DOTS, "p"),
    "dynaserve": Style(BLUE, LONG, "o"),
    "dynaserve-static-512": Style(SKY, MIXED, ">"),
    "dynaserve-static-2048": Style(BLACK, SHORT, "X"),
    "dynaserve-K1": Style(SKY, LONG, "p"),
    "colocated": Style(GREY, SOLID, "s"),
    "colocated-512": Style(GREY, MIXED, "v"),
    "colocated-2048": Style(BROWN, SHORT, "h"),
    "colocated-4096": Style(BLACK, LONG, "P"),
    "colocated-budget": Style(PINK, MIXED, "v"),
    "disaggregated": Style(GREEN, LONG, "^"),
    "disaggregated-1p1d": Style(GREEN, MIXED, "d"),
    "disaggregated-bypass": Style(ORANGE, SHORT, "P"),
}
_COLORS = (BLUE, ORANGE, GREEN, RED, VIOLET, SKY, BLACK, PINK)
_MARKERS = "oDs^vP*X"
_DASHES = (SOLID, LONG, SHORT, DOTS, MIXED)
_SPARE = [
    Style(_COLORS[i % 8], _DASHES[(i + i // 8) % 5], _MARKERS[(i + i // 8) % 8]) for i in range(64)
]
"""All of different colour or marker."""


def styles(names: Iterable[str]) -> dict[str, Style]:
    """Of what a figure shows together: the fixed ones; for others spare ones nobody here has."""
    names = list(names)
    taken = {(STYLES[n].color, STYLES[n].marker) for n in names if n in STYLES}
    spare = (style for style in _SPARE if (style.color, style.marker) not in taken)
    return {name: STYLES[name] if name in STYLES else next(spare) for name in names}

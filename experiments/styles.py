"""Colours and markers of the systems, the same in every picture."""

from itertools import cycle

STYLES = {  # colours after Okabe and Ito, told apart by all readers; one per system everywhere
    "infaas": ("#7f7f7f", "s"),
    "llumnix": ("#009e73", "^"),
    "dilaserve": ("#0072b2", "o"),
    "dilaserve-five-thresholds": ("#e69f00", "p"),
    "dilaserve-reconfigured": ("#56b4e9", "X"),
    "dilaserve-no-load-control": ("#cc79a7", "v"),
    "dilaserve-no-slo-aware": ("#e69f00", "P"),
    "dilaserve-one-shot": ("#56b4e9", "<"),
    "dilaserve-oracle": ("#000000", "*"),
    "dilaserve-no-migration": ("#009e73", "d"),
    "dilaserve-any-step-migration": ("#8c510a", ">"),
    "any-step": ("#8c510a", ">"),
    "online": ("#0072b2", "o"),
    "oracle": ("#000000", "*"),
    "one-shot": ("#56b4e9", "<"),
    "mean": ("#e69f00", "P"),
    "fixed": ("#000000", "s"),
    "colocated": ("#7f7f7f", "s"),
    "colocated-2048": ("#7f7f7f", "s"),
    "colocated-budget": ("#cc79a7", "v"),
    "disaggregated": ("#009e73", "^"),
    "disaggregated-1p1d": ("#009e73", "^"),
    "disaggregated-bypass": ("#e69f00", "P"),
    "dynaserve": ("#0072b2", "o"),
    "dynaserve-static-512": ("#56b4e9", "<"),
    "dynaserve-static-2048": ("#000000", "X"),
    "stepserve": ("#d55e00", "D"),
    "stepserve-fixed": ("#000000", "s"),
    "stepserve-all-running": ("#cc79a7", "v"),
    "stepserve-load-caps": ("#56b4e9", "h"),
    "stepserve-no-caps": ("#e69f00", "P"),
    "stepserve-schedules": ("#009e73", "*"),
    "stepserve-full-refresh": ("#7f7f7f", "<"),
    "stepserve-cheap-refresh": ("#0072b2", "o"),
    "stepserve-hurry": ("#f0c000", "X"),
    "stepserve-every-second": ("#8c510a", ">"),
    "stepserve-output-only": ("#5e4fa2", "d"),
}
SPARE = [
    (color, marker)
    for marker in ("X", "<", ">", "p")
    for color in ("#56b4e9", "#e69f00", "#cc79a7", "#000000", "#f0c000")
]


def styles(systems: list[str]) -> dict[str, tuple[str, str]]:
    """(colour, marker) by system: the fixed ones, the others from the spare ones."""
    taken = {STYLES[name] for name in systems if name in STYLES}
    spare = cycle([style for style in SPARE if style not in taken])
    return {name: STYLES.get(name) or next(spare) for name in systems}

"""Small probabilistic phrase grammars that sample a text and recognise every text they allow.

A task states its answer once, as a grammar. Sampling and checking read the same statement, so
the checker accepts every phrasing that training can show and nothing else. Text pieces carry
their own leading space (``" Tom"``), because a word with its space is one token.
"""

import random
import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pick:
    """One of several options, drawn with the given weights.

    A ``name`` binds the chosen text so that a later ``Ref`` must repeat it; names are unique
    within one grammar, and a named pick has plain strings as options.
    """

    options: tuple[tuple[float, "Node"], ...]
    name: str = ""


@dataclass(frozen=True, slots=True)
class Ref:
    """The text bound earlier to ``name``."""

    name: str


Node = str | Pick | Ref | tuple["Node", ...]
"""A literal, a choice, a back reference, or a sequence of nodes."""


def pick(name: str = "", /, **weights: float) -> Pick:
    """A choice between single words, each with its leading space: ``pick(told=3, called=1)``."""
    return Pick(tuple((weight, " " + word) for word, weight in weights.items()), name)


def maybe(chance: float, node: Node) -> Pick:
    """``node`` with probability ``chance``, else nothing."""
    return Pick(((1.0 - chance, ""), (chance, node)))


def sample_text(node: Node, rng: random.Random) -> str:
    """One text of the grammar, with its leading space."""
    return _sample(node, rng, {})


def _sample(node: Node, rng: random.Random, bound: dict[str, str]) -> str:
    if isinstance(node, str):
        return node
    if isinstance(node, Ref):
        return bound[node.name]
    if isinstance(node, Pick):
        weights = [weight for weight, _ in node.options]
        chosen = rng.choices(node.options, weights)[0][1]
        text = _sample(chosen, rng, bound)
        if node.name:
            bound[node.name] = text
        return text
    return "".join(_sample(part, rng, bound) for part in node)


def pattern(node: Node) -> str:
    """Regular expression that matches exactly the texts of the grammar."""
    if isinstance(node, str):
        return re.escape(node)
    if isinstance(node, Ref):
        return f"(?P={node.name})"
    if isinstance(node, Pick):
        inner = "|".join(pattern(option) for _, option in node.options)
        return f"(?P<{node.name}>{inner})" if node.name else f"(?:{inner})"
    return "".join(pattern(part) for part in node)

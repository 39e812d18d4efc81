"""The tasks of the bundled model: generators, exact checkers and the held-out split.

Every answer is a phrase grammar (``grammar.py``). The free phrasings in it are deliberate: a
phrase of variable length shifts all that follows, so a sampler that demands confidence has to
settle one sentence after another, while a lenient one takes several majority phrasings in one
step. Some answers also carry a constraint that no single token shows: exactly one of K people
wins, so each "lost" alone has probability (K - 1) / K and all of them together are impossible.
"""

import random
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from stepserve.engine.bundled.grammar import Node, Pick, Ref, maybe, pattern, pick, sample_text

HE = ("Tom", "Ben", "Sam", "Leo", "Max", "Jack", "Finn", "Hugo")
SHE = ("Ana", "Mia", "Lily", "Emma", "Sara", "Kate", "Nina", "Ruth")
NAMES = HE + SHE
ANIMALS = ("fox", "dog", "cat", "bear", "bird", "frog", "goat", "duck")
COLORS = ("red", "blue", "green", "yellow", "white", "black")
FOODS = ("bread", "rice", "soup", "cake", "milk", "corn")
THINGS = ("kite", "ball", "hat", "boat", "drum", "book")
PLACES = ("park", "beach", "farm", "forest", "market", "school")
COUNTED = ("apples", "coins", "pens", "cards", "shells", "eggs")
CATEGORIES = {"animals": ANIMALS, "colors": COLORS, "foods": FOODS}

HELD_OUT_MODULUS = 20
"""One prompt in this many is held out: never trained on, the only ones evaluated on."""

SEVERAL = 0.4
"""Share of the look-ups that ask for several independent facts instead of a chain."""

MAX_VALUE = 29
"""Largest value that occurs in a word problem."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt, one valid response, and the expression that every valid response matches."""

    task: str
    kind: str
    size: int  # hops, items, contestants or operations: what makes the problem longer
    prompt: str
    response: str
    accepts: str


def correct(problem: Problem, text: str) -> bool:
    """Whether ``text``, as a whole, is a valid response to the problem."""
    return re.fullmatch(problem.accepts, " " + text.strip()) is not None


_QUESTIONS = re.compile(
    r"\. Keep [A-Z]|Who is last from |Reverse the list: |Sort (up|down): "
    rf"|Keep the ({'|'.join(CATEGORIES)}): |Choose one: |Write a story: "
    rf"|How many ({'|'.join(COUNTED)})\?"
)


def known_question(prompt: str) -> bool:
    """Whether a prompt asks for one of the tasks; of others the model knows nothing."""
    return _QUESTIONS.search(prompt) is not None


def held_out(prompt: str) -> bool:
    """Whether a prompt belongs to the evaluation side of the split."""
    return zlib.crc32(prompt.encode()) % HELD_OUT_MODULUS == 0


def _problem(
    task: str, kind: str, size: int, prompt: str, answer: Node, rng: random.Random
) -> Problem:
    response = sample_text(answer, rng).strip()
    return Problem(task, kind, size, prompt.strip(), response, pattern(answer))


def lookup(rng: random.Random) -> Problem:
    """Look up who told whom: several people at once, or hop by hop along a chain."""
    return _several(rng) if rng.random() < SEVERAL else _chain(rng)


def _hop(source: str, target: str) -> Node:
    return (maybe(0.2, " Then"), f" {source}", pick(told=0.75, called=0.25), f" {target}.")


def _several(rng: random.Random) -> Problem:
    """Independent look-ups: repeat the facts about the people asked for, in that order."""
    size = rng.choices((1, 2, 3, 4), (1, 3, 3, 3))[0]
    names = rng.sample(NAMES, size + rng.randint(2, 3))
    facts = [(name, rng.choice([n for n in names if n != name])) for name in names]
    told = " ".join(f"{a} told {b}." for a, b in facts)
    asked = rng.sample(facts, size)
    answer = tuple(_hop(a, b) for a, b in asked)
    prompt = f"{told} Keep {', '.join(a for a, _ in asked)}."
    return _problem("lookup", "several", size, prompt, answer, rng)


def _chain(rng: random.Random) -> Problem:
    """Follow who told whom from a given person to the last one, writing every hop."""
    hops = rng.choices((1, 2, 3, 4, 5), (3, 4, 4, 3, 2))[0]
    names = rng.sample(NAMES, hops + 4)
    path, others = names[: hops + 1], names[hops + 1 :]
    facts = [f"{a} told {b}." for a, b in pairwise(path)]
    for source in others[: rng.randint(1, 2)]:
        facts.append(f"{source} told {rng.choice([n for n in names if n != source])}.")
    facts += [f"{path[-1]} is last.", f"{others[-1]} is last."]
    rng.shuffle(facts)
    answer: tuple[Node, ...] = tuple(_hop(a, b) for a, b in pairwise(path))
    answer += (maybe(0.75, " So"), f" {path[-1]}", " is", pick(last=0.8, final=0.2), ".")
    prompt = f"{' '.join(facts)} Who is last from {path[0]}?"
    return _problem("lookup", "chain", hops, prompt, answer, rng)


def lists(rng: random.Random) -> Problem:
    """Reverse, sort or filter a list, or mark exactly one item of it."""
    kind = rng.choices(("reverse", "sort", "filter", "choose"), (3, 3, 3, 2))[0]
    if kind == "choose":
        return _choose(rng)
    words = ANIMALS + COLORS + FOODS
    if kind == "reverse":
        items = rng.sample(words, rng.randint(3, 7))
        result, order = items[::-1], "Reverse the list"
    elif kind == "sort":
        items = [str(n) for n in rng.sample(range(1, 10), rng.randint(3, 6))]
        down = rng.random() < 0.4
        result, order = sorted(items, reverse=down), f"Sort {'down' if down else 'up'}"
    else:
        name = rng.choice(tuple(CATEGORIES))
        size = rng.randint(4, 7)
        kept = rng.sample(CATEGORIES[name], rng.randint(1, min(4, size - 1)))
        rest = [w for w in words if w not in CATEGORIES[name]]
        items = kept + rng.sample(rest, size - len(kept))
        rng.shuffle(items)
        result, order = [w for w in items if w in kept], f"Keep the {name}"
    lead = Pick(((0.7, ""), (0.2, " The list:"), (0.1, " Answer:")))
    answer = (lead, " " + ", ".join(result) + ".")
    prompt = f"{order}: {', '.join(items)}."
    return _problem("list", kind, len(items), prompt, answer, rng)


def _choose(rng: random.Random) -> Problem:
    items = rng.sample(ANIMALS, rng.choices((3, 4, 5), (1, 2, 2))[0])
    branches: list[tuple[float, Node]] = []
    for chosen in items:
        marks = ",".join(f" {item} {'yes' if item == chosen else 'no'}" for item in items)
        branches.append((1.0, (marks + ".", maybe(0.25, " So"), f" I take the {chosen}.")))
    prompt = f"Choose one: {', '.join(items)}."
    return _problem("list", "choose", len(items), prompt, Pick(tuple(branches)), rng)


def story(rng: random.Random) -> Problem:
    """A story that keeps the facts of the prompt and its own earlier choices."""
    return _race(rng) if rng.random() < 0.3 else _tale(rng)


def _tale(rng: random.Random) -> Problem:
    name, animal = rng.choice(NAMES), rng.choice(ANIMALS)
    color, thing, place = rng.choice(COLORS), rng.choice(THINGS), rng.choice(PLACES)
    upper, his = ("He", "his") if name in HE else ("She", "her")
    adjective = pick("adjective", small=0.6, old=0.2, funny=0.2)
    answer: Node = (
        Pick(((0.75, " One day"), (0.25, " Today"))),
        f" {name}", pick(went=0.8, walked=0.2), f" to the {place} with a {color} {thing}.",
        f" {upper}", pick(saw=0.75, met=0.25), " a", adjective, f" {animal}",
        pick(near=0.8, behind=0.2), " the", pick("spot", tree=0.6, river=0.2, gate=0.2), ".",
        maybe(0.75, (" The", Ref("adjective"), f" {animal} wanted the {color} {thing}.")),
        maybe(0.25, (f" {name} sat by the", Ref("spot"),
                     ".")),
        Pick((
            (0.8, (" They", pick(played=0.75, sang=0.25), " until",
                   pick("hour", noon=0.6, sunset=0.2, night=0.2), ". At", Ref("hour"),
                   f" {name}", pick(went=0.8, walked=0.2), " home.")),
            (0.2, f" Then {name} went home."),
        )),
        maybe(0.3, (f" {upper} told {his}", pick(mother=0.6, father=0.2, sister=0.2),
                    " about the", Ref("adjective"), f" {animal}.")),
        " The end.",
    )  # fmt: skip
    prompt = f"Write a story: {name}, a {animal}, a {color} {thing}, the {place}."
    return _problem("story", "tale", 1, prompt, answer, rng)


def _race(rng: random.Random) -> Problem:
    runners = rng.sample(NAMES, rng.choices((3, 4, 5), (1, 2, 2))[0])
    color, thing = rng.choice(COLORS), rng.choice(THINGS)
    branches: list[tuple[float, Node]] = []
    for winner in runners:
        results = ",".join(f" {n} {'won' if n == winner else 'lost'}" for n in runners)
        branches.append((1.0, (
            results + ".", pick(So=0.8, Then=0.2), f" {winner}", pick(got=0.75, took=0.25),
            f" the {color} {thing}.",
            maybe(0.25, f" {winner} was happy."),
            " They all went", pick(home=0.8, inside=0.2), ". The end.",
        )))  # fmt: skip
    prompt = f"Write a story: {', '.join(runners)} race for a {color} {thing}. One wins."
    return _problem("story", "race", len(runners), prompt, Pick(tuple(branches)), rng)


def arithmetic(rng: random.Random) -> Problem:
    """A word problem answered equation by equation; each result feeds the next one."""
    name, things = rng.choice(NAMES), rng.choice(COUNTED)
    pronoun = "He" if name in HE else "She"
    steps = rng.choices((1, 2, 3, 4), (2, 3, 3, 2))[0]
    value = rng.randint(2, 12)
    prompt = f"{name} has {value} {things}."
    answer: tuple[Node, ...] = ()
    for _ in range(steps):
        operation = rng.choice(_operations(value))
        before, number = value, rng.randint(1, 9)
        tail = maybe(0.2, " now")
        if operation == "+":
            number = min(number, MAX_VALUE - value)
            value += number
            verb = rng.choice(("buys", "finds"))
        elif operation == "-":
            number = min(number, value - 1)
            value -= number
            verb = rng.choice(("loses", "sells"))
            tail = maybe(0.2, " left")
        else:
            number, value, verb = 2, value * 2, "doubles"
        prompt += f" {pronoun} {verb} {'them' if operation == '*' else number}."
        lead = Pick(((0.8, ""), (0.13, " Now"), (0.07, " Then")))
        answer += (lead, f" {before}{operation}{number}={value}", tail, ".")
    answer += (maybe(0.25, " So"), f" {name} has {value} {things}.")
    prompt += f" How many {things}?"
    return _problem("arithmetic", "steps", steps, prompt, answer, rng)


def _operations(value: int) -> str:
    """Operations that keep the value between 1 and MAX_VALUE."""
    allowed = "+" if value < MAX_VALUE else ""
    allowed += "-" if value > 1 else ""
    return allowed + ("*" if 2 * value <= MAX_VALUE else "")


TASKS: dict[str, Callable[[random.Random], Problem]] = {
    "lookup": lookup,
    "list": lists,
    "story": story,
    "arithmetic": arithmetic,
}

MIX = {"lookup": 0.26, "list": 0.12, "story": 0.40, "arithmetic": 0.22}
"""Shares of the tasks in the mix that every quality figure of the project is measured on."""


def sample(
    rng: random.Random, shares: dict[str, float] | None = None, evaluation: bool = False
) -> Problem:
    """A problem of the mix, from the training side of the split or from the held-out one."""
    weights = MIX if shares is None else shares
    task = rng.choices(tuple(weights), tuple(weights.values()))[0]
    while True:  # rejecting by prompt within the task keeps the shares as they are
        problem = TASKS[task](rng)
        if held_out(problem.prompt) == evaluation:
            return problem


def words() -> list[str]:
    """Every word and mark of the closed world as it is tokenised (words with their space)."""
    found: set[str] = set()
    rng = random.Random(0)
    for _ in range(4000):
        problem = sample(rng)
        text = f" {problem.prompt} {problem.response}"
        found.update(re.findall(r" ?[A-Za-z]+| ?\d| ?[^\sA-Za-z\d]", text))
    return sorted(found)

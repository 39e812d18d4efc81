"""``docs/vocabulary.md`` is what the code and the documents say: one word for one thing."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from support.prose import prose

ROOT = Path(__file__).parents[2]
VOCABULARY = ROOT / "docs" / "vocabulary.md"
PACKAGE = ROOT / "src" / "stepserve"
RECORDS = {"CHANGELOG.md", "experiment-log.md", VOCABULARY.name}


def rows(text, columns):
    """Rows of the tables with so many columns, without the tables' heads."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == columns and cells[0] not in ("word", "not said"):
            yield cells


def listed(cells):
    return [word.strip().strip('`"') for cell in cells for word in cell.split(",") if word.strip()]


def twice(names):
    return sorted({name for name in names if names.count(name) > 1})


def identifiers(text):
    """Names that a program defines: classes, functions, parameters, variables, attributes."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def in_words(name):
    """``InstanceLost`` and ``_instance_lost`` as "instance lost"."""
    return " ".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)).lower()


def says(text, word):
    """Whether the text has the word or its plural; names that appear in it are whole words."""
    stem = re.sub(r"[- ]", r"[-\\s]", re.escape(word.removesuffix("y")).replace("\\", ""))
    ending = "(?:y|ies)" if word.endswith("y") else "s?"
    case = re.IGNORECASE if word.islower() else 0
    return re.search(rf"(?<![\w-]){stem}{ending}(?![\w-])", text, case) is not None


def without(text, phrases):
    for phrase in phrases:
        text = re.sub(re.escape(phrase).replace(r"\ ", r"\s+"), " ", text, flags=re.IGNORECASE)
    return text


@cache
def sources():
    """Path, prose and names of every program of the package."""
    return [
        (path, prose(path), sorted(set(identifiers(path.read_text()))))
        for path in sorted(PACKAGE.rglob("*.py"))
    ]


TEXT = VOCABULARY.read_text()
TERMS = list(rows(TEXT, 4))
REFUSED = listed(cells[2] for cells in TERMS)
EXCEPTIONS = {cells[0]: listed([cells[1]]) for cells in rows(TEXT, 3)}


def test_nothing_is_defined_twice():
    said, names = [cells[0] for cells in TERMS], listed(cells[3] for cells in TERMS)
    assert len(TERMS) > 50
    assert not twice(said)
    assert not twice(REFUSED)
    assert not twice(names), "a name stands for two things"
    assert not set(said) & set(REFUSED)


def test_names_of_the_table_exist():
    known = {name for _, _, names in sources() for name in names}
    known |= {path.stem for path, _, _ in sources()}
    missing = [name for name in listed(cells[3] for cells in TERMS) if name not in known]
    assert not missing


def test_exceptions_are_of_words_that_are_not_said_and_have_reasons():
    assert set(EXCEPTIONS) <= set(REFUSED)
    assert all(all(cells) for cells in rows(TEXT, 3))


@pytest.mark.parametrize("word", REFUSED)
def test_what_is_not_said_stands_nowhere(word):
    allowed = EXCEPTIONS.get(word, [])
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    texts = [(p, without(prose(p), allowed)) for p in documents if p.name not in RECORDS]
    for path, text, names in sources():
        spoken = [in_words(name) for name in names if name not in allowed]
        texts.append((path, "\n".join([without(text, allowed), *spoken])))
    for path, text in texts:
        if not any(place in path.as_posix() for place in allowed):
            assert not says(text, word), f"{path.relative_to(ROOT)} says {word!r}"


def test_words_are_found():
    assert says("Stories are told", "story")
    assert says("it makes\nway for others", "makes way")
    assert says(in_words("_ResidentRequest"), "resident")
    assert not says("a presidential history", "resident")
    assert not says(without("a block-causal\nmodel", ["block-causal"]), "causal")
    assert says(without("causal models", ["block-causal"]), "causal")


def test_names_are_found():
    program = "class Door:\n    def knock(self, loud):\n        self.story = tick = 1\n"
    assert set(identifiers(program)) == {"Door", "knock", "self", "loud", "story", "tick"}
    assert in_words("_HTTPHeader") == "http header"


def test_tables_are_read():
    text = "| word | means | not said | in code |\n|---|---|---|---|\n| a | b | c, d | `E` |\n"
    assert list(rows(text, 4)) == [["a", "b", "c, d", "`E`"]]
    assert listed(["c, d", "`E`"]) == ["c", "d", "E"]
    assert twice(["a", "b", "a"]) == ["a"]

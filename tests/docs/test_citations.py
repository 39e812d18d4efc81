"""Citations of the two papers (``DiLaServe B6``, ``DynaServe 3.7``) lead to ``docs/papers.md``."""

import re
from functools import cache
from pathlib import Path

import pytest

from support.prose import prose

ROOT = Path(__file__).parents[2]
PAPERS = ROOT / "docs" / "papers.md"
FOLDERS = ("src", "tests", "tools", "benchmarks", "experiments", "examples", "docs")
KINDS = (".py", ".md", ".toml", ".json")

CITATION = re.compile(r"\b(DiLaServe|DynaServe) ([A-E]?\d+(?:\.\d+)*)")
ID = r"(?:[A-E]\d{1,2}(?:\.\d)?|[1-3]\.\d{1,2}(?:\.\d)?)"
BARE = re.compile(
    rf"(?<!DiLaServe )(?<![\w.])([A-E]\d{{1,2}}(?:\.\d)?)\b|[(](?:see )?({ID})[,;:)]"
    rf"|\b(?:of|[Ss]ections?|[Ff]inding) ({ID})(?![\w%]| \w)"
    rf"|D(?:ynaServe|iLaServe) {ID}(?:,| and|, and| to) ({ID})\b"
    r"|\b(Part [A-E])\b|(?<!DynaServe )\b(3\.10\.\d)\b"
)
DOCUMENT = re.compile(r"(?<![\w*.{}/-])[\w./-]*\w\.md\b")


def citations(text):
    """(paper, id) of every citation, also those that a line break divides."""
    return CITATION.findall(re.sub(r"\s*\n[\s#]*", " ", text))


def bare(text, known):
    """Known ids without their paper, and the numbered parts of documents that nobody has."""
    found = {match.group(match.lastindex) for match in BARE.finditer(text)}
    return {name for name in found if name in known or name.startswith("Part ")}


def documents(text):
    return set(DOCUMENT.findall(text))


def entries(text):
    return re.findall(r"^### (DiLaServe|DynaServe) ([A-E]?\d[\d.]*):", text, flags=re.MULTILINE)


@cache
def files():
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    own = {PAPERS, Path(__file__)}
    return [p for p in sorted([*found, *ROOT.glob("*.md")]) if p.suffix in KINDS and p not in own]


@cache
def cited():
    return {name for path in files() for name in citations(path.read_text())}


@cache
def known():
    return set(entries(PAPERS.read_text()))


def test_every_citation_leads_to_an_entry():
    for path in files():
        missing = set(citations(path.read_text())) - known()
        assert not missing, f"{path.relative_to(ROOT)} cites {sorted(missing)}"


def test_every_entry_is_cited_once_there_and_names_its_source():
    text = PAPERS.read_text()
    assert len(entries(text)) == len(known())
    assert known() == cited(), "nothing cites it"
    parts = re.split(r"^##+ ", text, flags=re.MULTILINE)
    facts = [part for part in parts if re.match("(DiLaServe|DynaServe) [^:]", part)]
    assert len(facts) == len(known())
    assert all("\n*Source: " in part for part in facts)


def test_no_id_stands_without_its_paper():
    ids = {name for _, name in known()}
    for path in files():
        if path.suffix != ".json":
            found = bare(prose(path), ids)
            assert not found, f"{path.relative_to(ROOT)}: {sorted(found)}"


def test_documents_that_are_named_exist():
    names = {path.name for path in files()} | {PAPERS.name}
    for path in files():
        for document in documents(prose(path)):
            exists = (ROOT / document).exists() or (path.parent / document).exists()
            assert exists or document in names, f"{path.relative_to(ROOT)} names {document}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("See DiLaServe B6, DiLaServe C9.5.", [("DiLaServe", "B6"), ("DiLaServe", "C9.5")]),
        ("DynaServe\n    # 3.10.5: a metric", [("DynaServe", "3.10.5")]),
        ("DiLaServe's planner, DynaServe and 3.7", []),
    ],
)
def test_citations_are_found(text, found):
    assert citations(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Caps (B6) and C9.5.", {"B6", "C9.5"}),
        ("T2 of 3.5; pushed (3.7), see 3.10.5", {"3.5", "3.7", "3.10.5"}),
        ("ours, Part E 2", {"Part E"}),
        ("DynaServe 3.5, 3.7; DiLaServe B6 and C9.5", {"3.7", "C9.5"}),
        ("DiLaServe B6, DynaServe 3.7 and (DynaServe 3.5)", set()),
        ("an A100 of 3.5 GB at (3.7 %), B7 unknown here", set()),
    ],
)
def test_bare_ids_are_found(text, found):
    assert bare(text, {"B6", "C9.5", "3.5", "3.7", "3.10.5"}) == found


def test_documents_are_found():
    assert documents("as notes.md 3.5 and docs/api.md say, not *.md") == {"notes.md", "docs/api.md"}

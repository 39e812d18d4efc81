"""What the documents refer to exists: files, modules, other documents and their sections."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "src" / "stepserve"
PARTS = "core|control|policies|families|planning|cost|engine|gateway|metrics|sim|live|cli"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]

documents = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


@documents
def test_files_exist(document):
    for path in re.findall(
        r"`((?:tests|docs|benchmarks|src|tools)/[\w./-]+)`", document.read_text()
    ):
        assert (ROOT / path).exists(), path


@documents
def test_modules_exist(document):
    for path in re.findall(rf"`((?:{PARTS})/[\w./]+)`", document.read_text()):
        assert (SOURCE / path).exists() or (SOURCE / f"{path}.py").exists(), path


@documents
def test_links_lead_to_documents_and_sections(document):
    for target in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        path, _, section = target.partition("#")
        if "://" in path:
            continue
        linked = (document.parent / path).resolve() if path else document
        assert linked.exists(), target
        assert not section or section in anchors(linked.read_text()), target


def anchors(text):
    """Of headings, as GitHub makes them: lower case, hyphens for blanks, no other signs."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}

"""The reader's path through the code leads to things that exist."""

import importlib
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "docs" / "life-of-a-request.md").read_text()
STOPS = re.split(r"^## \d\. ", TEXT, flags=re.MULTILINE)[1:]


def test_there_are_nine_stops():
    assert len(STOPS) == 9


def test_every_stop_names_a_symbol_and_a_test_that_exist():
    for stop in STOPS:
        module, path = re.search(r"`(stepserve[\w.]*):([\w.]+)`", stop).groups()
        found = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
        assert found.__doc__, f"{module}:{path} says what it does"
        test = ROOT / re.search(r"^Test: `(.+)`$", stop, flags=re.MULTILINE).group(1)
        assert "def test_" in test.read_text()


def test_files_named_in_the_documents_exist():
    for document in [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *(ROOT / "docs").rglob("*.md")]:
        for path in re.findall(
            r"`((?:tests|docs|benchmarks|src|tools)/[\w./-]+)`", document.read_text()
        ):
            assert (ROOT / path).exists(), f"{document.name} names {path}"

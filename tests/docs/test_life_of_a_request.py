"""The reader's path through the code leads to things that exist."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "docs" / "life-of-a-request.md").read_text()
STOPS = re.split(r"^## \d\. ", TEXT, flags=re.MULTILINE)[1:]
SYMBOL, TEST = r"`(stepserve[\w.]*):([\w.]+)`", r"^Test(?: of it)?: `(.+)`$"


def test_there_are_nine_stops():
    assert len(STOPS) == 9


@pytest.mark.parametrize("stop", STOPS, ids=[stop.splitlines()[0] for stop in STOPS])
def test_every_stop_names_a_symbol_and_a_test_for_each_family(stop):
    for text in stop.split("\n## ")[0].split("**Autoregressive.**", 1):
        assert re.search(SYMBOL, text)
        (test,) = re.findall(TEST, text, flags=re.MULTILINE)
        assert "def test_" in (ROOT / test).read_text()
    assert "**Autoregressive.**" in stop


@pytest.mark.parametrize(("module", "path"), re.findall(SYMBOL, TEXT))
def test_symbols_exist_and_say_what_they_do(module, path):
    found = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    assert found.__doc__


@pytest.mark.parametrize("column", [0, 1], ids=["A", "B"])
def test_the_numbers_of_the_autoregressive_requests_belong_together(column):
    """They were read off a run; this holds whatever the run."""
    rows = re.findall(r"^\| (.+?) \| (\d[\d, ]*) \| (\d[\d, ]*) \|$", TEXT, flags=re.MULTILINE)
    prompt, output, cut, emitted, pages, pushed, settled = (
        [int(number) for number in columns[column].split(",")] for _, *columns in rows
    )
    (prompt,), (output,), (cut,) = prompt, output, cut
    assert (cut < prompt) is (column == 0)
    assert emitted == [max(0, cut - prompt + 1)]
    assert pages == [-(-cut // 16), -(-(prompt + output) // 16)]
    assert sum(pushed) == cut
    assert settled == [prompt + output - 1]
    assert f"`s={cut} of {prompt + output}, " in TEXT

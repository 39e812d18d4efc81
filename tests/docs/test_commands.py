"""Every command that the documents tell the reader to type is one that the parsers accept."""

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest

from stepserve.cli import main as cli

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "experiments/**/*.md")
    for path in (*ROOT.glob(pattern), *ROOT.glob(f"benchmarks/{pattern}"))
]
START = re.compile(r"(?:[\w./]*/)?(?:stepserve|python3?) ")
END = re.compile(r" +#.*$| *(?:&&|\|\|?|;|>|&).*$| \.\.\.$")
NOT_OURS = ("build/venv/", "python -m venv", "python -m pip", "python -c")


def commands(text):
    """Lines of code blocks, fenced or indented by four, that begin with one of our commands."""
    fenced = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, flags=re.M | re.S))
    indented = "\n".join(re.findall(r"^ {4}(.+)", text, flags=re.M))
    for line in f"{fenced}\n{indented}".replace("\\\n", " ").splitlines():
        line = re.sub(r"^(?:\$ |>>> )", "", line.strip())
        line = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line)
        if START.match(line) and not line.startswith(NOT_OURS):
            yield END.sub("", line)


FOUND = sorted(
    {(str(path.relative_to(ROOT)), c) for path in DOCUMENTS for c in commands(path.read_text())}
)


def test_there_are_commands_to_check():
    assert len(FOUND) > 40
    assert {"README.md", "docs/operations.md"} <= {document for document, _ in FOUND}


@pytest.mark.parametrize(("document", "command"), FOUND)
def test_the_parsers_accept(document, command, monkeypatch):
    program, *words = shlex.split(command)
    if Path(program).name.startswith("python"):
        script, *words = words
        if script != "-m":
            accept_script(script, words, monkeypatch)
            return
        module, *words = words
        if module not in ("stepserve", "stepserve.cli.main"):
            assert importlib.util.find_spec(module), f"{module} is named in {document}"
            return
    name = next(word for word in words if not word.startswith("-"))
    cli._parser(name).parse_args(words)


class ParsedError(Exception):
    """The arguments were parsed: no more is run."""


def accept_script(script, words, monkeypatch):
    """Run a script as far as its parser, which is the first thing that ``main`` calls."""
    path = ROOT / script
    assert path.is_file(), script
    if "argparse" not in path.read_text():
        assert not words
        return
    monkeypatch.syspath_prepend(str(path.parent))
    monkeypatch.setattr(sys, "argv", [script, *words])
    spec = importlib.util.spec_from_file_location(f"documented_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    parser = module.argparse.ArgumentParser
    parse = parser.parse_known_args

    def parsed(self, args=None, namespace=None):
        parse(self, args, namespace)
        raise ParsedError

    monkeypatch.setattr(parser, "parse_known_args", parsed)
    with pytest.raises(ParsedError):
        module.main(*([words] if script == "benchmarks/gpu/run.py" else []))

import subprocess
import sys
import types

import pytest

from stepserve import __version__
from stepserve.cli import main as cli
from stepserve.core.errors import FieldError


def command(monkeypatch, run):
    """A command that stands in for the real one."""
    module = types.SimpleNamespace(
        add_parser=lambda subparsers: subparsers.add_parser("serve").add_argument("--n", type=int),
        run=run,
    )
    monkeypatch.setattr(cli, "_module", lambda name: module)


def test_help_lists_every_command_and_imports_none():
    code = (
        "import sys\nfrom stepserve.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "loaded = {m for m in sys.modules if m.startswith('stepserve.cli.')}\n"
        "assert loaded == {'stepserve.cli.main'}, loaded\n"
        "assert not {'torch', 'numpy', 'httpx'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name in cli.COMMANDS:
        assert name in done.stdout


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"stepserve {__version__}\n"


@pytest.mark.parametrize("words", [[], ["brew"], ["serve", "--nonsense"]])
def test_a_wrong_call_exits_with_2(monkeypatch, capsys, words):
    command(monkeypatch, lambda args: 0)
    with pytest.raises(SystemExit, match="2"):
        cli.main(words)


def test_a_command_gets_its_arguments_and_gives_the_status(monkeypatch):
    command(monkeypatch, lambda args: args.n)
    assert cli.main(["serve", "--n", "7"]) == 7


def test_errors_on_purpose_are_one_line(monkeypatch, capsys):
    def run(args):
        raise FieldError("control.margin", "must be positive")

    command(monkeypatch, run)
    assert cli.main(["serve"]) == 1
    assert capsys.readouterr().err == "stepserve serve: control.margin: must be positive\n"


def test_an_interrupt_is_quiet(monkeypatch, capsys):
    def run(args):
        raise KeyboardInterrupt

    command(monkeypatch, run)
    assert cli.main(["serve"]) == 130
    assert capsys.readouterr().err == ""


def test_a_missing_package_is_named(monkeypatch, capsys):
    def missing(name):
        raise ModuleNotFoundError("no torch", name="torch")

    monkeypatch.setattr(cli.importlib, "import_module", missing)
    assert cli.main(["serve"]) == 1
    assert "needs the package 'torch'" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error():
    code = (
        "import types\nfrom stepserve.cli import main as cli\n"
        "def run(args):\n    for n in range(100_000): print(n)\n    return 0\n"
        "add = lambda subparsers: subparsers.add_parser('trace')\n"
        "cli._module = lambda name: types.SimpleNamespace(add_parser=add, run=run)\n"
        "raise SystemExit(cli.main(['trace']))\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe) as process:
        assert process.stdout.readline() == b"0\n"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141

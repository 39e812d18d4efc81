import os
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import pytest

from stepserve import __version__
from stepserve.cli import main as cli
from stepserve.core.errors import FieldError, StepserveError


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


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (FieldError("control.margin", "must be positive"), 2),
        (StepserveError("the server does not answer"), 1),
    ],
)
def test_errors_on_purpose_are_one_line(monkeypatch, capsys, error, status):
    def run(args):
        raise error

    command(monkeypatch, run)
    assert cli.main(["serve"]) == status
    assert capsys.readouterr().err == f"stepserve serve: {error}\n"


def test_an_interrupt_is_quiet(monkeypatch, capsys):
    def run(args):
        raise KeyboardInterrupt

    command(monkeypatch, run)
    assert cli.main(["serve"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "package", "extra"),
    [
        ("serve --port 0", "torch", "engine"),
        ("profile", "torch", "engine"),
        ("fit bundled-model --out out", "torch", "engine"),
        ("fit step-log --out out/log.csv", "torch", "engine"),
        ("serve --port 0", "safetensors", "engine"),
        ("serve --port 0 --model organisation/name", "huggingface_hub", "engine"),
        ("serve --port 0 --cluster ray", "ray", "ray"),
        ("--print-completion bash", "shtab", "completion"),
    ],
)
def test_a_missing_package_is_one_line_with_the_extra_that_brings_it(
    tmp_path, words, package, extra
):
    done = without(package, words.split(), tmp_path)
    assert done.returncode == 1
    name = "" if words.startswith("-") else f" {words.split()[0]}"
    wanted = f"stepserve{name}: needs {package}: pip install 'stepserve[{extra}]'\n"
    assert (done.stdout, done.stderr) == ("", wanted)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [*cli.COMMANDS, ""])
def test_without_extras_every_command_has_its_help(tmp_path, name):
    done = without("torch", [*name.split(), "--help"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def without(package, words, folder):
    """The command where a package is not installed, for all of its processes."""
    fails = f"raise ModuleNotFoundError(\"No module named '{package}'\", name={package!r})\n"
    with tempfile.TemporaryDirectory() as missing:
        Path(missing, f"{package}.py").write_text(fails)
        path = os.pathsep.join([missing, *filter(None, [os.environ.get("PYTHONPATH")])])
        return subprocess.run(
            [sys.executable, "-m", "stepserve", *words],
            capture_output=True,
            text=True,
            cwd=folder,
            timeout=120,
            env=os.environ | {"PYTHONPATH": path},
        )


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["srve"], "serve"),
        (["bench", "--dedline-ms", "5"], "--deadline-ms"),
        (["bench", "--datset=random"], "--dataset"),
        (["--print-completion", "bach"], "bash"),
        (["fit", "predicter"], "predictor"),
        (["fit", "predictor", "--log", "a", "--out", "b", "--sead", "1"], "--seed"),
    ],
)
def test_the_nearest_word_to_a_wrong_one_is_named(capsys, words, wanted):
    with pytest.raises(SystemExit, match="2"):
        cli.main(words)
    assert capsys.readouterr().err.endswith(f" (did you mean {wanted}?)\n")


def test_nothing_is_proposed_for_what_is_near_nothing(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", "--xyz"])
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "completions"),
    [
        (["ser"], ["serve"]),
        (["serve", "--inst"], ["--instances"]),
        (["fit", "pre"], ["predictor"]),
        (["fit", "predictor", "--lo"], ["--log"]),
    ],
)
def test_a_shell_completes_commands_and_options(completion, typed, completions):
    line = " ".join(["stepserve", *typed])
    code = (
        f"source {completion}\nCOMP_WORDS=({line}) COMP_CWORD={len(typed)} COMP_LINE='{line}'\n"
        "_shtab_stepserve stepserve\necho ${COMPREPLY[@]}"
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == completions


@pytest.fixture(scope="module")
def completion(tmp_path_factory):
    call = [sys.executable, "-m", "stepserve", "--print-completion", "bash"]
    path = tmp_path_factory.mktemp("completion") / "stepserve.bash"
    path.write_text(subprocess.run(call, capture_output=True, text=True, check=True).stdout)
    return path


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

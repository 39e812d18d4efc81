"""Every script beside the package runs to its end, in a short form, and says what it found."""

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

RUNS = {
    "benchmarks/engine.py": (
        "--problems 1 --concurrent 1 --max-tokens 16 --repeats 1",
        "executor, 1 at a time, dual cache",
    ),
    "benchmarks/gateway.py": ("--requests 1 --world instant", "instant, concurrency 1, stream"),
    "benchmarks/layout_change.py": (
        "--seconds 0.2 --repetitions 1 --concurrent 1 --share 1",
        "tokens lost 0, repeated 0",
    ),
    "benchmarks/scheduler.py": ("--batches 5 --places 10", "256 instances x 60 held"),
    "benchmarks/simulator.py": ("--requests 20 --train 50", "cost per request"),
    "benchmarks/transport.py": ("--rounds 1 --requests 2 --messages 2", "first token later by"),
    "tools/chaos.py": ("--seconds 1 --every 1 --rate 2 --family diffusion", "nothing is left"),
    "tools/compile.py": ("{folder} --only core/segment", ""),
    "tools/config_reference.py": ("--check", "is what the code says"),
    "tools/demonstrate.py": ("dilaserve --short", "all answered, all replayed"),
    "tools/fuzz_simulations.py": ("--seeds 2", "2 of 2 worlds passed"),
    "tools/random_checkpoint.py": ("{folder} --layers 1 --hidden 64", "parameters in"),
    "tools/size_report.py": ("", "core + control"),
}
"""By script: short options, and what is printed at the end."""

PROCESSES = ("benchmarks/gateway.py", "benchmarks/transport.py", "tools/demonstrate.py")
"""They start others; the rest runs in this process, where torch is loaded."""

ELSEWHERE = {
    "benchmarks/gpu/run.py": "tests/engine_cpu/test_gpu_benchmark.py runs it",
    "benchmarks/gpu/shapes.py": "a part of it",
    "tools/same_rows.py": "tests/tools/test_same_rows.py runs it",
    "tools/smollm2.py": "needs packages that nothing else here does",
}


def test_every_script_has_a_short_run():
    found = {
        str(path.relative_to(ROOT))
        for folder in ("benchmarks", "tools")  # examples: tests/examples
        for path in (ROOT / folder).rglob("*.py")
    }
    assert found == {*RUNS, *ELSEWHERE}


@pytest.mark.parametrize("script", RUNS)
def test_a_short_run_ends_well(script, tmp_path, monkeypatch, capfd):
    if script == "tools/compile.py" and not compiler():
        pytest.skip("needs a C compiler and the headers of Python")
    options, said = RUNS[script]
    words = options.format(folder=tmp_path).split()
    monkeypatch.chdir(ROOT)
    if script in PROCESSES:
        done = subprocess.run([sys.executable, script, *words], check=False)
        status = done.returncode
    else:
        status = run_here(ROOT / script, words, monkeypatch)
    out, err = capfd.readouterr()
    assert not status, out + err
    assert said in out


def run_here(path, words, monkeypatch):
    """Its ``main``, as when it is called from the command line."""
    monkeypatch.syspath_prepend(str(path.parent))
    monkeypatch.setattr(sys, "argv", [str(path), *words])
    spec = importlib.util.spec_from_file_location(f"short_run_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module.main()


def compiler():
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return headers.exists() and any(map(shutil.which, ("cc", "gcc", "clang")))

"""The scripts of experiments/ run to their end, in a short form."""

import sys
from pathlib import Path

import plot
import pytest
import tables
from lib.results import ROOT, read

from stepserve.cli.main import main

sys.path.insert(0, str(ROOT / "calibration"))
import baseline_world
import confidence
import fit
import fit_a100
import fit_lengths


def test_figures_are_written_beside_the_results(row, save, tmp_path, monkeypatch, capsys):
    save("migration/migration", [row("infaas", 1.0, latency_mean_s=2.0, latency_p99_s=3.0)])
    words = ["plot.py", "migration", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    plot.main()
    assert capsys.readouterr().out.strip() == str(tmp_path / "migration" / "migration")
    for kind in ("png", "svg"):
        assert (tmp_path / "migration" / f"migration.{kind}").stat().st_size > 1000


def test_what_the_simulator_writes_is_read(tmp_path, capsys):
    config = ROOT / "smoke" / "smoke.toml"
    out = tmp_path / "out"
    assert main(["simulate", str(config), "--quick", "--jobs", "1", "--out", str(out)]) == 0
    capsys.readouterr()
    (tmp_path / "smoke").mkdir()
    (out / "results.json").rename(tmp_path / "smoke" / "smoke.json")
    rows, committed = (read(name, root).rows.all for name, root in (
        ("smoke/smoke", tmp_path), ("bundled/bundled", ROOT)
    ))  # fmt: skip
    assert set(rows[0]) == set(committed[0])
    assert any(
        line.startswith("| gsm8k | 3 | 3 | stepserve |") for line in tables.everything(tmp_path)
    )


def test_a_folder_without_figures_is_named(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plot.py", "headlin"])
    with pytest.raises(SystemExit):
        plot.main()
    assert "no figures in headlin" in capsys.readouterr().err


def test_tables_of_other_results_are_printed_and_not_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tables.py", "--results", str(tmp_path)])
    tables.main()
    assert "## Against the published numbers of DynaServe" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["tables.py", "--results", str(tmp_path), "--write"])
    with pytest.raises(SystemExit):
        tables.main()


@pytest.mark.parametrize("script", [fit, fit_a100, fit_lengths], ids=lambda s: s.__name__)
def test_a_fit_says_what_it_does(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", "--help"])
    with pytest.raises(SystemExit):
        script.main()
    assert "--ship" in capsys.readouterr().out


def test_the_small_world_serves_in_order_and_drops_who_waits_too_long():
    def jobs():
        return [baseline_world.Job(0.0, 4096, [2, 1]), baseline_world.Job(0.0, 8192, [1])]

    seconds = baseline_world.latencies(jobs(), lambda tokens, rows: 1.0, instances=1)
    assert seconds == [3.0, 4.0]
    impatient = baseline_world.latencies(jobs(), lambda *_: 1.0, instances=1, patience_s=0.5)
    assert impatient == [3.0, float("inf")]


def test_requests_are_logged_step_by_step(tmp_path, monkeypatch):
    monkeypatch.setattr(confidence, "REQUESTS", 2)
    path = Path(tmp_path) / "steps.csv.gz"
    confidence.log_requests(path, "gsm8k", confidence.TraceOutcomes(seed=0))
    assert len(set(confidence.read_step_logs([path]).request)) == 2


def test_every_module_is_of_a_folder_that_can_load_it():
    found = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("*/*.py")}
    loaded = {f"{p.name}/{p.name.replace('-', '_')}.py" for p in ROOT.iterdir() if p.is_dir()}
    assert {name for name in found if name.split("/")[0] not in ("lib", "calibration")} <= loaded

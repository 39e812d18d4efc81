"""Tables compare like with like and never invent a number."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "experiments"))
import readings
import tables


def row(system, rate, attainment, seed=0, **more):
    return {
        "system": system,
        "rate_per_gpu_per_s": rate,
        "slo_multiple": 5.0,
        "seed": seed,
        "attainment": attainment,
        "accuracy": 0.8,
        "model": "llada-8b",
        "dataset": "gsm8k",
        "gpus": 16,
        "requests": 10,
        **more,
    }


def save(folder, name, rows, command="stepserve simulate x"):
    (folder / name).mkdir()
    content = {"command": command, "seeds": sorted({r["seed"] for r in rows}), "rows": rows}
    (folder / name / "results.json").write_text(json.dumps(content))


def cells(lines, first):
    line = next(line for line in lines if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_capacity_is_where_the_line_between_two_loads_crosses_the_target():
    rows = [row("a", 1.0, 1.0), row("a", 2.0, 0.9, accuracy=0.7), row("a", 3.0, 0.99)]
    found = readings.capacity(rows, 0.95)
    assert found.rate == pytest.approx(1.5)
    assert found.accuracy == pytest.approx(0.75)
    assert found.exact


def test_capacity_that_was_not_reached_is_a_bound_and_one_below_all_loads_is_none():
    assert not readings.capacity([row("a", 1.0, 1.0), row("a", 2.0, 0.96)], 0.95).exact
    assert readings.capacity([row("a", 1.0, 0.94), row("a", 2.0, 1.0)], 0.95) is None


def test_headline_compares_with_dilaserve_of_the_same_seed(tmp_path):
    save(
        tmp_path,
        "headline",
        [
            row("dilaserve", 1.0, 1.0), row("dilaserve", 2.0, 0.9),
            row("dilaserve", 1.0, 1.0, seed=1), row("dilaserve", 3.0, 0.9, seed=1),
            row("stepserve", 3.0, 1.0), row("stepserve", 3.5, 0.5),
            row("stepserve", 4.0, 1.0, seed=1), row("stepserve", 4.5, 0.5, seed=1),
            row("slow", 1.0, 0.5), row("slow", 2.0, 0.4),
        ],
    )  # fmt: skip
    lines = tables.headline(tmp_path)
    ours = cells(lines, "stepserve")
    assert ours[1] == "3.55 [3.05..4.05]"
    assert ours[3] == "2.03 [2.02..2.03]x"
    assert cells(lines, "slow")[1:] == ["below 1", "-", "-"]


def test_a_published_value_that_was_not_simulated_stands_beside_a_dash(tmp_path):
    save(tmp_path, "load-llada-gsm8k", [row("infaas", 1.5, 0.9), row("infaas", 1.5, 1.0, seed=1)])
    study = tables.study_named("load-llada-gsm8k")
    line = cells(tables.details(tmp_path, study, "attainment"), "1.5")
    assert line == ["1.5", "100.0 / 95.0 [90.0..100.0] (-5.0)", "100.0 / -", "100.0 / -"]


def test_rows_of_another_deadline_are_not_compared(tmp_path):
    save(tmp_path, "load-llada-gsm8k", [row("infaas", 1.5, 0.9, slo_multiple=3.0)])
    study = tables.study_named("load-llada-gsm8k")
    assert tables.simulated(tmp_path, study, "infaas", "attainment", 1.5) is None


def test_order_counts_only_pairs_that_differ_clearly_in_the_published_run(tmp_path):
    rows = [row("infaas", 1.6875, 0.5), row("llumnix", 1.6875, 0.6), row("dilaserve", 1.6875, 0.9)]
    same = [row("infaas", 1.5, 0.1), row("llumnix", 1.5, 0.2)]  # published: all 100 %
    save(tmp_path, "load-llada-gsm8k", rows + same)
    agreed, checked, wrong = tables.order(tmp_path, tables.study_named("load-llada-gsm8k"))
    assert (agreed, checked) == (2, 3)  # published: infaas 75.4, llumnix 70.2, dilaserve 98.3
    assert "infaas against llumnix" in wrong[0]


def test_quick_results_are_named_as_such(tmp_path):
    rows = [row("infaas", 1.5, 0.9)]
    save(tmp_path, "load-llada-gsm8k", rows, command="stepserve simulate x --quick")
    assert any("Quick runs: load-llada-gsm8k" in line for line in tables.fidelity(tmp_path))


def test_without_results_nothing_but_published_numbers_and_dashes(tmp_path):
    assert set(tables.headline(tmp_path)[-1]) == set("| -")
    for study in readings.studies():
        for metric in study.metrics():
            for line in tables.details(tmp_path, study, metric)[4:-1]:
                assert all(
                    c == "-" or c.endswith(" / -") for c in cells([line], line.split()[1])[1:]
                )


def test_published_columns_have_a_value_per_load_and_shares_are_shares():
    for study in readings.studies():
        for columns in study.series.values():
            for metric, values in columns.items():
                assert len(values) == len(study.xs)
                if metric in ("attainment", "accuracy"):
                    assert all(0.0 <= value <= 1.0 for value in values)


def test_sections_replace_what_was_between_their_markers_only(tmp_path):
    marks = "a <!-- {0}: begin -->STALE<!-- {0}: end --> z\n"
    text = "".join(marks.format(name) for name in tables.SECTIONS)
    once = tables.written(text, tmp_path)
    assert "STALE" not in once
    assert once.startswith("a ")
    assert once.endswith(" z\n")
    assert tables.written(once, tmp_path) == once
    with pytest.raises(ValueError, match="headline"):
        tables.written("no markers", tmp_path)


def test_the_document_holds_the_tables_of_the_committed_results():
    text = tables.DOCUMENT.read_text()
    assert tables.written(text, tables.HERE) == text, "run experiments/tables.py --write"

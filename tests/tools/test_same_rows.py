"""``tools/same_rows.py`` sees any value that changed, and no column that was renamed or added."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "same_rows.py"

OLD = {
    "system": "infaas", "model": "llada-8b", "dataset": "gsm8k", "rate_per_gpu_per_s": 1.5,
    "slo_multiple": 5.0, "seed": 0, "attainment": 0.95, "classes": {"a": [1, 2.5]},
}  # fmt: skip
NEW = {
    "kind": "run", "system": "infaas", "model": "llada-8b", "workload": "gsm8k", "seed": 0,
    "rate_per_gpu_per_s": 1.5, "rate_per_s": 24.0, "slo_multiple": 5.0, "attainment": 0.95,
    "classes": {"a": [1, 2.5]}, "family": "diffusion", "tbt_attainment": None, "swept": {},
}  # fmt: skip
OLD_AR = {
    "kind": "capacity", "system": "colocated", "model": "qwen", "workload": "hybrid", "seed": 0,
    "rate_per_s": 8.3, "attainment": 0.99, "e2e_mean_s": 2.0, "capacity_per_s": 8.3,
}  # fmt: skip
NEW_AR = {
    "kind": "capacity", "system": "colocated", "model": "qwen", "workload": "hybrid", "seed": 0,
    "rate_per_s": 8.3, "tbt_attainment": 0.99, "attainment": 0.5, "latency_mean_s": 2.0,
    "capacity_per_s": 8.3, "family": "autoregressive", "swept": {},
}  # fmt: skip


@pytest.fixture
def same_rows(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("same_rows", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def compare(old, new, *options):
        for name, rows in (("old", old), ("new", new)):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "results.json").write_text(json.dumps({"rows": rows}))
        paths = [str(tmp_path / name) for name in ("old", "new")]
        monkeypatch.setattr(sys, "argv", ["same_rows", *paths, *options])
        return module.main()

    return compare


@pytest.mark.parametrize(("old", "new"), [(OLD, NEW), (OLD_AR, NEW_AR), (NEW, NEW)])
def test_renamed_and_added_columns_are_the_same(same_rows, old, new):
    assert same_rows([old], [new]) == 0


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (OLD, {**NEW, "attainment": 0.950001}, "attainment was 0.95, is 0.950001"),
        (OLD, {**NEW, "classes": {"a": [1, 2.6]}}, "classes was"),
        (OLD, {n: v for n, v in NEW.items() if n != "attainment"}, "attainment was 0.95, is None"),
        (OLD, {**NEW, "seed": 1}, "no such row"),
        (OLD_AR, {**NEW_AR, "latency_mean_s": 2}, "latency_mean_s was 2.0, is 2"),
        (OLD_AR, {**NEW_AR, "rate_per_s": 8.4, "capacity_per_s": 8.4}, "capacity_per_s was"),
    ],
)
def test_any_other_difference_is_told(same_rows, capsys, old, new, said):
    assert same_rows([old], [new]) == 1
    assert said in capsys.readouterr().out


def test_one_of_several_rows_of_a_sweep_is_enough_and_part_may_be_asked_for(same_rows, capsys):
    other = {**NEW, "attainment": 0.1, "swept": {"setting.degree": 2}}
    assert same_rows([OLD], [other, NEW]) == 0
    assert same_rows([OLD, {**OLD, "seed": 1}], [NEW]) == 1
    assert same_rows([OLD, {**OLD, "seed": 1}], [NEW], "--partly") == 0
    assert "1 rows" in capsys.readouterr().out.splitlines()[-1]

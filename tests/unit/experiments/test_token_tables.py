"""The table of DynaServe's published numbers judges by its bands, and never invents a number."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "experiments"))
import token_runs
import token_tables

FACTS = {fact["row"]: fact for fact in token_tables.facts()["rows"]}


def row(system, kind="run", workload="hybrid", seed=0, **more):
    return {
        "kind": kind,
        "system": system,
        "workload": workload,
        "seed": seed,
        "rate_per_s": 7.0,
        "tuned": None,
        "attainment": 0.99,
        "tbt_p99_s": 0.09,
        "goodput_tokens_per_s": 100.0,
        "mfu": [0.4, 0.4],
        "splits": {"solo": 0.5, "below": 0.25, "at": 0.25, "above": 0.0},
        **more,
    }


def capacity(system, per_s, **more):
    return row(system, "capacity", capacity_per_s=per_s, **more)


def save(folder, name, rows, command="stepserve simulate x"):
    (folder / name).mkdir()
    content = {
        "command": command,
        "seeds": sorted({r["seed"] for r in rows}),
        "rows": rows,
        "config": {
            "family": "autoregressive",
            "instances": 2,
            "system": {"dynaserve": {"control": {"tokens": {"probes": 6, "pairs": 4}}}},
        },
    }
    (folder / name / "results.json").write_text(json.dumps(content))


def ours(number, folder):
    return token_tables.MAKERS[number](folder, FACTS[number])


def three(colocated, disaggregated, dynaserve, **more):
    systems = {"colocated": colocated, "disaggregated": disaggregated, "dynaserve": dynaserve}
    return [capacity(system, per_s, **more) for system, per_s in systems.items()]


def four_workloads(folder, *gains):
    rows = [
        r
        for workload, gain in zip(token_tables.CAPACITIES, gains, strict=True)
        for r in three(2.0, 2.0, 2.0 * gain, workload=workload)
    ]
    for name in ("ar-capacity", "ar-capacity-reasoning"):
        own = [r for r in rows if token_tables.CAPACITIES[r["workload"]] == name]
        save(folder, name, own)


def test_every_published_row_has_a_judge_and_a_band():
    assert sorted(token_tables.MAKERS) == sorted(FACTS) == list(range(1, 20))
    assert all(fact["band"] and len(fact["published"]) == 3 for fact in FACTS.values())


def test_what_was_not_run_says_so_and_is_neither_in_nor_out(tmp_path):
    lines = token_tables.published_rows(tmp_path)[2:]
    assert len(lines) == 19
    assert all(line.split("|")[7].strip() == "not run" for line in lines)


def test_ratios_are_of_the_same_seed(tmp_path):
    rows = three(2.0, 4.0, 4.0) + three(4.0, 2.0, 4.0, seed=1)
    found = token_tables.ratio(rows, "dynaserve", "colocated", "capacity_per_s")
    assert found.values == (2.0, 1.0)


def test_a_baseline_that_holds_no_rate_is_beaten_without_end():
    rows = three(0.0, 1.0, 4.0)
    assert token_tables.ratio(rows, "dynaserve", "colocated", "capacity_per_s").mean == float("inf")


@pytest.mark.parametrize(
    ("gains", "inside"),
    [((3.0, 1.1, 1.1, 1.1), True), ((1.9, 1.1, 1.1, 1.1), False), ((3.0, 1.1, 0.9, 1.1), False)],
)
def test_gains_must_be_gains_everywhere_and_large_somewhere(tmp_path, gains, inside):
    four_workloads(tmp_path, *gains)
    assert ours(1, tmp_path).inside is inside


def test_the_gain_is_to_be_largest_on_azure_code(tmp_path):
    four_workloads(tmp_path, 1.2, 1.3, 1.1, 1.1)
    found = ours(3, tmp_path)
    assert not found.inside
    assert found.remark == "largest: burstgpt"


def test_two_workloads_of_four_are_not_judged(tmp_path):
    save(tmp_path, "ar-capacity", three(1.0, 1.0, 3.0, workload="azure-code"))
    for number in (1, 2, 3, 4):
        assert ours(number, tmp_path).inside is None


def test_hybrid_ratios_are_judged_not_rates(tmp_path):
    save(tmp_path, "hybrid", three(9.2, 11.8, 14.8))
    assert ours(5, tmp_path).inside
    assert ours(5, tmp_path).cells == ("9.20", "11.80", "14.80")
    assert ours(7, tmp_path).cells[:2] == ("61 %", "25 %")


def test_level_systems_are_outside_the_hybrid_band(tmp_path):
    save(tmp_path, "hybrid", three(8.0, 8.0, 8.0))
    assert ours(5, tmp_path).inside is False


def fixed(mfu, p99_s, at=1.0, **more):
    systems = ("colocated-2048", "disaggregated-1p1d", "dynaserve")
    cuts = {"solo": 1.0 - at, "below": 0.0, "at": at, "above": 0.0}
    more |= {"workload": "fixed-8192-32", "splits": cuts}
    return [
        row(s, mfu=m, tbt_p99_s=t, attainment=1.0 - t, **more)
        for s, m, t in zip(systems, mfu, p99_s, strict=True)
    ]


def test_fixed_shapes_are_judged_at_the_highest_rate_at_which_roles_are_kept(tmp_path):
    low = fixed([[0.2, 0.2], [0.2, 0.2], [0.2, 0.2]], [0.05, 0.06, 0.05], rate_per_s=0.5)
    high = fixed([[0.4, 0.4], [0.4, 0.01], [0.3, 0.3]], [0.3, 0.06, 0.09])
    over = fixed([[0.4, 0.4], [0.4, 0.2], [0.3, 0.3]], [0.3, 0.4, 0.09], 0.7, rate_per_s=9.0)
    save(tmp_path, "ar-fixed", low + high + over)
    assert ours(8, tmp_path).inside
    assert ours(8, tmp_path).cells[1] == "40.00/1.00"
    assert ours(9, tmp_path).inside
    assert ours(10, tmp_path) is None


def test_a_second_instance_that_works_is_no_imbalance(tmp_path):
    save(tmp_path, "ar-fixed", fixed([[0.4, 0.4], [0.4, 0.2], [0.3, 0.3]], [0.3, 0.06, 0.09]))
    assert ours(8, tmp_path).inside is False


def test_the_budget_is_judged_with_and_without(tmp_path):
    def rows(static):
        return [
            row("dynaserve", attainment=0.99),
            row("dynaserve-static-2048", attainment=static),
            row("dynaserve-static-512", attainment=0.99),
        ]

    save(tmp_path, "ar-budget", rows(0.5))
    assert ours(14, tmp_path).inside
    assert ours(14, tmp_path).cells[2] == "50.0 -> 99.0"
    (other := tmp_path / "other").mkdir()
    save(other, "ar-budget", rows(0.8))
    assert ours(14, other).inside is False


def test_exposed_transfer_has_to_fall_and_goodput_not_to(tmp_path):
    exposed = {"dynaserve": 0.001, "dynaserve-serial-push": 0.01}
    save(tmp_path, "ar-push", [row(s, exposed_transfer_mean_s=t) for s, t in exposed.items()])
    assert ours(15, tmp_path).inside
    assert ours(15, tmp_path).cells[2] == "-90.0 %"
    noisy = row("dynaserve-sigma100", goodput_tokens_per_s=93.0)
    save(tmp_path, "ar-noise", [row("dynaserve"), noisy])
    assert ours(16, tmp_path).inside is False
    assert ours(16, tmp_path).cells[2] == "-7.0 %"


def test_placements_are_measured_beside_the_results(tmp_path):
    save(tmp_path, "ar-overhead", [row("dynaserve", rate_per_s=10.0, e2e_mean_s=2.0)])
    assert ours(17, tmp_path) is None
    timings = [
        {"system": "dynaserve", "rate_per_s": rate, "place_us_p50": us}
        for rate, us in ((6.0, 1000.0), (10.0, 1600.0))
    ]
    timings.append({"system": "dynaserve-K1", "rate_per_s": 10.0, "place_us_p50": 300.0})
    (tmp_path / "ar-overhead" / "timing.json").write_text(json.dumps({"rows": timings}))
    assert ours(17, tmp_path).cells[2] == "1.00/1.60"
    assert ours(17, tmp_path).inside is False, "not flat"
    assert ours(18, tmp_path).remark.startswith("placing takes 0.08 %")
    assert ours(19, tmp_path).cells[2] == "6, below 50 us"
    assert ours(19, tmp_path).inside


def test_all_results_are_listed_over_seeds_and_quick_ones_named(tmp_path):
    rows = [row("dynaserve", tbt_p99_s=0.08), row("dynaserve", tbt_p99_s=0.1, seed=1)]
    save(tmp_path, "ar-noise", rows, "stepserve simulate x --quick")
    text = "\n".join(token_tables.dynaserve(tmp_path))
    assert "Quick runs: ar-noise" in text
    assert "| hybrid | 7 | dynaserve | 99.00 [99.00..99.00] | 90 [80..100] |" in text
    assert "| 40/40 | 25/25/0 |" in text


def test_a_search_that_found_no_rate_has_a_line_without_values(tmp_path):
    none = {"kind": "capacity", "system": "colocated", "workload": "hybrid", "seed": 0}
    rows = [{**none, "tuned": "colocated-256", "capacity_per_s": 0.0}, capacity("dynaserve", 2.0)]
    lines = token_runs.results_table(rows)
    assert lines[2].startswith("| hybrid | colocated (colocated-256) | 0.00 | - |")

"""Tables compare like with like and never invent a number."""

import json

import pytest
import tables
from lib import dynaserve, figures, published
from lib.results import ROOT, Rows

LOAD = "load-sweeps/llada-gsm8k"
headline = figures.module("headline")


def cells(lines, first):
    line = next(line for line in lines if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_capacity_is_where_the_line_between_two_loads_crosses_the_target(row):
    rows = [row("a", 1.0, 1.0), row("a", 2.0, 0.9, accuracy=0.7), row("a", 3.0, 0.99)]
    found = headline.capacity(Rows(tuple(rows)))
    assert found.rate == pytest.approx(1.5)
    assert found.accuracy == pytest.approx(0.75)
    assert found.exact


def test_capacity_that_was_not_reached_is_a_bound_and_one_below_all_loads_is_none(row):
    assert not headline.capacity(Rows((row("a", 1.0, 1.0), row("a", 2.0, 0.96)))).exact
    assert headline.capacity(Rows((row("a", 1.0, 0.94), row("a", 2.0, 1.0)))) is None


def test_headline_compares_with_dilaserve_of_the_same_seed(row, save, tmp_path):
    save(
        "headline/headline",
        [
            row("dilaserve", 1.0, 1.0), row("dilaserve", 2.0, 0.9),
            row("dilaserve", 1.0, 1.0, seed=1), row("dilaserve", 3.0, 0.9, seed=1),
            row("stepserve", 3.0, 1.0), row("stepserve", 3.5, 0.5),
            row("stepserve", 4.0, 1.0, seed=1), row("stepserve", 4.5, 0.5, seed=1),
            row("slow", 1.0, 0.5), row("slow", 2.0, 0.4),
        ],
    )  # fmt: skip
    lines = headline.tables(tmp_path)
    ours = cells(lines, "stepserve")
    assert ours[1] == "3.55 [3.05..4.05]"
    assert ours[3] == "2.03 [2.02..2.03]x"
    assert cells(lines, "slow")[1:] == ["below 1", "-", "-"]


def test_layouts_change_places_between_two_loads(row, save, tmp_path):
    for name, slow in (("tp1", (3.0, 3.0, 3.0)), ("tp4", (2.0, 4.0, 9.0))):
        rates = zip((0.25, 0.5, 0.75), slow, strict=True)
        save(
            f"tp-tradeoff/{name}",
            [row("infaas", r / 8, rate_per_s=r, latency_mean_s=s) for r, s in rates],
        )
    assert figures.module("tp-tradeoff").crossing(tmp_path) == "0.25 to 0.5"


def test_a_published_value_that_was_not_simulated_stands_beside_a_dash(row, save, tmp_path):
    save(LOAD, [row("infaas", 1.5, 0.9), row("infaas", 1.5, 1.0, seed=1)])
    study = published.studies()["load-llada-gsm8k"]
    line = cells(published.details(tmp_path, study, "attainment"), "1.5")
    assert line == ["1.5", "100.0 / 95.0 [90.0..100.0] (-5.0)", "100.0 / -", "100.0 / -"]


def test_rows_of_another_deadline_are_not_compared(row, save, tmp_path):
    save(LOAD, [row("infaas", 1.5, 0.9, slo_multiple=3.0)])
    assert (
        published.studies()["load-llada-gsm8k"].ours(tmp_path, "infaas", "attainment", 1.5) is None
    )


def test_order_counts_only_pairs_that_differ_clearly_in_the_published_run(row, save, tmp_path):
    rows = [row("infaas", 1.6875, 0.5), row("llumnix", 1.6875, 0.6), row("dilaserve", 1.6875, 0.9)]
    same = [row("infaas", 1.5, 0.1), row("llumnix", 1.5, 0.2)]  # published: all 100 %
    save(LOAD, rows + same)
    agreed, checked, wrong = published.order(tmp_path, published.studies()["load-llada-gsm8k"])
    assert (agreed, checked) == (2, 3)  # published: infaas 75.4, llumnix 70.2, dilaserve 98.3
    assert "infaas against llumnix" in wrong[0]


def test_claims_are_differences_in_points_and_ranges_in_percent(row, save, tmp_path):
    save(LOAD, [row("dilaserve", 1.875, 0.9), row("llumnix", 1.875, 0.4)])
    at = {("infaas", 0.75): 2, ("infaas", 1.0): 4, ("llumnix", 0.75): 1.9, ("llumnix", 1.0): 3}
    save("migration/migration", [row(s, x, latency_p99_s=v) for (s, x), v in at.items()])
    lines = published.claims(tmp_path)
    first = "dilaserve over llumnix, LLaDA-8B GSM8K at 1.875"
    assert cells(lines, first)[1:] == ["+57.1", "+50.0", "+50.0 at 1.875"]
    tail = "99th percentile of latency, migration over none"
    assert cells(lines, tail)[1:] == ["-8 to -19 %", "-5 to -25 %"]


def test_shorter_runs_are_named_as_such_and_not_compared(row, save, tmp_path):
    save(LOAD, [row("infaas", 1.5, 0.9, requests=400)], command="stepserve simulate x --quick")
    assert any("quick: too short to compare" in line for line in tables.everything(tmp_path))
    study = published.studies()["load-llada-gsm8k"]
    assert study.ours(tmp_path, "infaas", "attainment", 1.5) is None


def test_without_results_nothing_but_published_numbers_and_dashes(tmp_path):
    assert set(headline.tables(tmp_path)[-1]) == set("| -")
    for study in published.studies().values():
        for metric in study.metrics():
            for line in published.details(tmp_path, study, metric)[4:-1]:
                assert all(
                    c == "-" or c.endswith(" / -") for c in cells([line], line.split()[1])[1:]
                )


def test_published_columns_have_a_value_per_load_and_shares_are_shares():
    for study in published.studies().values():
        for columns in study.series.values():
            for metric, values in columns.items():
                assert len(values) == len(study.x)
                if metric in ("attainment", "accuracy"):
                    assert all(0.0 <= value <= 1.0 for value in values)


def test_results_are_listed_over_seeds(ar_row, save, tmp_path):
    rows = [ar_row("dynaserve", tbt_p99_s=0.08), ar_row("dynaserve", tbt_p99_s=0.1, seed=1)]
    save("ar-parts/noise", rows)
    text = "\n".join(tables.everything(tmp_path))
    assert "| hybrid | 7 | dynaserve | 99.00 [99.00..99.00] | 90 [80..100] |" in text
    assert "| 40/40 | 25/25/0 |" in text


def test_a_search_that_found_no_rate_has_a_line_without_values(ar_row):
    none = ar_row("colocated", kind="capacity", tuned="colocated-256", capacity_per_s=0.0)
    none |= {"tbt_attainment": None, "mfu": None, "splits": None}
    rows = (none, ar_row("dynaserve", kind="capacity", capacity_per_s=2.0))
    lines = tables.results_table(Rows(rows))
    assert lines[2].startswith("| hybrid | colocated (colocated-256) | 0.00 | - |")


def test_the_document_holds_the_tables_of_the_committed_results():
    text = "\n".join(tables.document(ROOT)) + "\n"
    assert tables.DOCUMENT.read_text() == text, "run experiments/tables.py --write"


# The table of DynaServe's published numbers, judged by its bands.

MODULES = {name: figures.module(name) for name in ("ar-capacity", "hybrid", "ar-fixed", "ar-parts")}
JUDGES = {number: judge for module in MODULES.values() for number, judge in module.ROWS.items()}
FACTS = dynaserve.facts()


def ours(number, folder):
    return JUDGES[number](folder, FACTS[number])


@pytest.fixture
def three(ar_row):
    """Capacities of colocation, disaggregation and DynaServe."""
    names = ("colocated", "disaggregated", "dynaserve")

    def make(*per_s, **more):
        return [
            ar_row(s, kind="capacity", capacity_per_s=v, **more)
            for s, v in zip(names, per_s, strict=True)
        ]

    return make


def test_every_published_row_has_a_judge_and_a_band():
    assert sorted(JUDGES) == sorted(FACTS) == list(range(1, 20))
    assert all(fact["band"] and len(fact["published"]) == 3 for fact in FACTS.values())


def test_what_was_not_run_says_so_and_is_neither_in_nor_out(tmp_path):
    lines = dynaserve.published_rows(tmp_path, JUDGES)[2:]
    assert len(lines) == 19
    assert all(line.split("|")[7].strip() == "not run" for line in lines)


@pytest.mark.parametrize(
    ("gains", "inside"),
    [((3.0, 1.1, 1.1, 1.1), True), ((1.9, 1.1, 1.1, 1.1), False), ((3.0, 1.1, 0.9, 1.1), False)],
)
def test_gains_must_be_gains_everywhere_and_large_somewhere(three, save, tmp_path, gains, inside):
    by_file = {}
    for (workload, name), gain in zip(
        MODULES["ar-capacity"].CAPACITIES.items(), gains, strict=True
    ):
        by_file.setdefault(name, []).extend(three(2.0, 2.0, 2.0 * gain, workload=workload))
    for name, rows in by_file.items():
        save(name, rows)
    assert ours(1, tmp_path).inside is inside
    assert ours(3, tmp_path).inside is True


def test_two_workloads_of_four_are_not_judged(three, save, tmp_path):
    save("ar-capacity/14b", three(1.0, 1.0, 3.0, workload="azure-code"))
    for number in (1, 2, 3, 4):
        assert ours(number, tmp_path).inside is None


def test_hybrid_ratios_are_judged_not_rates(three, save, tmp_path):
    save("hybrid/hybrid", three(9.2, 11.8, 14.8))
    assert ours(5, tmp_path).inside
    assert ours(5, tmp_path).cells == ("9.20", "11.80", "14.80")
    assert ours(7, tmp_path).cells[:2] == ("61 %", "25 %")


def test_level_systems_are_outside_the_hybrid_band(three, save, tmp_path):
    save("hybrid/hybrid", three(8.0, 8.0, 8.0))
    assert ours(5, tmp_path).inside is False


@pytest.fixture
def fixed(ar_row):
    """Rows of one fixed shape, a system after the other."""

    def make(mfu, p99_s, at=1.0, **more):
        cuts = {"solo": 1.0 - at, "below": 0.0, "at": at, "above": 0.0}
        more = {"workload": "fixed-8192-32", "splits": cuts, "rate_per_s": 1.0, **more}
        return [
            ar_row(s, mfu=m, tbt_p99_s=t, tbt_attainment=1.0 - t, **more)
            for s, m, t in zip(MODULES["ar-fixed"].SYSTEMS, mfu, p99_s, strict=True)
        ]

    return make


def test_fixed_shapes_are_judged_at_the_highest_rate_at_which_roles_are_kept(fixed, save, tmp_path):
    low = fixed([[0.2, 0.2], [0.2, 0.2], [0.2, 0.2]], [0.05, 0.06, 0.05], rate_per_s=0.5)
    high = fixed([[0.4, 0.4], [0.4, 0.01], [0.3, 0.3]], [0.3, 0.06, 0.09])
    over = fixed([[0.4, 0.4], [0.4, 0.2], [0.3, 0.3]], [0.3, 0.4, 0.09], 0.7, rate_per_s=9.0)
    save("ar-fixed/ar-fixed", low + high + over)
    assert ours(8, tmp_path).inside
    assert ours(8, tmp_path).cells[1] == "40.00/1.00"
    assert ours(9, tmp_path).inside
    assert ours(10, tmp_path) is None


def test_a_second_instance_that_works_is_no_imbalance(fixed, save, tmp_path):
    mfu = [[0.4, 0.4], [0.4, 0.2], [0.3, 0.3]]
    save("ar-fixed/ar-fixed", fixed(mfu, [0.3, 0.06, 0.09]))
    assert ours(8, tmp_path).inside is False


@pytest.mark.parametrize(("static", "inside"), [(0.5, True), (0.8, False)])
def test_the_budget_is_judged_with_and_without(ar_row, save, tmp_path, static, inside):
    met = {"dynaserve": 0.99, "dynaserve-static-2048": static, "dynaserve-static-512": 0.99}
    save("ar-parts/budget", [ar_row(system, tbt_attainment=share) for system, share in met.items()])
    assert ours(14, tmp_path).inside is inside
    assert ours(14, tmp_path).cells[2] == f"{100 * static:.1f} -> 99.0"


def test_exposed_transfer_has_to_fall_and_goodput_not_to(ar_row, save, tmp_path):
    exposed = {"dynaserve": 0.001, "dynaserve-serial-push": 0.01}
    save("ar-parts/push", [ar_row(s, exposed_transfer_mean_s=t) for s, t in exposed.items()])
    assert ours(15, tmp_path).inside
    assert ours(15, tmp_path).cells[2] == "-90.0 %"
    noisy = ar_row("dynaserve-sigma100", goodput_tokens_per_s=93.0)
    save("ar-parts/noise", [ar_row("dynaserve"), noisy])
    assert ours(16, tmp_path).inside is False
    assert ours(16, tmp_path).cells[2] == "-7.0 %"


def test_placements_are_measured_beside_the_results(ar_row, save, tmp_path):
    save("ar-parts/overhead", [ar_row("dynaserve", rate_per_s=10.0, latency_mean_s=2.0)])
    assert ours(17, tmp_path) is None
    timings = [
        {"system": "dynaserve", "rate_per_s": rate, "place_us_p50": us}
        for rate, us in ((6.0, 1000.0), (10.0, 1600.0))
    ]
    timings.append({"system": "dynaserve-K1", "rate_per_s": 10.0, "place_us_p50": 300.0})
    path = tmp_path / "ar-parts" / "overhead.timing.json"
    path.write_text(json.dumps({"rows": timings}))
    assert ours(17, tmp_path).cells[2] == "1.00/1.60"
    assert ours(17, tmp_path).inside is False, "not flat"
    assert ours(18, tmp_path).remark.startswith("placing takes 0.08 %")
    assert ours(19, tmp_path).cells[2] == "6, below 38 us"
    assert ours(19, tmp_path).inside

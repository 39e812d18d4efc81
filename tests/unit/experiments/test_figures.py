"""Figures tell systems apart, join only what was swept, and say how it was run."""

import itertools
import math

import pytest
from lib import figures, panels, published
from lib.figures import Plan, draw, plan, plans
from lib.figures import save as save_figure
from lib.results import ROOT, Rows, Spread, read
from lib.styles import STYLES, styles
from matplotlib.colors import to_rgb

LINES = {
    "kind": "lines", "title": "t", "x": "rate_per_gpu_per_s", "y": ["attainment", "accuracy"]
}  # fmt: skip


def rows_of(plan: Plan) -> Rows:
    found = [results.rows for name in plan.files if (results := read(name))]
    return Rows(tuple(row for rows in found for row in rows)).where(**plan.where)


def ink(line):
    """(x, y) of the points of a line, None where it is broken."""
    pairs = zip(line.get_xdata(), line.get_ydata(), strict=True)
    return [None if math.isnan(y) else (x, y) for x, y in pairs]


def broken(line):
    """The joined pieces of a line."""
    return [list(g) for some, g in itertools.groupby(ink(line), lambda p: p is not None) if some]


@pytest.mark.parametrize("one", plans(), ids=lambda one: f"{one.folder}/{one.name}")
def test_no_two_systems_of_a_figure_share_a_style(one):
    found = figures.styles_of(one, rows_of(one)).values()
    assert len(set(found)) == len(found)
    seen = {(to_rgb(style.color), style.marker) for style in found}
    assert len(seen) == len(found), "told apart by colour and marker, where there is no line"
    seen = {(to_rgb(style.color), style.dash) for style in found}
    if one.kind != "dots":
        assert len(seen) == len(found), "told apart by colour and dash, where there is no marker"


def test_a_system_has_one_style_everywhere_and_no_two_share_one():
    assert len(set(STYLES.values())) == len(STYLES)
    assert styles(["mine", "dilaserve"])["dilaserve"] == styles(["dilaserve"])["dilaserve"]
    found = styles(f"unknown-{i}" for i in range(30))
    assert len(set(found.values())) == 30


@pytest.mark.parametrize("one", plans(), ids=lambda one: f"{one.folder}/{one.name}")
def test_every_figure_is_drawn_with_a_foot_that_says_how_it_was_run(one):
    figure = draw(one)
    foot = " ".join(text.get_text() for text in figure.texts).replace("\n", " ")
    assert one.title in foot
    assert "n = " in foot
    assert "requests a run, arriving" in foot
    assert "seed" in foot
    assert all((ROOT / one.folder / f"{one.name}.{kind}").exists() for kind in ("png", "svg"))


def test_a_line_joins_neighbours_of_the_sweep_and_no_distant_points(row, save, tmp_path):
    rates = (1.5, 1.75, 2.0, 4.0, 4.25)
    save("a/a", [row("infaas", rate, 0.5) for rate in rates])
    axes = draw(plan("a", "a", "a", LINES), tmp_path).axes[0]
    assert [[x for x, _ in piece] for piece in broken(axes.lines[0])] == [
        [1.5, 1.75, 2.0],
        [4.0, 4.25],
    ]


def test_a_line_is_broken_where_a_system_was_not_run_or_has_no_value(row, save, tmp_path):
    rows = [row("infaas", rate, 0.5) for rate in (1.0, 2.0, 3.0)]
    rows += [row("llumnix", 1.0, 0.5), row("llumnix", 2.0), row("llumnix", 3.0, 0.7)]
    save("a/a", rows)
    axes = draw(plan("a", "a", "a", LINES), tmp_path).axes[0]
    assert [len(broken(line)) for line in axes.lines[:2]] == [1, 2]


def test_two_points_are_no_sweep():
    assert panels.gaps([1.0, 3.0]) == {1.0}
    assert panels.gaps([1.0, 1.1, 1.2, 1.3]) == set()


def test_points_are_means_over_seeds(row, save, tmp_path):
    rates = (1.0, 2.0, 3.0)
    save("a/a", [row("infaas", r, r / 10 + seed / 5, seed=seed) for r in rates for seed in (0, 1)])
    axes = draw(plan("a", "a", "a", LINES), tmp_path).axes[0]
    assert axes.lines[0].get_ydata() == pytest.approx([20.0, 30.0, 40.0])


@pytest.mark.parametrize(("requests", "shown"), [(1319, True), (400, False)])
def test_published_runs_stand_only_beside_runs_of_equal_length(
    row, save, tmp_path, requests, shown
):
    name = "load-sweeps/llada-gsm8k"
    rates = published.studies()["load-llada-gsm8k"].x
    save(name, [row("infaas", rate, 0.9, requests=requests) for rate in rates])
    one = plan("load-sweeps", "llada-gsm8k", "a", {**LINES, "published": True})
    figure = draw(one, tmp_path)
    hollow = [line for line in figure.axes[0].lines if line.get_markerfacecolor() == "none"]
    assert bool(hollow) is shown
    assert any("published" in text.get_text() for text in figure.texts) is shown
    if shown:
        assert list(hollow[0].get_ydata()) == pytest.approx([100.0, 95.9, 75.4, 49.1, 34.3])


def test_dots_stand_in_order_with_their_range(ar_row, save, tmp_path):
    at = {"colocated": (4.0, 5.0), "dynaserve": (7.0, 8.0)}
    rows = [
        ar_row(s, kind="capacity", seed=i, capacity_per_s=v)
        for s, values in at.items() for i, v in enumerate(values)
    ]  # fmt: skip
    save("a/a", rows)
    table = {"kind": "dots", "title": "t", "x": "capacity_per_s", "y": "system", "numbers": True}
    (axes,) = draw(plan("a", "a", "a", table), tmp_path).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["colocated", "dynaserve"]
    assert [text.get_text() for text in axes.texts] == ["4.50", "7.50"]
    assert axes.get_xlim()[0] == 0.0


def test_a_figure_without_results_is_left_out(tmp_path):
    assert draw(plan("a", "a", "a", LINES), tmp_path) is None


def test_an_unknown_key_of_a_figure_is_named():
    with pytest.raises(ValueError, match=r"figure\.mine\.colour"):
        plan("a", "a", "mine", {**LINES, "colour": "red"})


def test_pictures_are_the_same_bytes_and_small(row, save, tmp_path):
    save("a/a", [row("infaas", rate, 0.5) for rate in (1.0, 2.0, 3.0)])
    contents = []
    for name in ("one", "two"):
        save_figure(draw(plan("a", "a", "a", LINES), tmp_path), tmp_path / name)
        contents.append([(tmp_path / f"{name}.{kind}").read_bytes() for kind in ("png", "svg")])
    assert contents[0] == contents[1]
    assert len(contents[0][1]) < 60_000
    assert all(path.stat().st_size < 300_000 for path in ROOT.glob("*/*.svg"))


def test_a_spread_of_one_seed_is_its_value():
    assert Spread((2.0,)).low == Spread((2.0,)).high == 2.0


def test_labels_limits_and_columns_of_ones_own_are_as_the_table_says(row, save, tmp_path):
    save("a/a", [row("infaas", rate, 0.5, batches=10 * rate) for rate in (1.0, 2.0, 3.0)])
    more = {
        "y": "batches",
        "labels": {"batches": "batches of all"},
        "limits": {"batches": [0, 50], "rate_per_gpu_per_s": [4, 0]},
    }
    (axes,) = draw(plan("a", "a", "a", {**LINES, **more}), tmp_path).axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("load (requests/s per GPU)", "batches of all")
    assert (axes.get_xlim(), axes.get_ylim()) == ((4, 0), (0, 50))


def test_an_unknown_kind_of_figure_is_named(row, save, tmp_path):
    save("a/a", [row("infaas", 1.0, 0.5)])
    with pytest.raises(ValueError, match="kind 'pie'"):
        draw(plan("a", "a", "a", {**LINES, "kind": "pie"}), tmp_path)

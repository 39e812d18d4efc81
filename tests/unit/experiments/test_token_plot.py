"""Pictures of autoregressive runs show every system, and means over seeds."""

import sys
from pathlib import Path

import matplotlib
import pytest

matplotlib.use("Agg")
sys.path.insert(0, str(Path(__file__).parents[3] / "experiments"))
import token_plot
from matplotlib import pyplot


def row(system, kind="run", rate=1.0, seed=0, **more):
    return {
        "kind": kind,
        "system": system,
        "workload": "hybrid",
        "rate_per_s": rate,
        "seed": seed,
        "goodput_tokens_per_s": 100.0 * rate,
        "tbt_p99_s": 0.09,
        "ttft_p99_s": 1.0,
        "e2e_mean_s": 2.0,
        **more,
    }


def result(rows):
    config = {
        "models": ["qwen2.5-14b"],
        "workloads": ["hybrid"],
        "instances": 2,
        "hardware": "a100",
        "tbt_s": 0.1,
    }
    return {"config": config, "seeds": sorted({r["seed"] for r in rows}), "rows": rows}


@pytest.fixture
def draw():
    yield lambda name, rows: token_plot.picture(name, result(rows))
    pyplot.close("all")


def test_capacities_are_bars_of_means_with_published_ones_of_the_hybrid_load(draw):
    rows = [
        row(system, "capacity", seed=seed, capacity_per_s=per_s + seed)
        for system, per_s in (("colocated", 4.0), ("dynaserve", 7.0))
        for seed in (0, 1)
    ]
    (axes,) = draw("hybrid", rows).axes
    assert [bar.get_height() for bar in axes.patches] == [4.5, 7.5]
    hollow = [line.get_ydata()[0] for line in axes.lines if line.get_marker() == "o"]
    assert hollow == [4.6, 7.4]
    (axes,) = draw("ar-capacity", rows).axes
    assert not [line for line in axes.lines if line.get_marker() == "o"]


def test_runs_over_the_rate_are_lines_of_means(draw):
    rows = [
        row("dynaserve", rate=rate, seed=seed, goodput_tokens_per_s=100.0 * rate + 10.0 * seed)
        for rate in (1.0, 2.0)
        for seed in (0, 1)
    ]
    goodput, gaps, first = draw("ar-budget", rows).axes
    assert list(goodput.lines[0].get_ydata()) == [105.0, 205.0]
    assert 100.0 in [line.get_ydata()[0] for line in gaps.lines]
    assert first.get_yscale() == "log"


def test_one_rate_is_a_point_per_system(draw):
    figure = draw("ar-noise", [row("dynaserve"), row("dynaserve-sigma100")])
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert labels == ["dynaserve", "dynaserve-sigma100"]
    assert [len(axes.containers) for axes in figure.axes] == [2, 2, 2]

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepserve.core.errors import FieldError
from stepserve.sim import data
from stepserve.sim.lengths import (
    FIXED,
    TOKEN_WORKLOADS,
    TRACES,
    recorded,
    token_lengths,
)

sys.path.insert(0, str(Path(__file__).parents[3] / "experiments/calibration"))
import fit_lengths

workloads = st.sampled_from(TOKEN_WORKLOADS)
seeds = st.integers(0, 1000)
has_data = pytest.mark.skipif(
    any(data.data_file(name) is None for name in TRACES.values()), reason="needs the public traces"
)


def many(workload, source="fitted", count=20_000):
    return np.array(token_lengths(workload, count, 0, source))


@settings(max_examples=60, deadline=None)
@given(workloads, seeds, st.integers(0, 60), st.integers(0, 60))
def test_a_request_depends_on_seed_and_number_alone(workload, seed, count, more):
    few, all_ = (token_lengths(workload, n, seed) for n in (count, count + more))
    assert few == all_[:count]
    assert all(p >= 1 and o >= 1 for p, o in all_)


@pytest.mark.parametrize("workload", [w for w in TOKEN_WORKLOADS if w not in FIXED])
def test_seeds_differ(workload):
    assert token_lengths(workload, 50, 1) != token_lengths(workload, 50, 2)


@pytest.mark.parametrize(
    ("workload", "prompt", "output"),
    [
        ("azure-code", 2048, 28),
        ("azure-conv", 1155, 211),
        ("burstgpt", 751, 102),
        ("arxiv", 2588, 291),
        ("mini-reasoning", 219, 1467),
        ("hybrid", 1400, 65),
        ("fixed-8192-32", 8192, 32),
        ("fixed-2048-512", 2048, 512),
        ("fixed-219-1467", 219, 1467),
    ],
)
def test_means(workload, prompt, output):
    assert many(workload).mean(axis=0) == pytest.approx([prompt, output], rel=0.04)


def test_the_hybrid_is_half_and_half():
    pairs, code, chat = (many(w) for w in ("hybrid", "azure-code", "burstgpt"))
    for low in (100, 1000, 3000, 6000):
        share, of_code, of_chat = ((p[:, 0] > low).mean() for p in (pairs, code, chat))
        assert share == pytest.approx((of_code + of_chat) / 2, abs=0.015)


def test_the_output_of_conversations_depends_on_the_prompt():
    """Prompts about the median have answers three times as long as others (measured)."""
    pairs = many("azure-conv")
    low, high = np.quantile(pairs[:, 0], (0.45, 0.75))
    middle = (low < pairs[:, 0]) & (pairs[:, 0] < high)
    assert pairs[middle, 1].mean() > 2.5 * pairs[pairs[:, 0] < low, 1].mean()


def test_no_request_is_longer_than_the_longest_recorded():
    assert many("arxiv").sum(axis=1).max() <= 4096
    assert many("azure-code").sum(axis=1).max() <= 7841


@has_data
@pytest.mark.parametrize("workload", TRACES)
def test_the_own_generator_stays_close_to_the_trace(workload):
    ours, rows = many(workload), recorded(workload)
    assert ours.mean(axis=0) == pytest.approx(rows.mean(axis=0), rel=0.03)
    for values, true in ((ours.T[0], rows.T[0]), (ours.T[1], rows.T[1])):
        assert fit_lengths.distance(values, true) < 0.06
    assert fit_lengths.distance(ours.sum(axis=1), rows.sum(axis=1)) < 0.08


@has_data
@pytest.mark.parametrize("workload", TRACES)
def test_the_shipped_quantiles_are_those_of_the_trace(workload):
    shipped, fitted = data.facts("lengths")[workload], fit_lengths.fit(workload)
    assert {k: v if np.ndim(v) else [v] for k, v in shipped.items()} == {
        k: list(v) if np.ndim(v) else [v] for k, v in fitted.items()
    }


@has_data
def test_recorded_lengths_are_rows_of_the_trace():
    rows = set(map(tuple, recorded("azure-code").tolist()))
    assert set(token_lengths("azure-code", 500, 0, "recorded")) <= rows
    assert many("burstgpt", "recorded").mean(axis=0) == pytest.approx([751, 102], rel=0.03)


def test_without_the_data_folder_the_own_generator_is_the_same(monkeypatch, tmp_path):
    with_data = token_lengths("hybrid", 100, 0)
    monkeypatch.setenv("STEPSERVE_DATA", str(tmp_path))
    recorded.cache_clear()
    assert token_lengths("hybrid", 100, 0) == with_data
    with pytest.raises(FieldError) as error:
        token_lengths("hybrid", 100, 0, "recorded")
    assert error.value.field == "source"


def test_unknown_workloads_are_refused():
    with pytest.raises(FieldError) as error:
        token_lengths("gsm8k", 1, 0)
    assert error.value.field == "workload"

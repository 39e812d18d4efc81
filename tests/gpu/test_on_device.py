"""On a CUDA device: what the CPU says, with captured passes and without."""

import pytest
import torch

from stepserve.core.request import CacheMode
from stepserve.engine import graphs
from stepserve.engine.attention import attend, ragged, whole_groups
from stepserve.engine.graphs import CachedRow
from support.replayed import (
    SHAPES,
    assert_replay_changes_nothing,
    executor,
    random_model,
    requests,
    run,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def ids_of(results):
    assert all(result.error is None for result in results.values())
    return {name: result.token_ids for name, result in results.items()}


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_those_of_the_cpu(shape):
    rows = requests(shape, 5) + requests(shape, 8, cache=CacheMode.PREFIX)[5:]
    expected = ids_of(run(executor(random_model(shape, seed=3), "off"), rows))
    loaded = random_model(shape, seed=3, device="cuda")
    for option in ("off", "auto"):
        engine = executor(loaded, option)
        assert ids_of(run(engine, rows)) == expected
        assert engine.used_pages == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_captured_passes_change_no_state_and_no_token(shape):
    loaded = random_model(shape, seed=3, device="cuda")
    _, counts = assert_replay_changes_nothing(loaded, requests(shape, 5), 1e-5)
    assert len(counts) > 2


def test_every_bucket_is_captured_and_any_order_of_replays_is_right():
    """They share memory: a pass must not live on what another has overwritten."""
    engine = executor(random_model("dream", seed=3, device="cuda"), "on")
    replayed = engine._replay
    engine._pool.kv.normal_()
    batches = [
        [CachedRow(range(3, 11), 32 + 9 * i, range(25 * i, 25 * i + 25), 40 + 9 * i) for i in rows]
        for rows in (range(1), range(5), range(2))
    ]
    first = [replayed.hidden(rows).clone() for rows in batches]
    assert engine.captured_graphs == 3
    for index in (2, 0, 1, 0, 2, 1):
        again = replayed.hidden(batches[index])
        used = len(batches[index]) * 8
        torch.testing.assert_close(again[:used], first[index][:used], rtol=0.0, atol=1e-5)


def test_a_graph_that_made_room_is_captured_again_and_right(monkeypatch):
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    monkeypatch.setattr(graphs, "IDLE_PASSES", 0)
    rows, loaded = requests("dream", 5), random_model("dream", seed=3, device="cuda")
    engine = executor(loaded, "on")
    assert ids_of(run(engine, rows)) == ids_of(run(executor(loaded, "off"), rows))
    assert engine.captured_graphs == 2


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_rows_of_several_lengths_attend_as_each_alone(kv_heads):
    torch.manual_seed(0)
    lengths = [5, 5, 64, 130, 7]
    options = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(sum(lengths), 4, 64, **options)
    k, v = torch.randn(2, sum(lengths), kv_heads, 64, **options)
    (group,) = whole_groups(0, lengths, torch.bfloat16, q.device)
    got = ragged(q, k, v, group)
    start = 0
    for length in lengths:
        own = slice(start, start + length)
        alone = attend(q[None, own], k[None, own], v[None, own])[0]
        torch.testing.assert_close(got[own], alone, rtol=2e-2, atol=2e-2)
        start += length


@pytest.mark.parametrize("shape", SHAPES)
def test_half_precision_serves_every_kind_of_step(shape):
    loaded = random_model(shape, seed=3, device="cuda", dtype=torch.bfloat16)
    rows = requests(shape, 6) + requests(shape, 9, cache=CacheMode.NONE)[6:]
    ids_of(run(executor(loaded, "auto"), rows))

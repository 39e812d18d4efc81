"""Padding to buckets changes nothing. Capture itself is tested on a device, in ``tests/gpu``."""

from dataclasses import replace

import pytest
import torch

from stepserve.core.denoising import due_step
from stepserve.core.errors import FieldError
from stepserve.core.payload import Payload
from stepserve.core.request import CacheMode, Progress
from stepserve.core.step import Batch
from stepserve.engine import graphs
from stepserve.engine.graphs import Bucket, CachedRow, Replay, bucketed
from support.replayed import (
    NEVER,
    SHAPES,
    assert_replay_changes_nothing,
    executor,
    random_model,
    requests,
    run,
)


def ids_of(results):
    return {name: result.token_ids for name, result in results.items()}


def test_buckets_are_powers_of_two_and_one_between():
    assert [bucketed(n) for n in range(1, 18)] == [
        *(1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16, 16, 16, 16, 24)
    ]
    assert [bucketed(n) for n in (1024, 1025, 1537)] == [1024, 1536, 2048]


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_padding_changes_no_state_and_no_token(shape, count):
    """Rows of unequal contexts that finish one after the other."""
    rows = requests(shape, count, ignore_eos=count == 1)
    results, counts = assert_replay_changes_nothing(random_model(shape, seed=3), rows, 1e-5)
    assert len({tuple(result.token_ids) for result in results.values()}) == count
    assert None not in counts
    assert sum(counts.values()) >= 5
    assert len({bucket.rows for bucket in counts}) >= min(count, 3)


@pytest.mark.parametrize("shape", ["llada", "dream"])
def test_rows_that_execute_unequally_many_tokens(shape):
    """With a prefix cache each executes up to the end of its own output."""
    rows = requests(shape, 4, cache=CacheMode.PREFIX)
    _, counts = assert_replay_changes_nothing(random_model(shape, seed=3), rows, 1e-5)
    assert len({bucket.queries for bucket in counts}) > 1


@pytest.mark.parametrize("shape", SHAPES)
def test_draws_and_alternatives_are_the_same(shape):
    rows = requests(shape, 3, temperature=0.8, logprobs=2)
    plain, replayed = (run(executor(random_model(shape), g), rows) for g in ("off", "on"))
    assert ids_of(plain) == ids_of(replayed)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_of_nans_fails_alone(shape):
    """And what it leaves in its pages harms nobody who gets them, behind a context neither."""
    loaded, rows, poison = random_model(shape, seed=4), requests(shape, 3), NEVER
    before = run(executor(loaded, "on"), rows)
    loaded.model.embed.weight[poison] = float("nan")
    first, payload = rows[0]
    request = replace(first, id="bad", prompt_tokens=100)
    bad = request, Payload((poison,) * 100, payload.sampling)
    pages = sum(2 * -(-(r.prompt_tokens + r.max_output_tokens) // 8) for r, _ in [*rows, bad])
    engine = executor(loaded, "on", page_capacity=pages)
    results = run(engine, [rows[0], bad, *rows[1:]])
    assert results.pop("bad").error == "logits are not finite"
    assert ids_of(results) == ids_of(before)
    assert ids_of(run(engine, rows)) == ids_of(before)
    assert engine.used_pages == 0


def replay(page_tokens=4):
    return Replay(*(getattr(executor(random_model("llada"), "off", page_tokens=page_tokens), name)
                    for name in ("model", "_pool")))  # fmt: skip


def row(context, queries=8):
    return CachedRow((3,) * queries, context - queries, range(-(-context // 4)), context)


def test_padded_rows_and_queries_touch_the_spare_page_alone():
    replayed = replay()
    kv = replayed._pool.kv
    kv.fill_(float("nan"))
    kv[:, -4:] = 0.0  # the spare page, 400
    kv[:, :30] = 0.5
    kept = kv.clone()
    rows = [CachedRow((3, 4, 5), 10, range(8), 30), CachedRow((6,), 20, range(8), 21)]
    rows += [rows[0]._replace(token_ids=(7, 8), first=14)] * 3
    hidden = replayed.hidden(rows)
    assert hidden.shape == (6 * 3, 64)
    assert hidden.isfinite().all()
    written = [10, 11, 12, 14, 15, 20, 1600]
    changed = (kept != kv) & ~(kept.isnan() & kv.isnan())
    assert changed.any(dim=(0, 2, 3, 4)).nonzero().flatten().tolist() == written


def test_rows_unlike_each_other_are_not_padded():
    replayed = replay()
    assert replayed._bucket([row(2100), *[row(100)] * 7]) is None
    assert replayed._bucket([row(2100), *[row(2000)] * 7]) == Bucket(8, 8, 768)
    assert replayed._bucket([row(200, 160), *[row(200)] * 3]) is None, "queries count, too"
    assert replayed._bucket([row(9)]) == Bucket(1, 8, 16)


def test_a_bucket_that_was_long_not_used_makes_room(monkeypatch):
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    monkeypatch.setattr(graphs, "IDLE_PASSES", 3)
    replayed = replay()

    def captured(*queries):
        return [replayed.hidden([row(30, n)]) is not None for n in queries]

    assert captured(3, 4, 3) == [True, True, True]
    assert captured(5, 5, 3) == [False, False, True], "both were used lately"
    assert captured(5) == [True], "4 has not been"
    assert [bucket.queries for bucket in replayed._captured] == [3, 5]
    assert captured(4, 3, 5) == [False, True, True]


def test_more_buckets_in_turns_than_there_is_room_for_are_captured_once(monkeypatch):
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    replayed, prepared = replay(), []
    prepare = replayed._prepare
    replayed._prepare = lambda bucket: prepared.append(bucket) or prepare(bucket)
    for _ in range(5):
        found = [replayed.hidden([row(30, n)]) is not None for n in (3, 4, 5)]
        assert found == [True, True, False]
    assert [bucket.queries for bucket in prepared] == [3, 4]
    rows = requests("llada", 5)
    loaded = random_model("llada", seed=3)
    assert run(executor(loaded, "on"), rows) == run(executor(loaded, "off"), rows)


def test_after_a_failure_nothing_is_captured_and_nothing_makes_room(monkeypatch):
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    monkeypatch.setattr(graphs, "IDLE_PASSES", 0)
    replayed, failed = replay(), []
    assert all(replayed.hidden([row(30, n)]) is not None for n in (3, 4))
    replayed._prepare = failed.append  # as one that cannot be captured: None
    assert [replayed.hidden([row(30, n)]) is not None for n in (5, 6, 3, 4)] == [0, 0, 1, 1]
    assert [bucket.queries for bucket in failed] == [5]


@pytest.mark.parametrize("idle", [0, 1000])
def test_results_do_not_depend_on_what_is_replaced(monkeypatch, idle):
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 1)
    monkeypatch.setattr(graphs, "IDLE_PASSES", idle)
    rows, loaded = requests("causal", 5), random_model("causal", seed=3)
    assert ids_of(run(executor(loaded, "on"), rows)) == ids_of(run(executor(loaded, "off"), rows))


def test_batches_with_other_steps_are_packed():
    """A recompute step in the batch, or a chunk of a prompt: nothing is padded."""
    for shape in ("llada", "causal"):
        engine = executor(random_model(shape), "on")
        run(engine, requests(shape, 1))
        known = dict(engine._replay._captured)
        assert known
        if shape == "llada":
            first, second = requests(shape, 2)
            for request, payload in (first, second):
                engine.add(request, payload, Progress(), {})
            engine.run(Batch(0, (due_step(first[0], 0, False, 0.9),)))
            steps = (due_step(first[0], 1, True, 0.9), due_step(second[0], 0, False, 0.9))
            assert not any(o.error for o in engine.run(Batch(1, steps)).outcomes)
            assert engine._replay._captured == known


def test_the_option_is_checked_and_off_on_cpu_by_default():
    loaded = random_model("llada")
    assert executor(loaded, "auto")._replay is None
    with pytest.raises(FieldError, match="graphs: must be auto, on or off, not 'yes'"):
        executor(loaded, "yes")


def test_half_precision_runs_over_the_same_buckets():
    loaded = random_model("dream", dtype=torch.bfloat16)
    results = run(executor(loaded, "on"), requests("dream", 3))
    assert all(result.error is None and result.tokens for result in results.values())

"""Rows that fail, move, or hit a cap; and what a step may be."""

import pytest
import torch

from stepserve.core.denoising import due_step
from stepserve.core.errors import CapacityError, FieldError, StepserveError
from stepserve.core.ids import RequestId
from stepserve.core.payload import Payload, SamplingParams
from stepserve.core.request import CacheMode, DiffusionOptions, FinishReason, Progress, RefreshScope
from stepserve.core.step import Batch, Step, StepKind
from stepserve.engine.diffusion_offline import denoise
from stepserve.engine.loader import LoadedModel

MASK, EOS = 1, 2

MODES = (CacheMode.NONE, CacheMode.PREFIX, CacheMode.DUAL)  # of models that are not block-causal


def run(engine, *steps):
    return engine.run(Batch(0, steps))


def test_wrong_steps_fail_alone(tiny, make, executor):
    """One bad row never takes the batch with it."""
    engine = executor(tiny())
    rows = [
        make("good", seed=1),
        make("short", seed=2),
        make("stateless", seed=3),
        make("uncached", cache=CacheMode.NONE, seed=4),
        make("prefill", seed=5),
        make("no threshold", seed=6),
        make("no prompt state", seed=7),
        make("exact", cache=CacheMode.NONE, seed=8),
    ]
    for request, payload in rows:
        engine.add(request, payload, Progress(), {})
    heavy, light = StepKind.RECOMPUTE, StepKind.CACHED
    done = run(
        engine,
        Step(RequestId("short"), heavy, 19, 20, 0.9),
        Step(RequestId("stateless"), light, 8, 20, 0.9),
        Step(RequestId("uncached"), light, 8, 20, 0.9),
        Step(RequestId("good"), heavy, 20, 20, 0.9),
        Step(RequestId("nobody"), heavy, 20, 20, 0.9),
        Step(RequestId("prefill"), StepKind.PREFILL, 20, 20),
        Step(RequestId("no threshold"), heavy, 20, 20),
        Step(RequestId("no prompt state"), heavy, 16, 20, 0.9),
        Step(RequestId("exact"), heavy, 16, 20, 0.9),
    )
    by_name = {outcome.request_id: outcome for outcome in done.outcomes}
    good = by_name.pop("good")
    assert good.error is None
    assert good.settled >= 1
    assert list(done.settled) == ["good"]
    for outcome in by_name.values():
        assert outcome.finished is FinishReason.ERROR
        assert outcome.error
    assert "19 of 20" in by_name["short"].error
    assert "no keys and values of the prompt" in by_name["no prompt state"].error
    assert engine.used_pages == 5, "failed rows are freed"


def test_a_cached_step_is_checked_against_the_current_block(tiny, make, executor):
    engine = executor(tiny())
    request, payload = make(cache=CacheMode.PREFIX)
    engine.add(request, payload, Progress(), {})
    assert run(engine, due_step(request, 0, False, 0.99)).outcomes[0].error is None
    outcome = run(engine, Step(request.id, StepKind.CACHED, 8, 20, 0.9)).outcomes[0]
    assert "executes 16 of 20" in outcome.error


@pytest.mark.parametrize(
    ("cache", "refresh", "scope", "executed"),
    [
        (CacheMode.NONE, 2, RefreshScope.FULL, [28, 28, 28, 28, 28, 28]),
        (CacheMode.DUAL, 1, RefreshScope.FULL, [28, 8, 28, 8, 28, 8]),
        (CacheMode.DUAL, 1, RefreshScope.OUTPUT, [28, 8, 24, 8, 24, 8]),
        (CacheMode.DUAL, 2, RefreshScope.FULL, [28, 8, 16, 8, 28, 8]),
        (CacheMode.DUAL, 2, RefreshScope.OUTPUT, [28, 8, 16, 8, 24, 8]),
        (CacheMode.DUAL, 3, RefreshScope.OUTPUT, [28, 8, 16, 8, 16, 8]),
        (CacheMode.PREFIX, 1, RefreshScope.OUTPUT, [28, 24, 24, 16, 24, 8]),
        (CacheMode.PREFIX, 3, RefreshScope.FULL, [28, 24, 24, 16, 16, 8]),
    ],
)
def test_tokens_that_due_steps_execute(scripted, make, executor, cache, refresh, scope, executed):
    """A prompt of 4 and three blocks of 8, each taking two steps; the executor runs them all."""
    loaded = scripted(dict.fromkeys(range(1, 24, 8), (10, 0.5)))
    request, payload = make(output=24, cache=cache, refresh=refresh, scope=scope)
    engine, seen, settled = executor(loaded), [], 0
    engine.add(request, payload, Progress(), {})
    while settled < 24:
        step = due_step(request, settled, bool(seen), 0.9)
        outcome = run(engine, step).outcomes[0]
        assert outcome.error is None
        settled += outcome.settled
        seen.append(step.query_tokens)
    assert seen == executed
    assert denoise(executor(loaded), [(request, payload)], 0.9)["r"].executed_tokens == sum(seen)


def test_after_a_loss_the_prompt_is_recomputed(tiny, make, executor):
    """Scope output: the prompt's keys and values are rebuilt by the first step on an instance."""
    loaded = tiny(seed=5)
    request, payload = make(output=24, scope=RefreshScope.OUTPUT)
    lost, settled = executor(loaded), {}
    lost.add(request, payload, Progress(), {})
    while len(settled) < 8:
        done = run(lost, due_step(request, len(settled), bool(settled), 0.9))
        settled |= {token.offset: token.token_id for token in done.settled["r"]}
    assert due_step(request, 8, True, 0.9).query_tokens == 24
    again = due_step(request, 8, False, 0.9)
    assert (again.kind, again.query_tokens) == (StepKind.RECOMPUTE, 28)
    plain, _ = make(output=24)
    outcomes = []
    for other in (request, plain):
        anew = executor(loaded)
        anew.add(other, payload, Progress(), settled)
        outcomes.append(run(anew, again).outcomes[0])
    assert outcomes[0].error is None
    assert outcomes[0] == outcomes[1], "as with a full refresh"


def test_an_output_scope_needs_a_cache():
    with pytest.raises(FieldError, match="refresh_scope"):
        DiffusionOptions(cache_mode=CacheMode.NONE, refresh_scope=RefreshScope.OUTPUT)


def test_a_row_steps_once_in_a_batch(tiny, make, executor):
    engine = executor(tiny())
    request, payload = make()
    engine.add(request, payload, Progress(), {})
    step = due_step(request, 0, False, 0.9)
    first, second = run(engine, step, step).outcomes
    assert first.error is None
    assert first.settled >= 1
    assert second.error == "twice in one batch"
    assert engine.used_pages == 0


def test_a_step_of_a_finished_row_reports_the_end_again(scripted, make, executor):
    engine = executor(scripted({}))
    request, payload = make(output=8)
    engine.add(request, payload, Progress(), dict.fromkeys(range(8), 10))
    done = run(engine, due_step(request, 0, False, 0.9))
    outcome = done.outcomes[0]
    assert (outcome.settled, outcome.emitted, outcome.finished) == (0, 8, FinishReason.LENGTH)
    assert done.settled == {}


@pytest.mark.parametrize("place", [1, 3])
@pytest.mark.parametrize("cache", CacheMode)
def test_a_row_of_nans_fails_alone(tiny, make, executor, cache, place):
    block_causal = cache is CacheMode.BLOCK
    loaded = tiny(seed=4, attention_block=8 if block_causal else None)
    poison = 39
    rows = [
        (request, Payload(tuple(min(t, 38) for t in payload.prompt_ids), payload.sampling))
        for request, payload in (
            make(f"{i}", prompt=9 + i, cache=cache, seed=i, temperature=float(i % 2))
            for i in range(3)
        )
    ]
    before = denoise(executor(loaded), rows, 0.6)
    loaded.model.embed.weight[poison] = float("nan")
    request, payload = make("bad", prompt=9, cache=cache)
    bad = request, Payload((poison, *payload.prompt_ids[1:]), payload.sampling)
    pages = 32 if block_causal else 28  # all are in use; blocks from position 0 end later
    engine = executor(loaded, page_capacity=pages)
    results = denoise(engine, [*rows[:place], bad, *rows[place:]], 0.6)
    assert results["bad"].error == "logits are not finite"
    assert results["bad"].finished is FinishReason.ERROR
    for request, _ in rows:
        assert results[request.id].token_ids == before[request.id].token_ids
    assert engine.used_pages == 0
    again = denoise(engine, rows, 0.6)  # on the pages that held the NaNs
    assert [again[r.id].token_ids for r, _ in rows] == [before[r.id].token_ids for r, _ in rows]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_placed_anew_continues_as_if_nothing_had_happened(tiny, make, executor, temperature):
    """Exact without a cache, at any step, with a seed as without one."""
    loaded = tiny(seed=2)
    row = make(output=16, cache=CacheMode.NONE, temperature=temperature, seed=9)
    request, payload = row
    whole = denoise(executor(loaded), [row], 0.7)["r"]
    for moves_after in range(1, whole.steps):
        engine, settled, steps = executor(loaded), {}, 0
        engine.add(request, payload, Progress(), {})
        finished = None
        while finished is None:
            if steps == moves_after:
                engine = executor(loaded)
                engine.add(request, payload, Progress(steps=steps), settled)
            done = run(engine, due_step(request, 0, False, 0.7))
            settled |= {token.offset: token.token_id for token in done.settled["r"]}
            steps += 1
            finished = done.outcomes[0].finished
        emitted = done.outcomes[0].emitted
        assert [settled[k] for k in range(emitted)] == whole.token_ids
        assert steps == whole.steps


def test_caps_force_what_is_left_of_the_block(scripted, make, executor):
    loaded = scripted({}, default=(10, 0.5))
    rows = [
        make("steps", output=16, block=8, max_steps_per_block=3),
        make("forwards", output=16, block=8, max_forwards=2),
        make("free", output=16, block=8),
    ]
    results = denoise(executor(loaded), rows, 0.9)
    assert [(r.steps, r.forced) for r in results.values()] == [(6, 16), (3, 16), (16, 16)]


def test_tokens_above_the_threshold_are_not_forced(scripted, make, executor):
    loaded = scripted({0: (10, 0.99), 5: (11, 0.5)}, default=(12, 0.8))
    result = denoise(executor(loaded), [make(output=8, max_steps_per_block=2)], 0.6)["r"]
    assert (result.steps, result.forced) == (2, 1)


def test_each_row_has_its_own_threshold(scripted, make, executor):
    """Row 0's threshold applied to the whole batch."""
    loaded = scripted({}, default=(10, 0.7))
    rows = [make(name, output=8) for name in ("low", "high", "middle")]
    thresholds = {"low": 0.5, "high": 0.9, "middle": 0.6}
    results = denoise(executor(loaded), rows, lambda request, _: thresholds[request.id])
    assert [r.steps for r in results.values()] == [1, 8, 1]


def test_an_easy_row_does_not_wait_for_a_hard_one(scripted, make, executor):
    """Rows leave at their own end."""
    loaded = scripted({}, default=(10, 0.7))
    rows = [make("hard", output=8), *(make(f"easy{i}", output=8) for i in range(3))]
    thresholds = {request.id: 0.5 for request, _ in rows} | {"hard": 0.9}
    results = denoise(executor(loaded), rows, lambda request, _: thresholds[request.id])
    assert [r.steps for r in results.values()] == [8, 1, 1, 1]


def test_a_threshold_may_change_from_step_to_step(scripted, make, executor):
    loaded = scripted({}, default=(10, 0.7))
    rule = lambda _, settled: 0.9 if settled < 3 else 0.5  # noqa: E731
    result = denoise(executor(loaded), [make(output=8)], rule)["r"]
    assert result.steps == 3 + 1


def test_what_the_model_cannot_run_is_refused_on_arrival(tiny, make, executor):
    engine = executor(tiny(), page_capacity=40)
    request, payload = make(prompt=4)
    sampling = SamplingParams(stop_token_ids=(99,))
    for fault, wrong in (
        ("prompt", Payload(())),
        ("announced", Payload((3, 4, 5))),
        ("vocabulary", Payload((3, 4, 5, 40))),
        ("stop_token_ids", Payload(payload.prompt_ids, sampling)),
    ):
        with pytest.raises(FieldError, match=fault):
            engine.add(request, wrong, Progress(), {})
    with pytest.raises(FieldError, match="the model has 160"):
        engine.add(*make("long", prompt=145), Progress(), {})
    engine.add(*make("a", prompt=4), Progress(), {})
    with pytest.raises(CapacityError, match="40 pages needed, 35 of 40 free"):
        engine.add(*make("b", prompt=144), Progress(), {})
    with pytest.raises(StepserveError, match="already held"):
        engine.add(*make("a", prompt=4), Progress(), {})
    assert engine.used_pages == 5
    engine.remove(RequestId("a"))
    engine.remove(RequestId("unknown"))
    assert engine.used_pages == 0


def test_dtype_of_the_model_is_the_dtype_of_its_pages(tiny, make, executor):
    loaded = tiny(seed=1)
    half = LoadedModel(
        tiny(seed=1).model.to(torch.bfloat16),
        loaded.config,
        "half",
        loaded.block_lengths,
        8,
        16,
        loaded.suppressed_token_ids,
    )
    rows = [make(f"{cache}", cache=cache, prompt=3 + i) for i, cache in enumerate(MODES)]
    engine = executor(half)
    assert engine._pool.kv.dtype is torch.bfloat16
    assert engine._pool.kv.device == half.model.embed.weight.device
    results = denoise(engine, rows, 0.5)
    assert all(result.error is None and result.tokens for result in results.values())


def test_few_logits_exist_at_once(tiny, make, executor, monkeypatch):
    """Slices bound the memory of sampling and change nothing."""
    loaded = tiny(seed=3)
    rows = [make(f"{i}", prompt=5 + i, seed=i, logprobs=2) for i in range(3)]
    whole = denoise(executor(loaded), rows, 0.6)
    sizes = []
    logits = loaded.model.logits
    monkeypatch.setattr(
        loaded.model, "logits", lambda hidden: (sizes.append(len(hidden)), logits(hidden))[1]
    )
    monkeypatch.setattr("stepserve.engine.packed_executor.LOGITS_PER_SLICE", 5 * 40 + 39)
    sliced = denoise(executor(loaded), rows, 0.6)
    assert max(sizes) == 5
    for name, result in whole.items():
        assert sliced[name].token_ids == result.token_ids
        assert [t.offset for t in sliced[name].tokens] == [t.offset for t in result.tokens]
        for ours, theirs in zip(sliced[name].tokens, result.tokens, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [i for i, _ in ours.top] == [i for i, _ in theirs.top]


def test_seconds_are_measured(tiny, make, executor):
    engine = executor(tiny(), threads=1)
    request, payload = make()
    engine.add(request, payload, Progress(), {})
    assert run(engine, due_step(request, 0, False, 0.9)).seconds > 0.0

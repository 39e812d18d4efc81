"""The autoregressive executor against plain references, in any chunking and any company."""

import random
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepserve.core.errors import FieldError, StepserveError
from stepserve.core.ids import RequestId
from stepserve.core.payload import Payload
from stepserve.core.request import Family, FinishReason, Progress, Request
from stepserve.core.step import Batch, Step, StepKind
from stepserve.engine.ar_offline import due_step, generate
from stepserve.engine.loader import load_model
from support.ar_models import EOS, VOCAB, engine, make, write_checkpoint

LLAMA, QWEN2 = "LlamaForCausalLM", "Qwen2ForCausalLM"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folders of four checkpoints: with biases or not, tied or not."""
    return {
        (architecture, tied): write_checkpoint(
            tmp_path_factory.mktemp("model"), architecture, tied=tied, seed=7
        )
        for architecture in (LLAMA, QWEN2)
        for tied in (False, True)
    }


@pytest.fixture(scope="module")
def loaded(checkpoints):
    return load_model(checkpoints[QWEN2, False])


def ids_of(results):
    assert all(result.error is None for result in results.values())
    return {name: result.token_ids for name, result in results.items()}


@torch.no_grad()
def dense(loaded, request, payload):
    """Greedy generation that executes everything at every token: no pages, no cache."""
    model, ids = loaded.model, list(payload.prompt_ids)

    def attend(layer, q, k, v):
        repeat = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(repeat, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, keys) / q.shape[-1] ** 0.5
        ahead = torch.ones(len(q), len(q)).triu(1).bool()
        weights = scores.masked_fill(ahead, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values)

    while len(ids) < len(payload.prompt_ids) + request.max_output_tokens:
        hidden = model.hidden(torch.tensor(ids), torch.arange(len(ids)), attend)
        ids.append(model.logits(hidden[-1]).argmax().item())
        if ids[-1] == EOS:
            break
    return ids[len(payload.prompt_ids) :]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", [LLAMA, QWEN2])
def test_greedy_tokens_are_those_of_the_dense_reference(checkpoints, architecture, tied):
    loaded = load_model(checkpoints[architecture, tied])
    rows = [make(f"{i}", prompt=1 + 4 * i, output=10 + i, seed=i) for i in range(6)]
    rows.append(make("long", prompt=600, output=3))  # more queries than share a bias
    expected = {request.id: dense(loaded, request, payload) for request, payload in rows}
    assert ids_of(generate(engine(loaded), rows)) == expected
    assert len({tuple(ids) for ids in expected.values()}) == len(rows), "rows that differ"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", [LLAMA, QWEN2])
def test_greedy_tokens_are_those_of_transformers(checkpoints, architecture, tied):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        folder = checkpoints[architecture, tied]
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        rows = [make(f"{i}", prompt=2 + 9 * i, output=16, seed=i) for i in range(4)]
        expected = {}
        for request, payload in rows:
            ids = torch.tensor([payload.prompt_ids])
            out = theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=16,
                do_sample=False,
                pad_token_id=0,
            )
            expected[request.id] = out[0, len(payload.prompt_ids) :].tolist()
    assert ids_of(generate(engine(load_model(folder)), rows)) == expected


@pytest.fixture(scope="module")
def varied_rows(loaded):
    """Five requests, greedy and sampled, and how each ends alone and uncut."""
    rows = [
        make(f"{i}", prompt=3 + 8 * i, output=9, seed=i, temperature=0.8 * (i % 2), logprobs=1)
        for i in range(5)
    ]
    alone = {}
    for row in rows:
        alone |= generate(engine(loaded), [row])
    return rows, alone


CHUNKS = st.lists(st.integers(0, 9), min_size=5, max_size=40)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(chunks=CHUNKS, page_tokens=st.sampled_from([1, 4, 16]), company=st.integers(0, 4))
def test_any_chunking_in_any_company_gives_the_same_tokens(
    loaded, varied_rows, chunks, page_tokens, company
):
    """Rows sit batches out as chunks of 0, so decodes and chunks meet in every combination."""
    rows, alone = varied_rows
    turn = iter(range(10**6))

    def cut(request, outstanding):
        index = next(turn)
        once = 1 if index > 300 else 0  # an end, whatever the drawn chunks are
        return min(outstanding, max(chunks[index % len(chunks)], once))

    together = generate(engine(loaded, page_tokens), rows[: company + 1], cut)
    for name, result in together.items():
        assert (result.token_ids, result.finished) == (alone[name].token_ids, alone[name].finished)
        for ours, theirs in zip(result.tokens, alone[name].tokens, strict=True):
            assert ours.offset == theirs.offset
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def kept(executor, name):
    row = executor._rows[RequestId(name)]
    return executor._pool.kv[:, row.slots[: row.held]]


@pytest.mark.parametrize("sizes", [(13, 1, 6, 17, 4), (1,) * 41, (40, 1), (256, 256, 60)])
def test_keys_and_values_do_not_depend_on_the_chunks(loaded, sizes):
    prompt = sum(sizes)
    whole, cut = engine(loaded), engine(loaded, page_tokens=16)
    request, payload = make(prompt=prompt)
    for executor, chunks in ((whole, [prompt]), (cut, sizes)):
        executor.add(request, payload, Progress(), {})
        done = 0
        for chunk in chunks:
            done += chunk
            (outcome,) = executor.run(
                Batch(0, (Step(request.id, StepKind.PREFILL, chunk, done),))
            ).outcomes
            assert (outcome.error, outcome.settled) == (None, chunk)
            assert outcome.emitted == (1 if done == prompt else 0), "sampled at the last input only"
            assert executor.used_pages == -(-done // executor._pool.page_tokens), "as needed"
    torch.testing.assert_close(kept(cut, "r"), kept(whole, "r"), rtol=1e-5, atol=1e-5)


def test_a_request_goes_on_from_its_emitted_ids(loaded):
    """After a loss everything known is executed again; the rest of the output is the same."""
    for temperature in (0.0, 1.0):
        request, payload = make(output=14, seed=5, temperature=temperature, ignore_eos=True)
        whole = ids_of(generate(engine(loaded), [(request, payload)]))["r"]
        for emitted in (1, 6, 13):
            executor = engine(loaded)
            given_ids = dict(enumerate(whole[:emitted]))
            executor.add(request, payload, Progress(emitted=emitted), given_ids)
            settled, ids = 0, whole[:emitted]
            finished = None
            while finished is None:
                step = due_step(request, settled, len(ids), lambda _, n: min(n, 4))
                result = executor.run(Batch(0, (step,)))
                settled += result.outcomes[0].settled
                finished = result.outcomes[0].finished
                ids += [token.token_id for token in result.settled["r"]]
                assert result.outcomes[0].emitted == len(ids)
            assert (ids, finished) == (whole, FinishReason.LENGTH)


def test_greedy_rows_stay_greedy_beside_sampled_ones(loaded):
    greedy = [make(f"g{i}", prompt=4 + i, seed=i) for i in range(3)]
    sampled = [
        make(f"s{i}", prompt=4 + i, seed=i, temperature=1.5, top_k=20, top_p=0.95) for i in range(3)
    ]
    alone = ids_of(generate(engine(loaded), greedy))
    drawn = {}
    for row in sampled:
        drawn |= ids_of(generate(engine(loaded), [row]))
    mixed = [row for pair in zip(greedy, sampled, strict=True) for row in pair]
    assert ids_of(generate(engine(loaded), mixed)) == alone | drawn
    assert all(alone[f"g{i}"] != drawn[f"s{i}"] for i in range(3))
    other = [make("s0", prompt=4, seed=99, temperature=1.5)[1].sampling]
    request, payload = sampled[0]
    reseeded = generate(engine(loaded), [(request, Payload(payload.prompt_ids, other[0]))])
    assert ids_of(reseeded)["s0"] != drawn["s0"], "a draw depends on the seed"


def test_aborts_at_any_step_leave_the_pool_as_it_was(loaded):
    chance = random.Random(11)
    executor = engine(loaded, page_capacity=60)
    rows, aborted, number = {}, 0, 0
    while aborted < 1000:
        while len(rows) < 4:
            number += 1
            request, payload = make(f"{number}", chance.randrange(1, 24), 16, number)
            executor.add(request, payload, Progress(), {})
            rows[request.id] = (request, 0, 0)
        steps = tuple(
            due_step(*row, lambda _, n: chance.randint(1, n))
            for row in rows.values()
            if chance.random() < 0.8
        )
        for outcome in executor.run(Batch(0, steps)).outcomes:
            assert outcome.error is None
            request, settled, _ = rows[outcome.request_id]
            rows[outcome.request_id] = (request, settled + outcome.settled, outcome.emitted)
            if outcome.finished or chance.random() < 0.3:
                aborted += outcome.finished is None
                executor.remove(outcome.request_id)
                del rows[outcome.request_id]
        expected = sum(-(-settled // 4) for _, settled, _ in rows.values())
        assert executor.used_pages == expected, "pages are those of what is executed"
    for name in rows:
        executor.remove(name)
    assert executor.used_pages == 0
    assert sorted(executor._pool._free) == list(range(60)), "each page exactly once"


def test_a_step_that_does_not_fit_ends_its_row_alone(loaded):
    executor = engine(loaded, page_capacity=8)
    good, others = make("good", prompt=3), ("unknown", "kind", "gap", "ahead", "empty", "decode")
    for request, payload in [good, *(make(name, prompt=6) for name in others[1:])]:
        executor.add(request, payload, Progress(), {})
    executor.add(*make("full", prompt=40), Progress(), {})
    prefill, decode = StepKind.PREFILL, StepKind.DECODE
    steps = (
        Step("unknown", prefill, 1, 1),
        Step("kind", StepKind.CACHED, 6, 6),
        Step("gap", prefill, 2, 4),
        Step("ahead", prefill, 7, 7),
        Step("empty", prefill, 0, 0),
        Step("decode", decode, 6, 6),
        Step("full", prefill, 40, 40),
        Step("good", prefill, 3, 3),
        Step("good", decode, 1, 4),
    )
    outcomes = executor.run(Batch(0, steps)).outcomes
    said = [outcome.error or "" for outcome in outcomes]
    for part, error in zip(
        ("not held", "no cached steps", "inputs 2 to 4, but 0 of 6", "inputs 0 to 7", "0 to 0",
         "last token alone", "10 pages needed", "", "twice"), said, strict=True,
    ):  # fmt: skip
        assert part in error
    assert said[7] == ""
    assert outcomes[7].emitted == 1
    assert executor.used_pages == 0, "the row that was given twice went as well"


def test_logits_that_are_no_numbers_stay_in_their_row(checkpoints):
    """Padding of a shorter context takes slots of its own row: a row of NaNs reaches nobody."""
    loaded = replace(load_model(checkpoints[LLAMA, False]), suppressed_token_ids=(40,))
    rows = [make(f"{i}", prompt=5 + i, output=6, seed=i) for i in range(3)]
    assert not any(40 in payload.prompt_ids for _, payload in rows)
    expected = ids_of(generate(engine(loaded), rows))
    with torch.no_grad():
        loaded.model.embed.weight[40] = float("nan")
    bad = Request(RequestId("bad"), Family.AUTOREGRESSIVE, "tiny", 7, 6, 0.0)
    executor = engine(loaded, page_capacity=14)
    for most in (1, 3, 100):  # the pages that the NaNs were in are used again
        batch = [(bad, Payload((3, 4, 40, 5, 6, 7, 8))), *rows]
        results = generate(executor, batch, lambda _, n, most=most: min(n, most))
        assert results.pop("bad").error == "logits are not finite"
        assert ids_of(results) == expected
        assert executor.used_pages == 0


def test_what_the_model_cannot_run_is_refused_on_arrival(loaded):
    executor = engine(loaded)
    request, payload = make(prompt=4)
    for fault, ids, settled in (
        ("prompt", (), {}),
        ("announced", (3, 4, 5), {}),
        ("vocabulary", (3, 4, 5, VOCAB), {}),
        ("not an output so far", payload.prompt_ids, {1: 5}),
        ("not an output so far", payload.prompt_ids, {0: EOS, 1: 5}),
    ):
        with pytest.raises(FieldError, match=fault):
            executor.add(request, Payload(ids), Progress(), settled)
    with pytest.raises(FieldError, match="the model has 700"):
        executor.add(*make("long", prompt=690), Progress(), {})
    executor.add(request, payload, Progress(), {})
    executor.run(Batch(0, (Step(request.id, StepKind.PREFILL, 2, 2),)))
    with pytest.raises(StepserveError, match="already held"):
        executor.add(request, payload, Progress(), {})
    assert executor.used_pages == 1, "of the step"

"""A request cut anywhere, whose keys and values move: tokens, checksums, log-probabilities."""

import random
from dataclasses import replace

import pytest
import torch

from stepserve.core.errors import StepserveError
from stepserve.core.request import FinishReason, Progress
from stepserve.core.step import Batch, Step, StepKind
from stepserve.engine.ar_offline import due_step, everything, generate
from stepserve.engine.kv_pages import checksums
from stepserve.engine.kv_transfer import InProcess, SharedMemory, Tcp
from stepserve.engine.loader import load_model
from support.ar_models import engine, make, write_checkpoint

PAGE = 4


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_model(write_checkpoint(tmp_path_factory.mktemp("m"), "Qwen2ForCausalLM", seed=7))


def elsewhere(loaded, seed=1, **shape):
    """An engine that hands its pages out in another order."""
    executor = engine(loaded, **shape)
    random.Random(seed).shuffle(executor._pool._free)
    return executor


def advance(executor, request, settled, tokens, stop=None, chunk=everything):
    """Run the next step, up to input ``stop``; returns inputs executed and the end, if it came."""
    step = due_step(request, settled, len(tokens), chunk)
    if stop is not None and step.context_tokens > stop:
        step = step._replace(query_tokens=stop - settled, context_tokens=stop)
    result = executor.run(Batch(0, (step,)))
    (outcome,) = result.outcomes
    assert outcome.error is None
    tokens += result.settled[request.id]
    assert outcome.emitted == len(tokens)
    return step.context_tokens, outcome.finished


def hand_over(loaded, row, cut, chunk=everything, carry=lambda chunk: chunk):
    """Alpha executes ``cut`` inputs and pushes whole pages meanwhile; beta goes on.

    Returns all tokens, how many of them are alpha's, and the end.
    """
    request, payload = row
    alpha, beta = engine(loaded), elsewhere(loaded)
    tokens, done, pushed = [], 0, 0
    beta.add(request, payload, Progress(), {})
    if cut:
        alpha.add(request, payload, Progress(), {})
    while done < cut:
        done, finished = advance(alpha, request, done, tokens, cut, chunk)
        assert finished is None
        full = done if done == cut else done - done % PAGE
        if full > pushed:
            assert beta.import_kv(carry(alpha.export_kv(request.id, 3, pushed, full)))
            pushed = full
            assert beta.used_pages == -(-full // PAGE), "as needed"
    firsts = len(tokens)
    if cut:
        sent, got = (end.export_kv(request.id, 3, 0, cut) for end in (alpha, beta))
        assert len(sent.checksums) == -(-cut // PAGE)
        assert sent.checksums == got.checksums
    emitted = {token.offset: token.token_id for token in tokens}
    beta.add(request, payload, Progress(settled=cut, emitted=firsts), emitted)
    finished = None
    while finished is None:
        done, finished = advance(beta, request, done, tokens, chunk=chunk)
    for end in (alpha, beta):
        end.remove(request.id)
        assert end.used_pages == 0
    return tokens, firsts, finished


def assert_as_uncut(got, whole):
    tokens, firsts, finished = got
    assert finished is whole.finished
    assert [token.token_id for token in tokens] == whole.token_ids
    assert [token.offset for token in tokens] == list(range(len(tokens)))
    assert tokens[firsts].logprob == pytest.approx(whole.tokens[firsts].logprob, abs=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("most", [1, 3, 100])
def test_every_cut_of_short_requests(loaded, temperature, most):
    for prompt, output in ((1, 3), (6, 7), (9, 4)):
        row = make(prompt=prompt, output=output, seed=prompt, temperature=temperature,
                   logprobs=1, ignore_eos=True)  # fmt: skip
        whole = generate(engine(loaded), [row])["r"]
        assert (len(whole.tokens), whole.finished) == (output, FinishReason.LENGTH)
        for cut in range(prompt + output - 1):
            got = hand_over(loaded, row, cut, lambda _, n: min(n, most))
            assert got[1] == max(0, cut - prompt + 1), "alpha's tokens"
            assert_as_uncut(got, whole)


CARRIERS = {"in process": lambda: InProcess(PEERS), "shared memory": SharedMemory, "tcp": Tcp}
PEERS = {}


@pytest.mark.parametrize("kind", CARRIERS)
def test_random_cuts_of_a_long_request_over_each_transport(loaded, kind):
    chance = random.Random(kind)
    sender, receiver = CARRIERS[kind](), CARRIERS[kind]()
    sender.register()
    address = receiver.register()
    receiver.reserve("r", 3, 1 << 20)

    def carry(chunk):
        sender.write(address, chunk)
        landed = []
        while not landed:
            sender.poll()
            landed = receiver.poll()
        return landed[0]

    row = make(prompt=200, output=60, seed=3, temperature=0.7, logprobs=1, ignore_eos=True)
    whole = generate(engine(loaded), [row])["r"]
    for cut in (200, *(chance.randrange(1, 259) for _ in range(5))):
        most = chance.randint(5, 120)
        assert_as_uncut(hand_over(loaded, row, cut, lambda _, n, m=most: min(n, m), carry), whole)
    sender.close()
    receiver.close()


def computed(loaded, row, tokens):
    """An engine that has executed so many inputs of the prompt."""
    executor = engine(loaded)
    executor.add(*row, Progress(), {})
    advance(executor, row[0], 0, [], tokens)
    return executor


def reversed_pages(kv):
    return torch.cat(kv.split(PAGE, dim=1)[::-1], dim=1)


def zeroed_first_page(kv):
    return torch.cat((torch.zeros_like(kv[:, :PAGE]), kv[:, PAGE:]), dim=1)


@pytest.mark.parametrize("wrong", [reversed_pages, zeroed_first_page, "another prompt's"])
def test_wrong_keys_and_values_show_in_the_checksums(loaded, wrong):
    """Tokens alone do not tell: attention does not care for the order of its keys."""
    row = make(prompt=33, output=8, seed=4, ignore_eos=True)
    request = row[0]
    alpha = computed(loaded, row, 32)
    whole = generate(engine(loaded), [row])["r"].token_ids
    chunk = alpha.export_kv(request.id, 1, 0, 32)
    if callable(wrong):
        data = wrong(chunk.data)
    else:
        other = make(prompt=33, output=8, seed=5)
        data = computed(loaded, other, 32).export_kv(request.id, 1, 0, 32).data
    beta = elsewhere(loaded)
    beta.add(*row, Progress(), {})
    assert not beta.import_kv(replace(chunk, data=data)), "the sums are of what left"
    assert beta.used_pages == 0, "and nothing is kept"
    unchecked = replace(chunk, data=data, checksums=checksums(data, 0, PAGE))
    assert beta.import_kv(unchecked), "as if the damage came before the sums"
    kept = beta.export_kv(request.id, 1, 0, 32).checksums
    differing = sum(a != b for a, b in zip(kept, chunk.checksums, strict=True))
    assert differing == (1 if wrong is zeroed_first_page else 8)
    done, tokens = 32, []
    while len(tokens) < 8:
        done, _ = advance(beta, request, done, tokens)
    if wrong is reversed_pages:
        assert [token.token_id for token in tokens] == whole, "nobody would have seen it"


def test_a_chunk_that_does_not_fit_is_not_kept(loaded):
    row = make(prompt=10, seed=2)
    request = row[0]
    chunk = computed(loaded, row, 10).export_kv(request.id, 1, 2, 9)
    kv = chunk.data
    flipped = kv.clone()
    flipped.view(torch.uint8)[1, 3, 0, 1, 5] ^= 4
    swapped = kv[:, [0, 1, 3, 2, 4, 5, 6]]
    beta = elsewhere(loaded)
    beta.add(*row, Progress(), {})
    for bad in (
        *(replace(chunk, data=data) for data in (flipped, swapped, kv[:, :-1], kv.half(), None)),
        replace(chunk, start=3, stop=10),
        replace(chunk, start=1),
        replace(chunk, start=-2, stop=5),
        replace(chunk, start=9, stop=9),
        replace(chunk, start=1 << 40, stop=(1 << 40) + 7),
        replace(chunk, checksums=chunk.checksums[:-1]),
        replace(chunk, checksums=chunk.checksums[::-1]),
        replace(chunk, request_id="unknown"),
    ):
        assert not beta.import_kv(bad)
        assert beta.used_pages == 0
    small, other = elsewhere(loaded, page_capacity=2), elsewhere(loaded, page_tokens=8)
    for executor in (small, other):
        executor.add(*row, Progress(), {})
        assert not executor.import_kv(chunk), "no pages, or of another size"
        assert executor.used_pages == 0
    assert beta.import_kv(chunk), "it was good all the time"
    assert torch.equal(beta._pool.kv[:, beta._rows["r"].slots[2:9]], kv)
    assert (beta.used_pages, beta._rows["r"].held) == (3, 0), "what is before is missing"


def test_chunks_land_in_any_order_and_count_up_to_the_first_gap(loaded):
    row = make(prompt=24, output=5, seed=8, ignore_eos=True)
    request = row[0]
    alpha = computed(loaded, row, 24)
    whole = generate(engine(loaded), [row])["r"].token_ids
    ranges = [(0, 3), (3, 8), (2, 6), (8, 9), (9, 17), (10, 12)]
    for seed in range(6):
        random.Random(seed).shuffle(ranges)
        for missing, start in ((None, 17), ((3, 8), 6), ((8, 9), 8), ((0, 3), 0)):
            beta = elsewhere(loaded)
            beta.add(*row, Progress(), {})
            for span in ranges:
                if span != missing:
                    assert beta.import_kv(alpha.export_kv(request.id, 1, *span))
            assert beta.used_pages == 5
            done, tokens = start, []
            while len(tokens) < 5:
                done, _ = advance(beta, request, done, tokens)
            assert [token.token_id for token in tokens] == whole
            ahead = elsewhere(loaded)
            ahead.add(*row, Progress(), {})
            for span in ranges:
                if span != missing:
                    ahead.import_kv(alpha.export_kv(request.id, 1, *span))
            step = Step(request.id, StepKind.PREFILL, 1, start + 2)
            (outcome,) = ahead.run(Batch(0, (step,))).outcomes
            assert f"{start} of 24 are executed here" in outcome.error


def test_who_heard_of_less_computes_it_again(loaded):
    """The scheduler may give up waiting for chunks that land all the same."""
    row = make(prompt=24, output=5, seed=8, ignore_eos=True)
    request = row[0]
    alpha = computed(loaded, row, 24)
    whole = generate(engine(loaded), [row])["r"].token_ids
    for landed in (0, 8, 24):
        beta = elsewhere(loaded)
        beta.add(*row, Progress(), {})
        assert beta.import_kv(alpha.export_kv(request.id, 1, 0, 24))
        emitted = {0: whole[0]}
        beta.add(*row, Progress(settled=landed, emitted=1), emitted)
        step = due_step(request, landed, 1)
        result = beta.run(Batch(0, (step,)))
        assert result.outcomes[0].error is None
        assert result.settled["r"][0].token_id == whole[1]
        assert not beta.import_kv(alpha.export_kv(request.id, 1, 0, 24)), "too late"
        with pytest.raises(StepserveError, match="already held"):
            beta.add(*row, Progress(), emitted)


def test_only_what_is_computed_leaves(loaded):
    row = make(prompt=10, seed=2)
    alpha = computed(loaded, row, 7)
    for start, stop in ((0, 8), (7, 7), (-1, 3), (5, 4)):
        with pytest.raises(StepserveError, match="of 7 asked"):
            alpha.export_kv("r", 1, start, stop)
    with pytest.raises(StepserveError, match="of 0 asked"):
        alpha.export_kv("unknown", 1, 0, 1)
    chunk = alpha.export_kv("r", 1, 3, 7)
    before = chunk.data.clone()
    alpha.remove("r")
    alpha._pool.kv.fill_(9.0)
    assert torch.equal(chunk.data, before), "a copy"
    assert chunk.data.is_contiguous()
    assert chunk.data.shape == (2, 4, 2, 2, 8)
    assert (chunk.start, chunk.stop, len(chunk.checksums)) == (3, 7, 2)


def test_aborts_during_hand_overs_leave_both_pools_as_they_were(loaded):
    chance = random.Random(5)
    alpha, beta = engine(loaded, page_capacity=40), engine(loaded, page_capacity=40)
    held, landed, aborted, number = {}, {}, 0, 0
    while aborted < 1000:
        while len(held) < 3:
            number += 1
            row = make(f"{number}", chance.randrange(4, 30), 4, number, ignore_eos=True)
            alpha.add(*row, Progress(), {})
            held[row[0].id] = row, 0
        name = chance.choice(list(held))
        row, done = held[name]
        what = chance.random()
        if what < 0.4 and done < row[0].prompt_tokens - 1:
            stop = chance.randint(done + 1, row[0].prompt_tokens - 1)
            done, _ = advance(alpha, row[0], done, [], stop)
            held[name] = row, done
        elif what < 0.8 and done:
            start = chance.randrange(done)
            chunk = alpha.export_kv(name, 1, start, chance.randint(start + 1, done))
            if name not in landed:
                beta.add(*row, Progress(), {})
            if chance.random() < 0.2:
                assert not beta.import_kv(replace(chunk, data=chunk.data + 1.0))
                landed.setdefault(name, 0)
            else:
                assert beta.import_kv(chunk)
                landed[name] = max(landed.get(name, 0), chunk.stop)
        else:
            aborted += 1
            for end in (alpha, beta):
                end.remove(name)
            del held[name]
            landed.pop(name, None)
        assert alpha.used_pages == sum(-(-done // PAGE) for _, done in held.values())
        assert beta.used_pages == sum(-(-stop // PAGE) for stop in landed.values())
    for end in (alpha, beta):
        for name in held:
            end.remove(name)
        assert sorted(end._pool._free) == list(range(40)), "each page exactly once"

"""Temperature, truncation, seeds and log probabilities, each of its own row."""

import statistics

import pytest
import torch

from stepserve.core.denoising import due_step
from stepserve.core.payload import SamplingParams
from stepserve.core.request import CacheMode, Progress
from stepserve.core.step import Batch
from stepserve.engine.diffusion_offline import denoise
from stepserve.engine.sampling import Position, answer, draw, truncate, uniform

NONE = torch.tensor([], dtype=torch.int64)


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def test_greedy_beside_hot_stays_greedy(tiny, make, executor):
    """Settings must not land on other rows, in any order of the rows."""
    loaded = tiny(seed=5)
    greedy = make("greedy", prompt=7, seed=1)
    expected = denoise(executor(loaded), [greedy], 0.7)["greedy"].token_ids
    hot = [make(f"hot{i}", prompt=7, seed=1, temperature=1.5) for i in range(3)]
    for rows in ([greedy, *hot], [*hot, greedy], [hot[0], greedy, hot[1]]):
        assert denoise(executor(loaded), rows, 0.7)["greedy"].token_ids == expected


def test_seeds_reproduce_and_differ(tiny, make, executor):
    """Samples at temperature 1 differ; the same seed gives the same output."""
    loaded = tiny(seed=5)

    def sample(seed):
        request, payload = make(prompt=7, seed=0, temperature=1.0)
        sampling = SamplingParams(temperature=1.0, seed=seed)
        payload = type(payload)(payload.prompt_ids, sampling)
        return tuple(denoise(executor(loaded), [(request, payload)], 0.7)["r"].token_ids)

    assert len({sample(seed) for seed in range(5)}) > 1
    assert sample(3) == sample(3)


def test_draws_follow_the_distribution():
    probs = torch.tensor([0.5, 0.0, 0.3, 0.2])
    positions = [Position(k, 0, SamplingParams(temperature=1.0, seed=7)) for k in range(4000)]
    tokens = draw(probs.log().repeat(4000, 1), positions)
    shares = torch.bincount(tokens, minlength=4) / 4000
    assert shares.tolist() == pytest.approx(probs.tolist(), abs=0.03)
    assert shares[1] == 0.0


def test_uniform_numbers_are_uniform_and_independent():
    drawn = [uniform(seed, k, step) for seed in (0, 1) for k in range(50) for step in range(50)]
    assert len(set(drawn)) == len(drawn)
    assert statistics.fmean(drawn) == pytest.approx(0.5, abs=0.02)
    assert statistics.variance(drawn) == pytest.approx(1 / 12, abs=0.005)
    assert statistics.correlation(drawn[:-1], drawn[1:]) == pytest.approx(0.0, abs=0.05)
    assert uniform(1, 0, 0) != uniform(0, 1, 0)


def test_truncation_is_per_row():
    """Top-k, top-p and min-p are all honoured."""
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3]], dtype=torch.float64).repeat(5, 1)
    kept = truncate(
        probs,
        top_k=column(4, 2, 4, 4, 1),
        top_p=column(1.0, 1.0, 0.65, 1.0, 0.0),
        min_p=column(0.0, 0.0, 0.0, 0.6, 1.0),
    )
    assert (kept > 0).tolist() == [
        [True, True, True, True],
        [False, True, False, True],
        [False, True, False, True],
        [False, True, False, True],
        [False, True, False, False],
    ]


def test_confidence_is_the_untempered_probability_of_the_token():
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]])
    cold, hot = SamplingParams(), SamplingParams(temperature=9.0, seed=4, top_k=2)
    answers = answer(logits.clone(), [Position(0, 0, cold), Position(1, 0, hot)], NONE)
    expected = logits.softmax(-1)
    for row, token in enumerate(answers.tokens):
        assert answers.confidence[row] == pytest.approx(expected[row, token].item())


def test_forbidden_tokens_belong_to_their_position():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]] * 3)
    positions = [Position(0, 0, SamplingParams(), forbidden) for forbidden in ((), (2,), (2, 1))]
    assert answer(logits, positions, torch.tensor([3])).tokens == [2, 1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_the_log_softmax_at_the_step_that_settled(tiny, make, executor, temperature):
    """Of the row that asked, beside rows that did not."""
    loaded = tiny(seed=6)
    rows = [
        make("plain", prompt=5, cache=CacheMode.NONE, seed=1),
        make("asks", prompt=9, cache=CacheMode.NONE, seed=2, logprobs=3, temperature=temperature),
        make("bare", prompt=7, cache=CacheMode.NONE, seed=3, logprobs=0),
    ]
    engine = executor(loaded)
    settled = {request.id: {} for request, _ in rows}
    for request, payload in rows:
        engine.add(request, payload, Progress(), {})
    for number in range(3):
        request, payload = rows[1]
        ids = torch.tensor([*payload.prompt_ids, *[1] * 16])
        for offset, token in settled[request.id].items():
            ids[9 + offset] = token
        logits = loaded.model.logits(
            loaded.model.hidden(ids[None], torch.arange(25)[None], _dense)
        )[0]
        logits[:, list(loaded.suppressed_token_ids)] = float("-inf")
        expected = logits.log_softmax(-1)
        done = engine.run(Batch(number, tuple(due_step(r, 0, False, 0.7) for r, _ in rows)))
        for token in done.settled["asks"]:
            row = expected[9 + token.offset]
            assert token.logprob == pytest.approx(row[token.token_id].item(), abs=1e-4)
            best = row.topk(3)
            assert [i for i, _ in token.top] == best.indices.tolist()
            assert [p for _, p in token.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert all(t.logprob is None and t.top == () for t in done.settled["plain"])
        assert all(t.logprob is not None and t.top == () for t in done.settled["bare"])
        for name, tokens in done.settled.items():
            settled[name].update((t.offset, t.token_id) for t in tokens)


def _dense(layer, q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return out.transpose(1, 2)

"""Confidence by slices of the vocabulary is that of all logits at once."""

import math

import pytest
import torch

from stepserve.core.payload import SamplingParams
from stepserve.engine import confidence
from stepserve.engine.confidence import modes, wants_mode
from stepserve.engine.sampling import Position, answer
from support.replayed import executor, random_model, requests, run

VOCAB = 101


class Given:
    """A model whose hidden states are its logits; remembers how many it was asked for at once."""

    def __init__(self):
        self.asked = []

    def logits(self, hidden, ids):
        out = hidden[:, ids].clone()
        self.asked.append(out.shape)
        return out


def position(**sampling):
    forbidden = sampling.pop("forbidden", ())
    return Position(0, 0, SamplingParams(**sampling), forbidden)


def both(logits, positions, suppressed, model=None):
    never = torch.zeros(logits.shape[1], dtype=torch.bool)
    never[suppressed] = True
    ids = torch.tensor(suppressed, dtype=torch.int64)
    return modes(model or Given(), logits, positions, never), answer(logits.clone(), positions, ids)


@pytest.fixture(params=[7, 50, 1000])
def size(request, monkeypatch):
    """Ids in a slice: many slices, few, one."""
    monkeypatch.setattr(confidence, "IDS_PER_SLICE", request.param)
    return request.param


def test_as_of_all_logits(size):
    torch.manual_seed(0)
    logits = 3.0 * torch.randn(40, VOCAB)
    positions = [position(forbidden=(i, 100 - i), logprobs=0) for i in range(40)]
    model = Given()
    got, expected = both(logits, positions, [0, 13, 50, 99], model)
    assert got.tokens == expected.tokens
    assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert got.confidence == pytest.approx(expected.confidence, abs=1e-5)
    assert got.top == {}
    if size >= VOCAB:
        assert got == expected, "to the bit"
    assert max(shape[1] for shape in model.asked) == min(size, VOCAB)
    assert sum(shape[1] for shape in model.asked) == VOCAB


def test_of_equal_logits_the_lowest_id_wins(size):
    logits = torch.zeros(4, VOCAB)
    logits[1, [20, 60, 90]] = 2.0
    logits[2, [6, 7]] = 2.0
    got, expected = both(logits, [position(forbidden=(0, 1, 2))] + [position()] * 3, [0])
    assert got.tokens == expected.tokens == [3, 20, 6, 1]


def test_what_must_not_stand_there_does_not(size):
    """Though it is the best by far, or nearly all is ruled out."""
    logits = torch.randn(2, VOCAB)
    logits[:, 50] = 90.0
    logits[0, 51] = 80.0
    logits[1, 51] = -40.0
    rest = tuple(set(range(VOCAB)) - {50, 51})
    got, expected = both(logits, [position(forbidden=(51,)), position(forbidden=rest)], [50])
    assert got.tokens == expected.tokens
    assert got.tokens[1] == 51
    assert got.confidence[1] == 1.0


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("token", [0, 55, 100])
def test_a_logit_that_is_no_number_shows_in_its_row_alone(size, wrong, token):
    logits = torch.randn(3, VOCAB)
    logits[1, token] = wrong
    got, expected = both(logits, [position()] * 3, [])
    finite = [math.isfinite(c) for c in got.confidence]
    assert finite == [math.isfinite(c) for c in expected.confidence] == [True, False, True]


def test_only_the_most_probable_token_is_asked_of_it():
    assert wants_mode(position())
    assert wants_mode(position(logprobs=0, forbidden=(3,)))
    assert not wants_mode(position(logprobs=1))
    assert not wants_mode(position(temperature=0.1))


@pytest.mark.parametrize("shape", ["dream", "causal"])
def test_no_more_logits_exist_than_a_slice(shape, monkeypatch):
    """In a batch of greedy rows; others come out as ever beside them."""
    loaded = random_model(shape, seed=3)
    greedy, drawn = requests(shape, 4), requests(shape, 7, temperature=1.0, logprobs=2)[4:]
    expected = run(executor(loaded, "off"), greedy)
    mixed = run(executor(loaded, "off"), [drawn[0], *greedy, *drawn[1:]])
    sizes, logits = [], loaded.model.logits

    def told(hidden, ids=None):
        out = logits(hidden, ids)
        sizes.append((ids is None, out.shape[1]))
        return out

    monkeypatch.setattr(loaded.model, "logits", told)
    monkeypatch.setattr(confidence, "IDS_PER_SLICE", 9)
    sliced = run(executor(loaded, "off"), greedy)
    assert set(sizes) == {(False, 9), (False, 4)}
    for name, result in expected.items():
        assert sliced[name].token_ids == result.token_ids == mixed[name].token_ids
    again = run(executor(loaded, "off"), [drawn[0], *greedy, *drawn[1:]])
    assert {k: r.token_ids for k, r in again.items()} == {k: r.token_ids for k, r in mixed.items()}
    assert [token.top for token in again["5"].tokens] == [t.top for t in mixed["5"].tokens]

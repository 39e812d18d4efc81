"""Tokens chosen from shares of the vocabulary are those chosen from all of it."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from stepserve.core.payload import SamplingParams
from stepserve.engine.parallel import Group
from stepserve.engine.sampling import Position, answer
from stepserve.engine.vocabulary import answer_apart

SUPPRESSED = torch.tensor([0, 1, 17])


class Thread(Group):
    """A rank that is a thread; counts the numbers it sends."""

    def __init__(self, rank, size, slots, barrier):
        self.rank, self.size = rank, size
        self._slots, self._barrier = slots, barrier
        self.sent = 0

    def all_gather(self, x):
        self.sent += x.numel()
        self._slots[self.rank] = x
        self._barrier.wait()
        together = torch.stack(list(self._slots))
        self._barrier.wait()
        return together


def apart(logits, positions, size, suppressed=SUPPRESSED):
    """Every rank's answers, which must be one, and the numbers that each sent."""
    vocab = logits.shape[1]
    share = -(-vocab // size)
    padded = torch.nn.functional.pad(logits, (0, share * size - vocab), value=9.0)
    slots, barrier = [None] * size, threading.Barrier(size, timeout=30)
    groups = [Thread(rank, size, slots, barrier) for rank in range(size)]

    def one(group):
        part = padded[:, group.rank * share : (group.rank + 1) * share].clone()
        return answer_apart(part, positions, suppressed, vocab, group)

    with ThreadPoolExecutor(size) as pool:
        first, *others = pool.map(one, groups)
    assert all(str(other) == str(first) for other in others), "every rank knows the same"
    return first, [group.sent for group in groups]


MODES = {
    "greedy": {},
    "hot": {"temperature": 1.3},
    "cold": {"temperature": 0.2},
    "top-p": {"temperature": 1.0, "top_p": 0.7},
    "top-k": {"temperature": 0.8, "top_k": 3},
    "min-p": {"temperature": 1.5, "min_p": 0.1},
    "all of them": {"temperature": 1.1, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
}


def positions_of(modes, count, chance):
    return [
        Position(
            i,
            i % 3,
            SamplingParams(seed=i // 2, logprobs=(None, 0, 3, 60)[i % 4], **modes[i % len(modes)]),
            tuple(torch.randint(0, 50, (i % 3,), generator=chance).tolist()),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("mode", [*MODES, "a mixture"])
def test_answers_are_those_of_the_whole_vocabulary(mode, size):
    chance = torch.Generator().manual_seed(size)
    modes = list(MODES.values()) if mode == "a mixture" else [MODES[mode]]
    for vocab, sharpness in ((50, 0.5), (51, 2.0), (50, 8.0)):
        positions = positions_of(modes, 40, chance)
        logits = sharpness * torch.randn(40, vocab, generator=chance)
        whole = answer(logits.clone(), positions, SUPPRESSED)
        got, _ = apart(logits, positions, size)
        assert got.tokens == whole.tokens
        assert got.confidence == pytest.approx(whole.confidence, abs=1e-5)
        assert got.logprobs == pytest.approx(whole.logprobs, abs=1e-5)
        assert got.top.keys() == whole.top.keys()
        for i, best in whole.top.items():
            finite = [(token, value) for token, value in best if value > -math.inf]
            assert [token for token, _ in got.top[i]][: len(finite)] == [t for t, _ in finite]
            assert len(got.top[i]) == len(best)
            values = [value for _, value in got.top[i]]
            assert values == pytest.approx([value for _, value in best], abs=1e-5)


def test_of_equals_the_first_is_chosen_and_nothing_without_probability_is_drawn():
    logits = torch.full((3, 12), -math.inf)
    logits[0, [4, 7, 11]] = 1.0
    logits[1, 6] = 0.0
    logits[2, [2, 9]] = 0.0
    greedy, hot = SamplingParams(), SamplingParams(temperature=1.0)
    positions = [Position(0, 0, greedy), Position(0, 0, hot), Position(0, 0, hot)]
    for size in (2, 3, 5, 12):
        got, _ = apart(logits, positions, size, torch.tensor([0]))
        assert got.tokens[:2] == [4, 6]
        assert got.tokens[2] in (2, 9)
        assert got.confidence == pytest.approx([1 / 3, 1.0, 0.5])


@pytest.mark.parametrize("where", [3, 40])
def test_a_logit_that_is_no_number_spoils_its_row_alone(where):
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    logits[1, where] = math.nan
    positions = [Position(0, 0, SamplingParams(temperature=t)) for t in (0.0, 0.0, 1.0)]
    got, _ = apart(logits, positions, 2)
    assert [math.isnan(value) for value in got.confidence] == [False, True, False]


def test_the_vocabulary_is_gathered_only_for_rows_that_are_truncated():
    vocab, size = 5000, 2
    chance = torch.Generator().manual_seed(0)
    rows = [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}]
    for count, expected in ((1, 3), (2, 2 * 3 + 3), (3, 3 * 3 + 3 + vocab // size)):
        positions = [Position(0, 0, SamplingParams(**row)) for row in rows[:count]]
        _, sent = apart(torch.randn(count, vocab, generator=chance), positions, size)
        assert sent == [expected] * size

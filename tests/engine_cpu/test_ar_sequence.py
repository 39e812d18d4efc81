"""Ends of an autoregressive output: the earliest event in token order wins."""

import pytest

from stepserve.core.errors import FieldError
from stepserve.core.payload import SamplingParams
from stepserve.core.request import FinishReason
from stepserve.engine.sequence import TokenSequence

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def sequence(settled=(), limit=3, eos=(2, 9), **sampling):
    return TokenSequence(
        (5, 6),
        SamplingParams(**sampling),
        limit=limit,
        eos_token_ids=eos,
        settled=dict(enumerate(settled)),
    )


@pytest.mark.parametrize(
    ("tokens", "sampling", "end"),
    [
        ((7, 2), {}, STOP),
        ((7, 9), {}, STOP),
        ((7, 7, 2), {}, STOP),  # at the limit as well
        ((7, 7, 7), {}, LENGTH),
        ((7, 8), {"stop_token_ids": (8,)}, STOP),
        ((2, 2, 2), {"ignore_eos": True}, LENGTH),
        ((2, 8), {"ignore_eos": True, "stop_token_ids": (8,)}, STOP),
    ],
)
def test_where_an_output_ends(tokens, sampling, end):
    growing = sequence(**sampling)
    for count, token in enumerate(tokens, 1):
        assert growing.finished is None
        growing.append(token)
        assert (growing.emitted, len(growing)) == (count, 2 + count)
    assert growing.finished is end
    moved = sequence(tokens, **sampling)
    assert (moved.finished, moved.tokens) == (end, [5, 6, *tokens]), "known on arrival, too"


def test_what_must_not_come_next():
    early = sequence(min_tokens=1, stop_token_ids=(8,))
    assert early.forbidden() == (2, 9, 8)
    early.append(7)
    assert early.forbidden() == ()
    assert sequence(ignore_eos=True).forbidden() == (2, 9)


@pytest.mark.parametrize(
    "settled", [{1: 7}, {0: 7, 2: 7}, {0: 2, 1: 7}, dict.fromkeys(range(4), 7)]
)
def test_an_output_with_holes_or_beyond_its_end_is_refused(settled):
    with pytest.raises(FieldError, match="settled"):
        TokenSequence((5,), SamplingParams(), limit=3, eos_token_ids=(2,), settled=settled)

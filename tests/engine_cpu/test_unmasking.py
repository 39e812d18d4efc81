import struct

import pytest

from stepserve.core.errors import FieldError
from stepserve.core.payload import SamplingParams
from stepserve.engine.canvas import Canvas
from stepserve.engine.unmasking import choose


def single(value):
    return struct.unpack("f", struct.pack("f", value))[0]


def test_strictly_above_the_threshold():
    assert choose([0.95, 0.5, 0.91], 0.9) == ([0, 2], 0)


@pytest.mark.parametrize("threshold", [0.5, 0.6, 0.7, 0.8, 0.9])
def test_equal_is_not_above_in_float32(threshold):
    at = single(threshold)
    assert choose([0.1, at], threshold) == ([1], 1)
    assert choose([at, single(at + 1e-7)], threshold) == ([1], 0)


def test_the_most_confident_one_when_none_passes():
    assert choose([0.2, 0.4, 0.4], 0.9) == ([1], 1)


def test_a_cap_settles_all_and_counts_the_forced_ones():
    assert choose([0.95, 0.4, 0.3], 0.9, settle_all=True) == ([0, 1, 2], 2)


@pytest.mark.parametrize("settled", [{-1: 5}, {16: 5}, {0: 1}])
def test_impossible_settled_tokens_are_refused(make, settled):
    request, _ = make(output=16)
    with pytest.raises(FieldError, match="settled"):
        Canvas(request, SamplingParams(), mask_token_id=1, eos_token_ids=(2,), settled=settled)


def test_emitted_is_the_contiguous_prefix(make):
    request, _ = make(output=12, block=8)
    canvas = Canvas(request, SamplingParams(), mask_token_id=1, eos_token_ids=(2,), settled={})
    canvas.settle({1: 9, 2: 9})
    assert (canvas.settled, canvas.emitted, canvas.finished) == (2, 0, None)
    canvas.settle({0: 9})
    assert canvas.emitted == 3
    assert canvas.masked(canvas.block) == [3, 4, 5, 6, 7]
    canvas.settle(dict.fromkeys(range(3, 8), 9))
    assert canvas.block == range(8, 16)
    assert canvas.masked(canvas.block) == [8, 9, 10, 11]

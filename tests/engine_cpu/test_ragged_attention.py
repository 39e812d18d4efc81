"""Rows of several lengths in one call, where PyTorch can; on CPU its kernel is played."""

import sys
from types import SimpleNamespace

import pytest
import torch

from stepserve.core.request import CacheMode
from stepserve.engine import attention
from stepserve.engine.attention import Group, Ragged, attend, takes_ragged, whole_groups
from support.replayed import executor, random_model, requests, run

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_where_it_is_used(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert takes_ragged(torch.bfloat16, CUDA)
    assert takes_ragged(torch.float16, CUDA)
    assert not takes_ragged(torch.float32, CUDA)
    assert not takes_ragged(torch.bfloat16, CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not takes_ragged(torch.float16, CUDA)


def test_groups_of_whole_rows(monkeypatch):
    lengths = [4, 4, 6, 4]
    plain = whole_groups(10, lengths, torch.bfloat16, CPU)
    assert plain == [Group(10, 2, 4), Group(18, 1, 6), Group(24, 1, 4)]
    monkeypatch.setattr(attention, "takes_ragged", lambda dtype, device: True)
    (group,) = whole_groups(10, lengths, torch.bfloat16, CPU)
    assert (group.start, group.tokens, group.longest) == (10, 18, 6)
    assert group.ends.dtype is torch.int32
    assert group.ends.tolist() == [0, 4, 8, 14, 18]
    assert whole_groups(10, [4, 4], torch.bfloat16, CPU) == [Group(10, 2, 4)], "equal ones"
    assert whole_groups(10, [], torch.bfloat16, CPU) == []


@pytest.fixture
def played(monkeypatch):
    """Calls of the kernel, which attends row by row."""
    calls = []

    def varlen_attn(q, k, v, ends, key_ends, longest, longest_key, *, enable_gqa):
        calls.append((ends.tolist(), longest, enable_gqa))
        assert ends is key_ends
        assert longest == longest_key
        assert q.shape[0] == k.shape[0] == v.shape[0] == ends[-1]
        edges = zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        rows = [attend(q[None, a:b], k[None, a:b], v[None, a:b])[0] for a, b in edges]
        return torch.cat(rows)

    monkeypatch.setattr(attention, "takes_ragged", lambda dtype, device: True)
    module = SimpleNamespace(varlen_attn=varlen_attn)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    return calls


@pytest.mark.parametrize("shape", ["llada", "dream"])
def test_recompute_steps_of_unequal_rows_take_one_call(shape, monkeypatch, played):
    """With pages and without beside each other, and beside cached steps of the same batch."""
    loaded = random_model(shape, seed=3)
    rows = requests(shape, 4) + requests(shape, 7, cache=CacheMode.NONE)[4:]
    got = run(executor(loaded, "off"), rows)
    lengths = [r.prompt_tokens + r.max_output_tokens for r, _ in rows]
    first = played[0]
    assert [b - a for a, b in zip(first[0], first[0][1:], strict=False)] == [
        *sorted(lengths[:4]),
        *sorted(lengths[4:]),
    ]
    assert first[1:] == (max(lengths), shape == "dream")
    monkeypatch.setattr(attention, "takes_ragged", lambda dtype, device: False)
    expected = run(executor(loaded, "off"), rows)
    assert {k: r.token_ids for k, r in got.items()} == {k: r.token_ids for k, r in expected.items()}


def test_the_kernel_takes_what_it_is_given():
    """Its own checks and shapes, on tensors without values."""
    with torch.device("meta"):
        q, k = torch.empty(18, 4, 64), torch.empty(18, 2, 64)
        ends = torch.empty(4, dtype=torch.int32)
    out = attention.ragged(q.bfloat16(), k.bfloat16(), k.bfloat16(), Ragged(0, 18, 6, ends))
    assert out.shape == q.shape

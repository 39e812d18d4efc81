import dataclasses
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepserve.core.config import ControlConfig
from stepserve.core.errors import FieldError
from stepserve.core.instance import Link, Work
from stepserve.core.protocols import Parts
from stepserve.core.step import Mix
from stepserve.cost import segment_cost
from stepserve.cost.batch_table import BatchTable
from stepserve.cost.roofline import roofline_on_a100
from stepserve.cost.segment_cost import Elapsed, Occupancy
from support.toy_world import make_spec

SPEC = make_spec()
LINE = roofline_on_a100("qwen2.5-14b")
LINK = Link(LINE.kv_bytes_per_token, 25e9, 50e-6)
CONFIG = Occupancy.Options()
TBT_100 = Occupancy.Options(safety=1.0, overhead_s=0.0)


def make(cls, cost, options, **control):
    return cls(options, Parts(None, cost, ControlConfig(**control), LINK))


class Known:
    """A cost model that is the roofline, and counts what it is asked."""

    def __init__(self, line=LINE):
        self.line, self.asked = line, 0

    def step_time_s(self, tokens, rows, spec, mix=None):
        self.asked += 1
        assert tokens == mix.prefill_tokens + mix.decodes
        assert rows == mix.decodes + (mix.prefill_tokens > 0)
        return self.line.seconds(mix) if tokens else 0.0

    def observe(self, tokens, rows, spec, seconds, mix=None):
        raise AssertionError("segment costs do not teach")


def learned(seed):
    """A table that has seen 300 batches of a noisy machine."""
    table, rng = BatchTable({1: LINE}), random.Random(seed)
    for _ in range(300):
        prefill, decodes = rng.choice((0, rng.randrange(1, 1500))), rng.randrange(1, 100)
        pairs = prefill * rng.randrange(0, 5000) + prefill * (prefill + 1) // 2
        mix = Mix(prefill, pairs, decodes, decodes * rng.randrange(200, 4000))
        seconds = 1.3 * LINE.seconds(mix) * rng.gauss(1.0, 0.1)
        table.observe(prefill + decodes, 1, SPEC, seconds, mix)
    return table


TABLES = [learned(seed) for seed in range(3)]
counts = st.integers(0, 4000)
works = st.builds(Work, st.integers(0, 8000), st.integers(0, 8000), st.floats(0.0, 2000.0))
loads = st.lists(works, max_size=40).map(tuple)


def cut(prompt, output, s):
    """The segments ``[0, s)`` and ``[s, end)`` of a request (DynaServe 3.1)."""
    alpha = Work(min(s, prompt), 0, float(max(0, s - prompt)))
    beta = Work(max(0, prompt - s), min(s, prompt), float(output - max(0, s - prompt)))
    return alpha, beta if s <= prompt else beta._replace(context_tokens=s)


@pytest.mark.parametrize(
    ("prompt", "output", "published"),
    [(8192, 32, 4608), (2048, 512, 1536), (219, 1467, 1136), (1500, 13, 750)],
)
def test_the_worked_examples_of_the_specification(prompt, output, published):
    """DynaServe 3.4: both instances hold 32 decodes of context 1024; the cut that balances."""
    cost, held = make(Occupancy, Known(), TBT_100), tuple([Work(0, 1024, 1.0)] * 32)

    def sides(s):
        alpha, beta = cut(prompt, output, s)
        return cost.seconds(held, alpha, SPEC), cost.seconds(held, beta, SPEC)

    even = min(range(prompt + output), key=lambda s: abs(sides(s)[0] - sides(s)[1]))
    assert even == pytest.approx(published, rel=0.10)


def test_an_idle_instance_takes_the_time_that_the_steps_take():
    """Machine time and elapsed time of a prompt are the same; those of its decodes are not."""
    chunks_s = sum(
        LINE.seconds(Mix(512, 512 * c + 512 * 513 // 2, 0, 0)) for c in range(0, 2048, 512)
    )
    steps_s = sum(LINE.seconds(Mix(0, 0, 1, 2048 + n)) for n in range(512))
    busy, played = (make(kind, Known(), TBT_100) for kind in (Occupancy, Elapsed))
    for cost in (busy, played):
        assert cost.seconds((), Work(2048, 0, 0.0), SPEC) == pytest.approx(chunks_s, rel=0.02)
    whole = Work(2048, 0, 512.0)
    assert played.seconds((), whole, SPEC) == pytest.approx(chunks_s + steps_s, rel=0.02)
    assert chunks_s < busy.seconds((), whole, SPEC) < chunks_s + steps_s / 10


def test_a_decode_costs_an_idle_instance_no_more_than_one_that_decodes():
    """Else a long answer would go where others are decoded, and an idle instance stay idle."""
    cost, work = make(Occupancy, Known(), CONFIG), Work(0, 1024, 500.0)
    alone_s = cost.seconds((), work, SPEC)
    for others in (1, 8, 32, 128):
        busy = (work,) * others
        beside_s = cost.seconds(busy, work, SPEC) - cost.seconds(busy, None, SPEC)
        assert 0.0 < alone_s <= 1.01 * beside_s
    assert alone_s < 500 * LINE.weight_bytes / LINE.bytes_per_s / 50


def test_what_is_held_is_counted_as_it_would_be_if_it_were_added():
    cost, held = make(Occupancy, Known(), CONFIG), (Work(3000, 100, 50.0), Work(0, 700, 90.0))
    backlog_s = cost.seconds(held, None, SPEC)
    apart_s = [cost.seconds(held, work, SPEC) - backlog_s for work in held]
    assert backlog_s == pytest.approx(sum(apart_s))
    assert cost.seconds((), None, SPEC) == 0.0


def steps(works, chunk):
    """Seconds of the same by playing every batch: decodes, then prefill up to the budget."""
    left = [list(work) for work in works]
    seconds = 0.0
    while any(p or d > 0 for p, _, d in left):
        prefill = pairs = decodes = context = 0
        room = chunk(
            [(c, d) for p, c, d in left if not p and d > 0],
        )
        for entry in left:
            p, c, d = entry
            if not p and d > 0:
                decodes, context = decodes + 1, context + c
                entry[1:] = c + 1, d - 1
            elif p:
                n = min(p, room)
                prefill, pairs, room = prefill + n, pairs + n * c + n * (n + 1) // 2, room - n
                entry[:2] = p - n, c + n
        seconds += LINE.seconds(Mix(prefill, pairs, decodes, context))
    return seconds


def fits(decoding):
    context = sum(c for c, _ in decoding)
    sizes = range(0, 2049, 16)
    good = [
        n for n in sizes if LINE.seconds(Mix(n, n * (n + 1) // 2, len(decoding), context)) <= 0.1
    ]
    return max(good[-1], 64)


@pytest.mark.parametrize("seed", range(4))
def test_elapsed_is_what_playing_every_batch_takes(seed):
    rng = random.Random(seed)
    held = tuple(
        Work(rng.choice((0, rng.randrange(1, 4000))), rng.randrange(0, 2000), rng.randrange(1, 200))
        for _ in range(rng.randrange(1, 10))
    )
    seconds = make(Elapsed, Known(), TBT_100).seconds(held, None, SPEC)
    assert seconds == pytest.approx(steps(held, fits), rel=0.06)


def test_elapsed_gives_up_after_so_many_events_but_not_on_the_work(monkeypatch):
    held = tuple(Work(100 + n, 0, 20.0 + n) for n in range(30))
    full = make(Elapsed, Known(), CONFIG).seconds(held, None, SPEC)
    monkeypatch.setattr(segment_cost, "MOST_EVENTS", 10)
    short = make(Elapsed, Known(), CONFIG).seconds(held, None, SPEC)
    assert short == pytest.approx(full, rel=0.5)
    assert short != full


@given(loads, works, works, st.sampled_from([Known(), *TABLES]))
@settings(max_examples=150, deadline=None)
def test_added_work_never_takes_less_than_a_part_of_it(held, added, more, model):
    """Any of its three numbers less; and no work takes no time."""
    cost = make(Occupancy, model, CONFIG)
    larger = Work(*(a + b for a, b in zip(added, more, strict=True)))
    none_s = cost.seconds(held, None, SPEC)
    assert 0.0 <= none_s <= cost.seconds(held, added, SPEC) <= cost.seconds(held, larger, SPEC)
    assert cost.seconds(held, Work(0, 500, 0.0), SPEC) == none_s


@given(loads, st.integers(1, 8000), st.integers(1, 1500), st.data())
@settings(max_examples=100, deadline=None)
def test_a_later_cut_costs_the_first_side_more_and_the_second_less(held, prompt, output, data):
    """What the bisection of DynaServe 3.5 relies on, with tables learned from a noisy machine."""
    cost = make(Occupancy, data.draw(st.sampled_from(TABLES)), CONFIG)
    early, late = sorted(data.draw(st.tuples(*[st.integers(0, prompt + output)] * 2)))
    (a, b), (c, d) = cut(prompt, output, early), cut(prompt, output, late)
    slack = 1.0 + 1e-9
    assert cost.seconds(held, a, SPEC) <= cost.seconds(held, c, SPEC) * slack
    assert cost.seconds(held, d, SPEC) <= cost.seconds(held, b, SPEC) * slack


@given(loads, works)
@settings(max_examples=40, deadline=None)
def test_elapsed_with_added_work_is_never_less_than_without(held, added):
    cost = make(Elapsed, TABLES[0], CONFIG)
    assert 0.0 <= cost.seconds(held, None, SPEC) <= cost.seconds(held, added, SPEC)


def test_time_between_tokens_is_that_of_a_batch_of_all_decodes():
    cost = make(Occupancy, Known(), CONFIG)
    held = (Work(0, 1000, 40.0), Work(500, 100, 20.0), Work(300, 0, 0.0))
    batch_s = LINE.seconds(Mix(0, 0, 2, 1020 + 610))
    assert cost.tbt_s(held, None, SPEC) == pytest.approx(batch_s)
    assert cost.tbt_s(held, Work(64, 0, 0.0), SPEC) == pytest.approx(batch_s)
    more_s = cost.tbt_s(held, Work(64, 0, 10.0), SPEC)
    assert more_s == pytest.approx(LINE.seconds(Mix(0, 0, 3, 1630 + 69)))
    assert cost.tbt_s((), None, SPEC) == 0.0


def test_held_work_is_looked_at_once_and_again_when_it_changed():
    model = Known()
    cost, held = make(Occupancy, model, CONFIG), tuple([Work(10, 500, 90.0)] * 50)
    cost.seconds(held, None, SPEC)
    first = model.asked
    for n in range(20):
        cost.seconds(held, Work(n, 0, 5.0), SPEC)
        cost.seconds((*held,), Work(n, 0, 5.0), SPEC)
    assert model.asked == first <= 16
    longer = (*held, Work(10, 500, 90.0))
    assert cost.seconds(longer, None, SPEC) > cost.seconds(held, None, SPEC)
    other = dataclasses.replace(SPEC, id="i1")
    before = cost.seconds(held, None, SPEC)
    cost.seconds((), None, other)
    assert cost.seconds(held, None, SPEC) == before


def test_rates_follow_a_cost_model_that_learns():
    model = Known()
    cost, work = make(Occupancy, model, CONFIG), Work(1000, 0, 100.0)
    before = cost.seconds((), work, SPEC)
    model.line = dataclasses.replace(LINE, flops_per_s=LINE.flops_per_s / 2, base_s=0.01)
    for _ in range(100):
        after = cost.seconds((), work, SPEC)
    assert after > 1.2 * before


def test_a_static_chunk_is_taken_where_no_target_bounds_batches():
    prompt = Work(4096, 0, 0.0)
    whole = dataclasses.replace(TBT_100, tbt_s=math.inf)
    unbound = make(Occupancy, Known(), whole, chunk_tokens=4096).seconds((), prompt, SPEC)
    assert unbound == pytest.approx(LINE.seconds(Mix(4096, 4096 * 4097 // 2)), rel=0.01)
    assert unbound < make(Occupancy, Known(), TBT_100).seconds((), prompt, SPEC)


def test_an_overloaded_instance_still_has_a_rate_for_prefill():
    crowd = tuple([Work(0, 8000, 100.0)] * 200)
    cost = make(Occupancy, Known(), CONFIG)
    assert cost.tbt_s(crowd, None, SPEC) > ControlConfig().tbt_s
    assert cost.seconds(crowd, Work(100, 0, 0.0), SPEC) > cost.seconds(crowd, None, SPEC)


def test_transfer_takes_the_link_and_a_round_trip():
    for kind in (Occupancy, Elapsed):
        cost = make(kind, Known(), CONFIG)
        assert cost.transfer_s(0) == 0.0
        assert cost.transfer_s(1024) == pytest.approx(50e-6 + 1024 * 196608 / 25e9)
    with pytest.raises(FieldError, match=r"link\.bytes_per_s"):
        Link(1.0, 0.0)
    with pytest.raises(FieldError, match=r"link\.rtt_s"):
        Link(1.0, 1.0, -1.0)

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepserve.core.step import Mix
from stepserve.cost.batch_table import Accuracy, BatchTable
from stepserve.cost.roofline import roofline_on_a100
from support.toy_world import make_spec

SPEC = make_spec()
LINE = roofline_on_a100("qwen2.5-14b")


def mix_of(prefill=0, context=0, decodes=0, each=1024):
    pairs = prefill * context + prefill * (prefill + 1) // 2
    return Mix(prefill, pairs, decodes, decodes * each)


def ask(table, mix, spec=SPEC):
    return table.step_time_s(mix.prefill_tokens + mix.decodes, 1, spec, mix)


def tell(table, mix, seconds, times=1, spec=SPEC):
    for _ in range(times):
        table.observe(mix.prefill_tokens + mix.decodes, 1, spec, seconds, mix)


def some_mix(rng):
    prefill = rng.choice((0, 0, rng.randrange(1, 2048)))
    decodes = rng.randrange(0 if prefill else 1, 128)
    return mix_of(prefill, rng.randrange(0, 6000), decodes, rng.randrange(150, 4000))


mixes = st.builds(
    mix_of, st.integers(0, 6000), st.integers(0, 9000), st.integers(0, 300), st.integers(1, 40000)
)
observations = st.lists(st.tuples(mixes, st.floats(0.3, 3.0)), max_size=40)


def taught(steps):
    table = BatchTable({1: LINE})
    for mix, factor in steps:
        tell(table, mix, LINE.seconds(mix) * factor)
    return table


def test_an_empty_table_is_the_roofline_and_plans_with_fifteen_per_cent_more():
    table = BatchTable({1: LINE})
    cell = mix_of(512, 0, 32)
    assert table.mean_s(cell, SPEC) == pytest.approx(LINE.seconds(cell))
    assert ask(table, cell) == pytest.approx(1.15 * LINE.seconds(cell))
    assert table.step_time_s(0, 0, SPEC) == table.mean_s(Mix(), SPEC) == 0.0


def test_asked_without_a_mix_the_tokens_are_one_prefill():
    table = BatchTable({1: LINE})
    assert table.step_time_s(700, 1, SPEC) == ask(table, mix_of(700))
    table.observe(700, 1, SPEC, 0.3)
    assert table.accuracy().steps == 1


@given(mixes, st.floats(0.5, 2.0))
@settings(max_examples=25, deadline=None)
def test_what_is_seen_again_and_again_is_believed_wherever_it_lies(mix, factor):
    """Inside of the grid and beyond; what is shown may be 5 % behind."""
    table, seconds = BatchTable({1: LINE}), LINE.seconds(mix) * factor
    if not mix.prefill_tokens + mix.decodes:
        return
    tell(table, mix, seconds, times=300)
    assert table.mean_s(mix, SPEC) == pytest.approx(seconds, rel=0.06)
    assert seconds * 0.95 <= ask(table, mix) <= seconds * 1.2


def test_plans_keep_twice_the_mean_deviation_of_what_varies():
    table, mix = BatchTable({1: LINE}), mix_of(512, 0, 32)
    for turn in range(400):
        tell(table, mix, 0.1 * (0.9 if turn % 2 else 1.1))
    assert table.mean_s(mix, SPEC) == pytest.approx(0.1, rel=0.03)
    assert ask(table, mix) == pytest.approx(0.12, rel=0.06)


def test_cells_never_seen_share_what_the_others_learned():
    table = BatchTable({1: LINE})
    tell(table, mix_of(0, 0, 8), 1.5 * LINE.seconds(mix_of(0, 0, 8)), times=200)
    far = mix_of(1024, 0, 64)
    assert table.mean_s(far, SPEC) == pytest.approx(1.5 * LINE.seconds(far), rel=0.05)


def test_context_of_a_chunk_is_learned_apart_from_its_tokens():
    """The truth's attention is three times the roofline's; predicted at a context never seen."""
    table, rng = BatchTable({1: LINE}), random.Random(5)

    def truth(context):
        return LINE.seconds(mix_of(512)) + 3 * 512 * context * LINE.pair_s

    for _ in range(800):
        context = rng.choice((0, 1000, 4000))
        tell(table, mix_of(512, context), truth(context))
    assert table.mean_s(mix_of(512, 8000), SPEC) == pytest.approx(truth(8000), rel=0.05)


def test_outliers_are_dropped_and_counted_but_not_for_ever():
    table, mix = BatchTable({1: LINE}), mix_of(0, 0, 16)
    tell(table, mix, LINE.seconds(mix), times=20)
    before = ask(table, mix)
    tell(table, mix, 30.0, times=3)
    assert ask(table, mix) == before
    assert table.accuracy().dropped == 3
    wrong = BatchTable({1: LINE})
    tell(wrong, mix, 40 * LINE.seconds(mix), times=150)
    assert wrong.mean_s(mix, SPEC) == pytest.approx(40 * LINE.seconds(mix), rel=0.05)


@given(observations, mixes, st.integers(0, 2000), st.integers(0, 64))
@settings(max_examples=150, deadline=None)
def test_more_prefill_or_more_decodes_never_take_less(steps, mix, tokens, decodes):
    """Whatever was observed, at the same context of each."""
    table = taught(steps)
    prefill, pairs, count, total = mix
    context = (pairs - prefill * (prefill + 1) // 2) // prefill if prefill else 0
    each = total // count if count else 1024
    larger = mix_of(prefill + tokens, context, count + decodes, each)
    for read in (ask, lambda t, m: t.mean_s(m, SPEC)):
        assert read(table, larger) >= read(table, mix) * (1 - 1e-9)
    assert ask(table, mix) >= table.mean_s(mix, SPEC) * (1 - 1e-9)


def test_a_guess_is_held_between_measured_neighbours_not_the_other_way_round():
    """Time is flat in few decodes: what is known of 8 must not rise to the guess for 4."""
    table, mix = BatchTable({1: LINE}), mix_of(0, 0, 8)
    tell(table, mix, LINE.seconds(mix), times=100)
    assert ask(table, mix) < 1.02 * LINE.seconds(mix)
    assert ask(table, mix_of(0, 0, 4)) <= ask(table, mix)


def test_the_gate_of_the_specification_is_passed_on_a_noisy_machine_that_is_no_roofline():
    """8 % median and 20 % p95 after 60 batches of warm-up; prediction before learning."""
    table, rng = BatchTable({1: LINE}), random.Random(11)

    def truth(mix):
        smooth = (LINE.seconds(mix) ** 2 + 0.02**2) ** 0.5
        slow = 1.25 if mix.prefill_tokens else 1.1
        return (slow * smooth + 4e-5 * mix.decodes) * rng.gauss(1.0, 0.03)

    for _ in range(60):
        mix = some_mix(rng)
        tell(table, mix, truth(mix))
    warm = table.accuracy()
    for _ in range(1500):
        mix = some_mix(rng)
        tell(table, mix, truth(mix))
    after = table.accuracy()
    assert after.passes
    assert after.steps == 1560
    assert after.dropped == 0
    assert 0.02 < after.median < warm.median
    assert after.covered > 0.9


def test_accuracy_is_that_of_predictions_made_before():
    table, mix = BatchTable({1: LINE}), mix_of(0, 0, 16)
    assert table.accuracy() == Accuracy(0, 0.0, 0.0, 0.0, 0)
    assert not table.accuracy().passes
    tell(table, mix, 2.0 * LINE.seconds(mix))
    assert table.accuracy() == Accuracy(1, pytest.approx(0.5), pytest.approx(0.5), 0.0, 0)


def test_each_degree_has_a_grid_of_its_own():
    table = BatchTable({1: LINE, 2: roofline_on_a100("qwen2.5-14b", 2)})
    pair, mix = dataclasses.replace(SPEC, tp_degree=2), mix_of(512)
    before = ask(table, mix)
    tell(table, mix, 0.2, times=50, spec=pair)
    assert ask(table, mix) == before
    assert table.mean_s(mix, pair) == pytest.approx(0.2, rel=0.05)
    with pytest.raises(KeyError):
        ask(table, mix, dataclasses.replace(SPEC, tp_degree=4))


def test_what_is_measured_below_its_repaired_value_for_ever_is_learned_when_that_falls():
    """More prefill takes less time here: repair holds the second cell at the first one's."""
    table = BatchTable({1: LINE})
    less, more = mix_of(64, 0, 8), mix_of(128, 0, 8)
    for _ in range(2000):
        tell(table, less, 0.08)
        tell(table, more, 0.04)
    assert table.mean_s(more, SPEC) == pytest.approx(0.08)
    for _ in range(300):
        tell(table, less, 0.03)
        tell(table, more, 0.04)
    assert table.mean_s(more, SPEC) == pytest.approx(0.04, rel=0.05)

"""Finish times of chunks against ones worked out by hand, and what sharing may never do."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepserve.core.errors import FieldError
from stepserve.sim.links import Links


def ends(links, pushes):
    """(time, source, target, bytes) in order of time -> when each chunk is through."""
    done, waiting, now_s = {}, list(enumerate(pushes)), 0.0
    while waiting or links.next_s < math.inf:
        push_s = waiting[0][1][0] if waiting else math.inf
        now_s = min(push_s, links.next_s)
        done.update(dict.fromkeys(links.take(now_s), now_s))
        if push_s <= now_s:
            number, (_, source, target, size) = waiting.pop(0)
            links.push(now_s, source, target, size, number)
    return [done[number] for number in range(len(pushes))]


def test_a_chunk_alone_has_the_whole_card():
    assert ends(Links(100.0), [(1.0, "a", "b", 50.0)]) == [1.5]


def test_chunks_of_a_pair_go_one_after_the_other():
    assert ends(Links(100.0), [(0.0, "a", "b", 50.0), (0.1, "a", "b", 10.0)]) == [0.5, 0.6]


@pytest.mark.parametrize("count", [2, 3, 7])
def test_chunks_to_one_instance_share_its_card(count):
    pushes = [(0.0, f"a{n}", "b", 100.0) for n in range(count)]
    assert ends(Links(100.0), pushes) == pytest.approx([count] * count)


def test_a_later_chunk_halves_the_rate_of_an_earlier_one_until_that_is_through():
    pushes = [(0.0, "a", "b", 100.0), (0.5, "a", "c", 100.0)]
    # 50 bytes alone, then 50 at half the rate until 1.5; the other then has 50 left
    assert ends(Links(100.0), pushes) == pytest.approx([1.5, 2.0])


def test_both_ways_of_a_card_are_independent():
    assert ends(Links(100.0), [(0.0, "a", "b", 100.0), (0.0, "b", "a", 100.0)]) == [1.0, 1.0]


def test_the_busier_card_decides():
    pushes = [(0.0, "a", "b", 100.0), (0.0, "a", "c", 100.0), (0.0, "d", "c", 40.0)]
    # a -> c and d -> c share c's card as a's is shared: all at half the rate
    assert ends(Links(100.0), pushes) == pytest.approx([2.0, 2.0, 0.8])


def test_a_lost_instance_takes_its_chunks_with_it_and_frees_the_others():
    links = Links(100.0)
    links.push(0.0, "a", "b", 100.0, "one")
    links.push(0.0, "a", "b", 100.0, "behind it")
    links.push(0.0, "c", "b", 100.0, "other")
    assert links.drop(0.5, "a") == 2
    assert links.next_s == pytest.approx(0.5 + 0.75)
    assert links.take(links.next_s) == ["other"]
    assert links.next_s == math.inf


@pytest.mark.parametrize("numbers", [(0.0, 0.0), (math.inf, 0.0), (1.0, -1.0), (1.0, math.nan)])
def test_numbers_that_make_no_sense_are_named(numbers):
    with pytest.raises(FieldError, match=r"links\."):
        Links(*numbers)


names = st.sampled_from("abcd")
pushes = st.lists(
    st.tuples(st.floats(0.0, 5.0), names, names, st.floats(1.0, 300.0)).filter(
        lambda push: push[1] != push[2]
    ),
    max_size=25,
)


@given(pushes)
def test_no_card_is_faster_than_it_is_and_pairs_keep_their_order(rows):
    rows = sorted(rows)
    done = ends(Links(100.0), rows)
    for (at_s, source, target, size), end_s in zip(rows, done, strict=True):
        assert end_s >= at_s + size / 100.0 - 1e-9
        for side in (1, 2):  # all that this card had to carry before, at most one after the other
            mine = [
                (r, e)
                for r, e in zip(rows, done, strict=True)
                if r[side] == (source, target)[side - 1]
            ]
            first_s = min(r[0] for r, _ in mine)
            through = sum(r[3] for r, e in mine if e <= end_s)
            assert through <= 100.0 * (end_s - first_s) + 1e-6
    for pair in {row[1:3] for row in rows}:
        order = [end_s for row, end_s in zip(rows, done, strict=True) if row[1:3] == pair]
        assert order == sorted(order)


@given(pushes)
def test_nothing_starves(rows):
    """Everybody is through no later than if all shared one wire at a third of the rate."""
    rows = sorted(rows)
    done = ends(Links(100.0), rows)
    if rows:
        assert max(done) <= rows[-1][0] + 3.0 * sum(row[3] for row in rows) / 100.0 + 1e-6

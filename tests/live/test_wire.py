"""Messages between processes: in order, once, whatever the carrier does to them."""

import multiprocessing
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepserve.live import wire
from stepserve.live.wire import Link, Sequencer, set_clock, take_clock
from support.remote_cluster import scrambled_pair


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(wire, "BEAT_S", 0.01)
    monkeypatch.setattr(wire, "LOOK_S", 0.01)


@given(st.permutations(range(8)), st.lists(st.integers(0, 7)), st.integers(0, 7))
def test_any_order_and_any_repeats_come_out_in_order_and_once(order, repeats, late):
    sequencer = Sequencer()
    numbers = [n for n in [*order, *repeats] if n != late]
    came = [out for n in numbers for out in sequencer.take(n, n)]
    assert came == list(range(late))
    assert sequencer.has_gap is (late < 7)
    assert sequencer.take(late, late) == list(range(late, 8))
    assert not sequencer.has_gap


def test_what_cannot_be_pickled_ends_the_connection(caplog):
    both = Both(*multiprocessing.Pipe())
    both.links[0].send(lambda: None)
    both.end()
    assert "near.send: cannot send" in caplog.text
    assert both.heard == ([], [])


class Both:
    """Two linked ends and what each has heard."""

    def __init__(self, near, far):
        self.heard = [], []
        self.links = (
            Link(near, self.heard[0].append, "near"),
            Link(far, self.heard[1].append, "far"),
        )
        self.threads = [threading.Thread(target=link.run) for link in self.links]
        for thread in self.threads:
            thread.start()

    def end(self):
        for thread in self.threads:
            thread.join()


@pytest.mark.parametrize("seed", range(4))
def test_a_carrier_that_mixes_messages_up_is_not_noticed(seed):
    near, far = scrambled_pair(seed)
    both, items = Both(near, far), list(range(300))
    for item in items:
        for link in both.links:
            link.send(item)
    ways = near._out, far._out
    while not (
        all(len(heard) == len(items) for heard in both.heard)
        and all(way.reordered and way.repeated for way in ways)
    ):
        both.threads[0].join(0.01)
        assert all(thread.is_alive() for thread in both.threads)
    assert not any(link.is_broken(60.0) for link in both.links)
    both.links[0].close()
    both.end()
    assert both.heard == (items, items)


def test_a_message_that_never_comes_breaks_the_link():
    near, far = scrambled_pair(0, lost=[1])
    both = Both(near, far)
    for item in range(50):
        both.links[0].send(item)
    while not both.links[1].is_broken(0.05):
        both.threads[1].join(0.01)
        assert both.threads[1].is_alive()
    assert both.heard[1] == list(range(len(both.heard[1])))
    both.links[1].close()
    both.end()


def test_silence_breaks_the_link():
    near, far = scrambled_pair(0, lost=range(10_000))
    both = Both(near, far)
    while not both.links[1].is_broken(0.05):
        both.threads[1].join(0.01)
        assert both.threads[1].is_alive()
    both.links[1].close()
    both.end()


def test_what_is_queued_is_sent_before_the_end_and_both_ends_end():
    both = Both(*multiprocessing.Pipe())
    for item in range(100):
        both.links[0].send(item)
    both.links[0].close()
    both.end()
    assert both.heard[1] == list(range(100))


def test_clocks_agree_to_half_a_round_trip():
    here, there = multiprocessing.Pipe()
    answers = []
    thread = threading.Thread(target=lambda: answers.append(take_clock(there)))
    thread.start()
    began_s = time.monotonic()
    set_clock(here)
    took_s = time.monotonic() - began_s
    thread.join()
    assert abs(answers[0]) <= took_s, "both ends are on one clock"
    for end in (here, there):
        end.close()


def test_a_clock_that_is_ahead_is_put_right():
    class Ahead:
        """The other end's clock shows 100 s more."""

        def send(self, item):
            self.told_s = item

        def recv(self):
            return time.monotonic() + 100.0

    ahead = Ahead()
    began_s = time.monotonic()
    set_clock(ahead)
    assert ahead.told_s == pytest.approx(-100.0, abs=time.monotonic() - began_s)

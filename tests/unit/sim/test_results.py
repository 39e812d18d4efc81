"""Rows of results, and the early end of a run, on requests whose every token time is known."""

import math
from array import array

import pytest

from stepserve.core.actions import Finish, Reject
from stepserve.core.events import HandedOff, HandoverAcknowledged
from stepserve.core.ids import RequestId
from stepserve.core.request import SLO, Family, FinishReason, Progress, Request
from stepserve.sim.ar_record import ArRecord
from stepserve.sim.record import DiffusionRecord
from stepserve.sim.results import COLUMNS, client_columns, row_of
from stepserve.sim.verdict import EarlyEnd, NotHeldError, held

SLOS = SLO(tbt_s=0.1)


def record(name, arrival_s, times_s, *, whole=True, slo=SLOS):
    request = Request(RequestId(name), Family.AUTOREGRESSIVE, "m", 8, 64, arrival_s, slo)
    finish = Finish(request.id, FinishReason.STOP, None, "")
    answer = finish if whole else Reject(request.id, 1.0, "no room")
    answered_s = times_s[-1] if times_s else arrival_s
    found = ArRecord(request, int(name), answer, answered_s, len(times_s))
    found.times_s = array("d", times_s)
    return found


FAST = record("0", 10.0, [10.5, 10.5625, 10.625, 10.6875])
LATE = record("1", 11.0, [12.0, 12.0625, 12.3125])  # one gap of a quarter second
IMPATIENT = record("2", 12.0, [14.5])
REFUSED = record("3", 13.0, [], whole=False)
ALL = [FAST, LATE, IMPATIENT, REFUSED]


def test_a_row_has_exact_numbers():
    row = client_columns(ALL, patience_s=2.0)
    span_s = 14.5 - 10.0
    assert row["requests"] == 4
    assert row["attainment"] == 0.5  # of the requests: one gap was late, one was refused
    assert row["finished_share"] == 0.75
    assert row["served_share"] == 0.5  # the third began too late, the fourth not at all
    assert row["tbt_attainment"] == 0.8
    assert (row["tbt_p50_s"], row["tbt_p99_s"], row["tbt_max_s"]) == (0.0625, 0.25, 0.25)
    assert row["goodput_tokens_per_s"] == pytest.approx(4 / span_s)
    assert row["goodput_tokens_with_first_per_s"] == pytest.approx(7 / span_s)
    assert row["goodput_requests_per_s"] == pytest.approx(2 / span_s)
    assert (row["ttft_p50_s"], row["ttft_p99_s"]) == (1.0, 2.5)
    assert row["latency_mean_s"] == pytest.approx((0.6875 + 1.3125 + 2.5) / 3)
    assert (row["rejected"], row["failed"]) == (1, 0)


def test_each_request_is_held_to_its_own_targets():
    strict, loose = SLO(tbt_s=0.05), SLO(tbt_s=0.3, ttft_s=0.75)
    records = [
        record("0", 10.0, [10.5, 10.5625], slo=strict),
        record("1", 11.0, [11.5, 11.75], slo=loose),
        record("2", 12.0, [13.0, 13.25], slo=loose),
        record("3", 13.0, [14.0, 15.0], slo=SLO(e2e_s=1.5)),
        record("4", 13.0, [14.0, 15.0], slo=SLO()),
    ]
    row = client_columns(records, patience_s=2.0)
    assert [r.met for r in records] == [False, True, False, False, True]
    assert row["attainment"] == 0.4
    assert row["tbt_attainment"] == 0.8, "a gap without a target is within it"
    assert row["goodput_tokens_with_first_per_s"] == pytest.approx((4 + 4) / 5.0)
    assert client_columns(records[4:], 2.0)["tbt_attainment"] is None


def test_a_row_has_all_columns_and_no_others():
    assert list(row_of({"attainment": 1.0})) == list(COLUMNS)
    assert row_of({})["tbt_p50_s"] is None
    with pytest.raises(AssertionError, match="e2e_mean_s"):
        row_of({"e2e_mean_s": 1.0})


@pytest.mark.parametrize(
    ("tbt_attainment", "served_share", "expected"),
    [(0.99, 0.99, True), (0.989, 1.0, False), (1.0, 0.98, False), (None, 1.0, True)],
)
def test_a_rate_is_held_by_gaps_and_by_answers(tbt_attainment, served_share, expected):
    row = {"tbt_attainment": tbt_attainment, "served_share": served_share, "attainment": 0.0}
    assert held(row | {"family": "autoregressive"}, 0.99) is expected


@pytest.mark.parametrize(("attainment", "expected"), [(0.95, True), (0.94, False)])
def test_a_rate_of_diffusion_requests_is_held_by_deadlines(attainment, expected):
    assert held(row_of({"family": "diffusion", "attainment": attainment}), 0.95) is expected


def test_the_gap_of_a_handover_is_told_apart():
    """Alpha emits two tokens, beta the rest: the gap between the second and the third."""
    split = record("4", 0.0, [1.0, 1.0625, 1.25, 1.3125])
    split.tokens, split.answer = 2, None
    split.handed_off(1.0625, HandedOff(split.request.id, 1, Progress(9, 2)))
    split.acknowledged(1.125, HandoverAcknowledged(split.request.id, 1))
    assert split.handover_gaps_s() == [0.1875]
    assert [h.exposed_s for h in split.handovers] == [0.0625]


class Clockwork:
    """As much of a world as an early end needs: its checks run at their times."""

    def __init__(self, records):
        self.now_s = 0.0
        self.all = {r.request.id: r for r in records}
        self.due = []

    @property
    def records(self):
        """As the world knows them now: later tokens have not come yet."""
        seen = {}
        for name, whole in self.all.items():
            if whole.request.arrival_s > self.now_s:
                break
            part = type(whole)(whole.request, whole.index)
            if isinstance(whole, ArRecord):
                part.times_s = array("d", [t for t in whole.times_s if t <= self.now_s])
                part.tokens = len(part.times_s)
            part.answer = whole.answer if whole.answered_s <= self.now_s else None
            part.answered_s = whole.answered_s
            seen[name] = part
        return seen

    def at(self, when_s, priority, call, a, b=None):
        self.due.append((when_s, call))

    def run(self):
        while self.due:
            self.now_s, call = self.due.pop()
            call(None, None)


def watched(records, gaps, patience_s=2.0, hold=0.99):
    world = Clockwork(records)
    EarlyEnd(world, [r.request.id for r in records], gaps, hold, patience_s)
    return world


def steady(name, gap_s, tokens):
    start_s = name * 1.0
    return record(str(name), start_s, [start_s + 0.5 + gap_s * k for k in range(tokens)])


def test_one_late_gap_in_a_hundred_is_allowed():
    records = [steady(n, 0.0625, 101) for n in range(4)]
    late = records[1].times_s
    records[1].times_s = array("d", [*late[:50], *(t + 0.5 for t in late[50:])])
    watched(records, gaps=101).run()


def test_a_second_late_gap_ends_the_run_before_its_time():
    records = [steady(n, 0.0625, 101) for n in range(4)] + [steady(50, 0.0625, 101)]
    for r, at in ((records[1], 50), (records[2], 7)):
        r.times_s = array("d", [*r.times_s[:at], *(t + 0.5 for t in r.times_s[at:])])
    world = watched(records, gaps=199)
    with pytest.raises(NotHeldError):
        world.run()
    assert world.now_s < 10.0


def test_waiting_too_long_for_a_first_token_ends_a_run_even_if_it_never_comes():
    never = record("0", 1.0, [], whole=False)
    never.answered_s = math.inf
    world = watched([never], gaps=100)
    with pytest.raises(NotHeldError):
        world.run()
    assert 3.0 < world.now_s <= 6.0


def test_missed_deadlines_end_a_run():
    def denoised(n, latency_s):
        request = Request(RequestId(str(n)), Family.DIFFUSION, "m", 8, 64, n * 0.1, SLO(e2e_s=1.0))
        finish = Finish(request.id, FinishReason.LENGTH, None, "")
        return DiffusionRecord(request, n, finish, n * 0.1 + latency_s)

    watched([denoised(n, 0.5 + (n < 2)) for n in range(20)], 0, hold=0.9).run()
    with pytest.raises(NotHeldError):
        watched([denoised(n, 0.5 + (n < 3)) for n in range(20)], 0, hold=0.9).run()

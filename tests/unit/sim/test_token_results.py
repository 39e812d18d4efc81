"""Rows of results, and the judge of a run, on requests whose every token time is known."""

import math
from array import array
from types import SimpleNamespace

import pytest

from stepserve.core.actions import Finish, Reject
from stepserve.core.events import HandedOff, HandoverAcknowledged
from stepserve.core.ids import RequestId
from stepserve.core.request import Family, FinishReason, Progress, Request
from stepserve.sim.ar_record import ArRecord
from stepserve.sim.token_config import TokenSetting
from stepserve.sim.token_results import held, token_summary
from stepserve.sim.token_watch import HopelessError, Judge

SETTING = TokenSetting(tbt_s=0.1, patience_s=2.0)
GROWTH = SimpleNamespace(growth=3)


def record(name: str, arrival_s: float, times_s: list[float], *, whole: bool = True) -> ArRecord:
    request = Request(RequestId(name), Family.AUTOREGRESSIVE, "m", 8, 64, arrival_s)
    answer = (
        Finish(request.id, FinishReason.STOP, None, "")
        if whole
        else Reject(request.id, 1.0, "no room")
    )
    answered_s = times_s[-1] if times_s else arrival_s
    found = ArRecord(request, int(name), answer, answered_s, len(times_s))
    found.times_s = array("d", times_s)
    return found


FAST = record("0", 10.0, [10.5, 10.5625, 10.625, 10.6875])
LATE = record("1", 11.0, [12.0, 12.0625, 12.3125])  # one gap of a quarter second
IMPATIENT = record("2", 12.0, [14.5])
REFUSED = record("3", 13.0, [], whole=False)


def test_a_row_has_exact_numbers() -> None:
    row = token_summary(SETTING, [FAST, LATE, IMPATIENT, REFUSED], GROWTH)  # type: ignore[arg-type]
    span_s = 14.5 - 10.0
    assert row["requests"] == 4
    assert row["finished_share"] == 0.75
    assert row["served_share"] == 0.5  # the third began too late, the fourth not at all
    assert row["attainment"] == 0.8
    assert (row["tbt_p50_s"], row["tbt_p99_s"], row["tbt_max_s"]) == (0.0625, 0.25, 0.25)
    assert row["goodput_tokens_per_s"] == 4 / span_s
    assert row["goodput_tokens_with_first_per_s"] == 7 / span_s
    assert row["goodput_requests_per_s"] == 2 / span_s
    assert (row["ttft_p50_s"], row["ttft_p99_s"]) == (1.0, 2.5)
    assert row["e2e_mean_s"] == pytest.approx((0.6875 + 1.3125 + 2.5) / 3)
    assert row["queue_growth"] == 3


def test_with_a_target_only_first_tokens_in_time_are_good() -> None:
    setting = TokenSetting(tbt_s=0.1, ttft_s=0.75)
    row = token_summary(setting, [FAST, LATE, IMPATIENT], GROWTH)  # type: ignore[arg-type]
    assert row["goodput_tokens_with_first_per_s"] == 5 / 4.5
    assert row["goodput_requests_per_s"] == 1 / 4.5


@pytest.mark.parametrize(
    ("tbt_p99_s", "served_share", "expected"),
    [(0.1, 0.99, True), (0.1001, 1.0, False), (0.05, 0.98, False), (None, 1.0, True)],
)
def test_a_rate_is_held_by_gaps_and_by_answers(
    tbt_p99_s: float | None, served_share: float, expected: bool
) -> None:
    assert held({"tbt_p99_s": tbt_p99_s, "served_share": served_share}, SETTING) is expected


def test_the_gap_of_a_handover_is_told_apart() -> None:
    """Alpha emits two tokens, beta the rest: the gap between the second and the third."""
    split = record("4", 0.0, [1.0, 1.0625, 1.25, 1.3125])
    split.tokens, split.answer = 2, None
    split.handed_off(1.0625, HandedOff(split.request.id, 1, Progress(9, 2)))
    split.acknowledged(1.125, HandoverAcknowledged(split.request.id, 1))
    assert split.handover_gaps_s() == [0.1875]
    assert [h.exposed_s for h in split.handovers] == [0.0625]


class Clockwork:
    """As much of a world as a judge needs: its checks run at their times."""

    def __init__(self, records: list[ArRecord]) -> None:
        self.now_s = 0.0
        self.all = {r.request.id: r for r in records}
        self.due: list[tuple[float, object]] = []

    @property
    def records(self) -> dict[RequestId, ArRecord]:
        """As the world knows them now: later tokens have not come yet."""
        seen = {}
        for name, whole in self.all.items():
            if whole.request.arrival_s > self.now_s:
                break
            part = ArRecord(whole.request, whole.index)
            part.times_s = array("d", [t for t in whole.times_s if t <= self.now_s])
            part.answer = whole.answer if whole.answered_s <= self.now_s else None
            seen[name] = part
        return seen

    def at(self, when_s: float, priority: int, call: object, a: object, b: object = None) -> None:
        self.due.append((when_s, call))

    def run(self) -> None:
        while self.due:
            self.now_s, call = self.due.pop()
            call(None, None)  # type: ignore[operator]


def judge(records: list[ArRecord], gaps: int, patience_s: float = 2.0) -> Clockwork:
    world = Clockwork(records)
    names = [r.request.id for r in records]
    Judge(world, names, gaps, 0.1, patience_s)  # type: ignore[arg-type]
    return world


def steady(name: int, gap_s: float, tokens: int) -> ArRecord:
    start_s = name * 1.0
    return record(str(name), start_s, [start_s + 0.5 + gap_s * k for k in range(tokens)])


def test_one_late_gap_in_a_hundred_is_allowed() -> None:
    records = [steady(n, 0.0625, 101) for n in range(4)]
    late = records[1].times_s
    records[1].times_s = array("d", [*late[:50], *(t + 0.5 for t in late[50:])])
    judge(records, gaps=100).run()


def test_a_second_late_gap_ends_the_run_before_its_time() -> None:
    records = [steady(n, 0.0625, 101) for n in range(4)] + [steady(50, 0.0625, 101)]
    for r, at in ((records[1], 50), (records[2], 7)):
        r.times_s = array("d", [*r.times_s[:at], *(t + 0.5 for t in r.times_s[at:])])
    world = judge(records, gaps=199)
    with pytest.raises(HopelessError):
        world.run()
    assert world.now_s < 10.0


def test_waiting_too_long_for_a_first_token_ends_a_run_even_if_it_never_comes() -> None:
    never = record("0", 1.0, [], whole=False)
    never.answered_s = math.inf
    world = judge([never], gaps=100)
    with pytest.raises(HopelessError):
        world.run()
    assert 3.0 < world.now_s <= 6.0

"""Formulas on traces small enough to work out by hand."""

import io
from dataclasses import replace
from math import sqrt

import pytest
from rich.console import Console

from stepserve.cli.client import Outcome, Reply, TextEvent
from stepserve.cli.drive import Record
from stepserve.cli.report import (
    Difference,
    Scored,
    Share,
    Spread,
    summarise,
    tables,
    three_digits,
    tpot_s,
)
from stepserve.cli.watch import ServerSide


def reply(ended_s, events=(), outcome=Outcome.COMPLETED, tokens=None, sent_s=0.0, **told):
    pieces = [TextEvent(*event) for event in events]
    return Reply(sent_s, ended_s, outcome, events=pieces, tokens=tokens, told=told)


def cost(threshold, forwards):
    return {"dlm.threshold_mean": threshold, "metrics.forwards": forwards}


def scored(due_s, answer, deadline_s=None, correct=None):
    return Scored(Record(due_s, answer), deadline_s, correct)


# A block-wise answer: 4 tokens at 1.0, 8 more at 1.5, the last 4 at 3.0.
BLOCKS = [(1.0, 4), (1.5, 12), (3.0, 16)]


def known_run():
    """Due at 0, 1, 2 and 4; one in time, one late, one rejected, one failed."""
    fast = reply(3.0, BLOCKS, tokens=16, sent_s=0.5, **cost(0.9, 10))
    late = reply(7.0, [(6.0, 4), (6.5, 8)], tokens=8, sent_s=1.0, **cost(0.6, 4))
    rejected = reply(2.0, outcome=Outcome.REJECTED, sent_s=2.0)
    failed = reply(10.0, [(5.0, 4)], outcome=Outcome.FAILED, sent_s=4.0)
    return [
        scored(0.0, fast, 4.0, True),
        scored(1.0, late, 4.0, False),
        scored(2.0, rejected, 4.0, False),
        scored(4.0, failed, 9.0, True),
    ]


def test_every_number_of_a_known_run():
    summary = summarise(known_run())
    assert (summary.requests, summary.completed, summary.rejected, summary.failed) == (4, 2, 1, 1)
    assert summary.duration_s == 10.0  # first arrival to last end, the failure's
    assert summary.slo_attainment == 0.25
    assert summary.goodput_requests_per_s == pytest.approx(0.1)
    assert summary.goodput_tokens_per_s == pytest.approx(1.6)
    assert summary.e2e_s == Spread(mean=4.5, p50=3.0, p99=6.0)
    assert summary.ttft_s == Spread(mean=3.0, p50=1.0, p99=5.0)
    # Gaps 0.5 and 1.5 of the one, 0.5 of the other; amortised 2 s / 12 and 0.5 s / 4 tokens.
    assert summary.text_gap_s == Spread(pytest.approx(2.5 / 3), 0.5, 1.5)
    assert summary.token_gap_s == Spread(pytest.approx(2.5 / 16), 0.0625, 0.375)
    assert summary.tpot_s == Spread(pytest.approx((2.0 / 12 + 0.5 / 4) / 2), 0.125, 2.0 / 12)
    assert summary.accuracy == Share(0.5, pytest.approx(sqrt(0.25 / 2)), 2)
    assert summary.threshold_mean == pytest.approx((16 * 0.9 + 8 * 0.6) / 24)
    assert summary.forwards_mean == 7.0
    assert summary.client_lag_p99_s == 0.5


def test_without_deadlines_and_reports_nothing_is_invented():
    summary = summarise([scored(0.0, reply(2.0, [(1.0, None)]))])
    assert summary.slo_attainment is None
    assert summary.goodput_requests_per_s == 0.5
    assert summary.goodput_tokens_per_s is None
    assert summary.text_gap_s is summary.token_gap_s is summary.tpot_s is summary.accuracy is None
    assert summary.threshold_mean is summary.forwards_mean is None


def test_a_run_that_completed_nothing_is_still_a_summary():
    summary = summarise([scored(0.0, reply(0.0, outcome=Outcome.FAILED), 1.0)])
    assert summary.slo_attainment == summary.goodput_requests_per_s == 0.0
    assert summary.e2e_s is summary.ttft_s is None


def test_a_deadline_is_met_at_its_very_moment():
    assert scored(1.0, reply(3.0), 2.0).met
    assert not scored(1.0, reply(3.001), 2.0).met


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (reply(3.0, BLOCKS, tokens=16), 2.0 / 12),
        (reply(3.0, BLOCKS), 2.0 / 12),  # the running count is enough
        (reply(9.0, [(1.0, 1), (2.0, 2)], tokens=5), 1.0 / 4),  # an end token shows no text
        (reply(3.0, [(1.0, None)], tokens=16), 1.0 / 16),  # all in one event: since arrival
        (reply(3.0, [(1.0, None), (2.0, None)], tokens=16), None),  # no running count
        (reply(3.0, [(1.0, None)]), None),  # no count at all
        (reply(3.0, [(1.0, 0), (2.0, 0)], tokens=16), None),  # a count that does not run
        (reply(3.0, tokens=0), None),
    ],
)
def test_amortised_time_per_token(answer, expected):
    assert tpot_s(scored(0.0, answer)) == (None if expected is None else pytest.approx(expected))


def test_paired_difference_uses_problems_that_both_completed():
    def run(*answers):
        return [
            scored(
                0.0, reply(1.0, outcome=Outcome.FAILED if a is None else Outcome.COMPLETED), 1.0, a
            )
            for a in answers
        ]

    one, other = run(True, False, False, True, None), run(True, True, True, True, True)
    difference = Difference.paired(one, other)
    # Differences 0, -1, -1, 0: mean -1/2, sample deviation sqrt(1/3).
    assert difference == Difference(-0.5, pytest.approx(sqrt(1 / 3 / 4)), 4)
    assert Difference.paired(run(None), run(True)) is None
    assert Difference.paired(run(True), run(False)) == Difference(1.0, 0.0, 1)


def test_tables_show_a_row_for_each_variant():
    out = Console(file=io.StringIO(), width=80)
    summary = summarise(known_run())
    other = summarise([scored(0.0, reply(1.0))])
    server = ServerSide(3, 40, 5, 0.5, 0.75, 2, 1, 81.2)
    servers = {"fixed": None, "deadline_fit": server}
    out.print(*tables({"fixed": summary, "deadline_fit": other}, servers))
    rows = [" ".join(line.split()) for line in out.file.getvalue().splitlines()]
    for row in (
        "fixed 2 / 1 / 1 25.0 - 0.10 1.60 500",
        "fixed 4500 / 3000 / 6000 1000 / 5000 500 / 1500 125 / 167",
        "fixed 50.0 ± 35.4 25.0 ± 21.7 0.80 7.00",
        "deadline_fit 1 / 0 / 0 - - 1.00 - 0.00",
        "deadline_fit 1000 / 1000 / 1000 - - -",
        "deadline_fit - - - -",
        "deadline_fit 0.50 / 0.75 5 40 3 2 / 1 81.2",
    ):
        assert row in rows


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.5, "0.50"), (12.34, "12.3"), (1234.5, "1234")]
)
def test_three_digits(value, text):
    assert three_digits(value) == text


def test_gaps_are_judged_by_the_target_between_events():
    """Gaps 0.5 and 1.5, and 0.5: two of three keep a second, one answer of two."""
    runs = [replace(s, deadline_s=None, tbt_s=1.0) for s in known_run()[:2]]
    summary = summarise(runs)
    assert summary.text_gaps_in_time == pytest.approx(2 / 3)
    assert summary.slo_attainment == 0.5

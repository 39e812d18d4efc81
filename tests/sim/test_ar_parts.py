"""Truth, predictions and records of autoregressive requests, one at a time."""

import statistics
from array import array

import pytest

from stepserve.core.actions import Finish
from stepserve.core.errors import FieldError
from stepserve.core.events import HandedOff, HandoverAcknowledged, SegmentPlaced
from stepserve.core.forecast import StepForecast
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.request import Family, FinishReason, Progress, Request
from stepserve.core.segment import Segment
from stepserve.core.step import Batch, Step, StepKind, StepOutcome
from stepserve.sim.ar_executors import ArExecutors
from stepserve.sim.ar_record import ArRecord
from stepserve.sim.known_lengths import KnownLengths
from support.parts import make_forecast

A, B = InstanceId("a"), InstanceId("b")


def request(name="r", prompt=10, output=4, arrival_s=0.0):
    return Request(RequestId(name), Family.AUTOREGRESSIVE, "m", prompt, output, arrival_s)


def rows_with(ends_at=None, **options):
    rows, one = ArExecutors(lambda _: ends_at), request(**options)
    rows.arrive(0, one)
    rows.load(A, one, Progress())
    return rows, one


def run(rows, instance, kind, query, context):
    (outcome,) = rows.run(instance, Batch(0, (Step(RequestId("r"), kind, query, context),)))
    return outcome


PREFILL, DECODE = StepKind.PREFILL, StepKind.DECODE


def test_a_chunk_of_a_prompt_makes_no_token_and_its_end_makes_one():
    rows, _ = rows_with()
    assert run(rows, A, PREFILL, 6, 6) == StepOutcome("r", 6, 0)
    assert run(rows, A, PREFILL, 4, 10) == StepOutcome("r", 4, 1)
    assert run(rows, A, DECODE, 1, 11) == StepOutcome("r", 1, 2)


@pytest.mark.parametrize(
    ("ends_at", "tokens", "reason"),
    [
        (None, 4, FinishReason.LENGTH),
        (2, 2, FinishReason.STOP),
        (4, 4, FinishReason.STOP),
        (9, 4, FinishReason.LENGTH),
    ],
)
def test_the_truth_ends_a_request_at_its_length_and_says_so_again(ends_at, tokens, reason):
    rows, _ = rows_with(ends_at)
    outcome = run(rows, A, PREFILL, 10, 10)
    while outcome.finished is None:
        outcome = run(rows, A, DECODE, 1, 10 + outcome.emitted)
    assert (outcome.emitted, outcome.finished) == (tokens, reason)
    assert rows.truths["r"].executed == 10 + tokens - 1
    assert run(rows, A, DECODE, 1, 10 + tokens) == StepOutcome("r", 0, tokens, reason)


@pytest.mark.parametrize(
    ("kind", "query", "context"),
    [(PREFILL, 4, 11), (PREFILL, 3, 8), (PREFILL, 3, 10), (DECODE, 1, 7), (PREFILL, 5, 11)],
)
def test_steps_that_do_not_match_what_is_held_or_known_are_refused(kind, query, context):
    rows, _ = rows_with()
    run(rows, A, PREFILL, 6, 6)
    with pytest.raises(AssertionError):
        run(rows, A, kind, query, context)


def test_landed_chunks_are_held_up_to_the_first_gap_until_the_request_begins():
    rows, one = rows_with()
    rows.load(B, one, Progress())
    run(rows, A, PREFILL, 8, 8)
    for start, stop in [(0, 4), (6, 8)]:
        rows.export_kv(A, "r", start, stop)
        rows.import_kv(B, "r", start, stop)
    assert rows.held[B] == {"r": 4}
    rows.load(B, one, Progress(3))
    rows.import_kv(B, "r", 3, 8)
    assert rows.held[B] == {"r": 3}, "it came too late"
    run(rows, B, PREFILL, 7, 10)


def test_a_request_begins_with_no_more_than_what_landed_and_only_once():
    rows, one = rows_with()
    rows.load(B, one, Progress())
    rows.import_kv(B, "r", 0, 4)
    with pytest.raises(AssertionError, match="only 4 landed"):
        rows.load(B, one, Progress(5))
    rows.load(B, one, Progress(4))
    with pytest.raises(AssertionError, match="already"):
        rows.load(B, one, Progress(4))


def test_a_stray_chunk_does_not_change_where_a_whole_request_begins():
    rows, _ = rows_with()
    rows.import_kv(A, "r", 0, 4)
    run(rows, A, PREFILL, 6, 6)
    with pytest.raises(AssertionError, match="begins not at"):
        run(rows, A, PREFILL, 5, 10)


def test_what_is_not_computed_cannot_be_sent_and_what_is_freed_is_gone():
    rows, one = rows_with()
    run(rows, A, PREFILL, 6, 6)
    with pytest.raises(AssertionError):
        rows.export_kv(A, "r", 0, 7)
    rows.free(A, "r")
    rows.load(A, one, Progress())
    assert rows.held[A] == {"r": 0}
    rows.lost(A)
    rows.import_kv(A, "r", 0, 4)
    assert A not in rows.held


# -- predicted lengths


def test_an_oracle_tells_the_length_and_what_is_left_of_it():
    rows, one = rows_with(ends_at=3)
    oracle = make_forecast(KnownLengths, truths=rows.truths)
    assert oracle.remaining_steps(one, Progress(), (1.0,)) == StepForecast((1.0,), (3.0,), 3.0, 0)
    told = oracle.remaining_steps(one, Progress(11, 2, 5), (1.0,))
    assert told == StepForecast((1.0,), (1.0,), 3.0, 5)


def test_the_error_of_a_request_is_drawn_once_and_is_as_wide_as_asked():
    rows = ArExecutors()
    requests = [request(f"r{n}", output=1000) for n in range(400)]
    for index, one in enumerate(requests):
        rows.arrive(index, one)
    noisy = make_forecast(KnownLengths, truths=rows.truths, seed=3, sigma_tokens=100.0)
    first = [noisy.remaining_steps(r, Progress(), (1.0,)).output_tokens for r in requests]
    again = make_forecast(KnownLengths, truths=rows.truths, seed=3, sigma_tokens=100.0)
    later = [again.remaining_steps(r, Progress(9, 5, 1), (1.0,)) for r in reversed(requests)]
    assert first == [f.output_tokens for f in reversed(later)]
    assert statistics.mean(first) == pytest.approx(1000, abs=15)
    assert statistics.stdev(first) == pytest.approx(100, rel=0.1)
    assert max(first) > 1000, "not limited by what was asked for"
    other = make_forecast(KnownLengths, truths=rows.truths, seed=4, sigma_tokens=100.0)
    assert first != [other.remaining_steps(r, Progress(), (1.0,)).output_tokens for r in requests]


def test_an_output_that_outgrows_its_prediction_is_expected_to_go_on():
    rows, one = rows_with(output=2000)
    short = make_forecast(KnownLengths, truths=rows.truths, sigma_tokens=1e-9)
    assert short.remaining_steps(one, Progress(0, 2000), (1.0,)).steps == (200.0,)
    rows, one = rows_with(output=50)
    assert make_forecast(KnownLengths, truths=rows.truths).remaining_steps(
        one, Progress(0, 50), (1.0,)
    ).steps == (32.0,)


@pytest.mark.parametrize("sigma", [-1.0, float("inf"), float("nan")])
def test_a_spread_that_makes_no_sense_is_refused(sigma):
    with pytest.raises(FieldError, match="sigma_tokens"):
        make_forecast(KnownLengths, truths=ArExecutors().truths, sigma_tokens=sigma)


# -- records


def take(record, now_s, emitted, finished=None):
    step = Step(RequestId("r"), DECODE, 1, 1)
    record.take(step, StepOutcome(RequestId("r"), 1, emitted, finished), now_s)


def place(record, now_s, epoch, predicted_s, start=0, stop=None):
    one = record.request
    segment = Segment(one.id, 0, start, stop, A, epoch)
    forecast = StepForecast((1.0,), (4.0,), 4.0)
    event = SegmentPlaced(
        segment, one, Progress(), forecast, predicted_s=predicted_s, predicted_tbt_s=0.05
    )
    record.placed(now_s, event)


def split_record():
    """Placed at 1, first token at 2, handed off at 2.1, ready at 2.4, tokens until 4."""
    record = ArRecord(request(arrival_s=0.5), 0)
    place(record, 1.0, 2, 1.5, start=11)
    place(record, 1.0, 1, 1.0, stop=11)
    take(record, 1.9, 0)
    take(record, 2.0, 1)
    take(record, 2.1, 2)
    record.handed_off(2.1, HandedOff(RequestId("r"), 2, Progress(11, 2)))
    record.acknowledged(2.4, HandoverAcknowledged(RequestId("r"), 2))
    take(record, 3.0, 3)
    take(record, 4.0, 4, FinishReason.LENGTH)
    record.answer = Finish(RequestId("r"), FinishReason.LENGTH, None, "")
    return record


def test_times_gaps_and_the_hand_over_of_a_split_request():
    record = split_record()
    assert record.times_s == array("d", [2.0, 2.1, 3.0, 4.0])
    assert record.ttft_s == 1.5
    assert list(record.gaps_s()) == pytest.approx([0.1, 0.9, 1.0])
    assert record.handover_gaps_s() == pytest.approx([0.9])
    (handover,) = record.handovers
    assert handover.exposed_s == pytest.approx(0.3)
    assert record.reached() == Progress(14, 4, 5, FinishReason.LENGTH)


def test_a_plan_that_held_is_measured_segment_by_segment():
    told = split_record().predicted_and_measured_s()
    assert told == [pytest.approx((1.0, 1.1)), pytest.approx((1.5, 1.9))]


def test_a_plan_that_was_changed_is_not():
    record = split_record()
    record.handovers.clear()  # the first segment went on to the end
    assert record.predicted_and_measured_s() == []
    record = split_record()
    place(record, 3.5, 3, 0.5)
    assert record.predicted_and_measured_s() == [pytest.approx((0.5, 0.5))], "only the last plan"


def test_a_hand_over_inside_the_prompt_is_in_no_gap():
    record = ArRecord(request(), 0)
    record.handed_off(1.0, HandedOff(RequestId("r"), 2, Progress(4)))
    take(record, 2.0, 1)
    assert record.handover_gaps_s() == []
    assert record.handovers[0].exposed_s is None


def test_tokens_come_once_in_order_and_none_after_the_answer():
    record = ArRecord(request(), 0)
    take(record, 1.0, 1)
    take(record, 2.0, 1)
    with pytest.raises(AssertionError, match="in order"):
        take(record, 3.0, 3)
    record.answer = Finish(RequestId("r"), FinishReason.CANCELLED, None, "")
    take(record, 4.0, 2)
    assert list(record.times_s) == [1.0]

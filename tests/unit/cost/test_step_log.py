import gzip

import numpy as np
import pytest

from stepserve.core.errors import FieldError
from stepserve.core.request import Confidence, FinishReason, Progress
from stepserve.core.step import Step, StepKind, StepOutcome
from stepserve.cost.features import FEATURES, feature_matrix, feature_values, split, training_rows
from stepserve.cost.step_log import COLUMNS, VERSION, StepLog, read_step_logs
from support.step_logs import make_request, make_step, write_log

SEEN = Confidence(0.1, 0.25, 0.5, 0.515, 0.75)


def write_text(path, *lines, end="\n"):
    path.write_bytes(gzip.compress(("\n".join(lines) + end).encode()))
    return path


def good_line(**changes):
    values = dict.fromkeys(COLUMNS, "0")
    values |= {"threshold": "0.9", "limit_tokens": "32", "block_tokens": "16", "finished": ""}
    return ",".join((values | changes).values())


HEAD = (VERSION, ",".join(COLUMNS))


def test_what_is_noted_is_read_back_grouped_by_request(tmp_path):
    a, b = make_request("a,1", 48, block=16), make_request("b", 96)
    log = StepLog(tmp_path / "log.csv.gz")
    log.note(b, Progress(settled=50), StepOutcome(b.id, 32, 30), make_step(b, 0.5))
    log.note(a, Progress(settled=50), StepOutcome(a.id, 3, 1, forced=1), make_step(a, 0.9))
    later = Progress(82, 30, 1, None, SEEN)
    end = StepOutcome(b.id, 2, 33, FinishReason.STOP, SEEN)
    log.note(b, later, end, make_step(b, 0.5))
    log.note(a, later, StepOutcome(a.id, 1, 1), Step(a.id, StepKind.DECODE, 1, 9))  # no threshold
    log.close()
    rows = read_step_logs([tmp_path / "log.csv.gz"])
    assert rows.request.tolist() == [0, 0, 1]
    assert rows.threshold.tolist() == [0.5, 0.5, 0.9]
    assert rows.steps.tolist() == [0, 1, 0]
    assert rows.unmasked.tolist() == [0, 32, 0]
    assert rows.settled.tolist() == [32, 2, 3]
    assert rows.forced.tolist() == [0, 0, 1]
    assert rows.emitted.tolist() == [30, 33, 1]
    assert rows.limit_tokens.tolist() == [96, 96, 48]
    assert rows.block_tokens.tolist() == [32, 32, 16]
    assert rows.confidence.tolist() == [[0] * 5, [0.1, 0.25, 0.5, 0.515, 0.75], [0] * 5]
    assert rows.finished.tolist() == ["", "stop", ""]
    assert rows.truncated == 0


@pytest.mark.parametrize("keep", [0.9, 0.5])
def test_a_log_cut_off_by_a_killed_process_loses_its_end_only(tmp_path, keep):
    path = write_log(tmp_path / "log.csv.gz", 1, 20)
    whole, content = read_step_logs([path]), path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    cut = read_step_logs([path])
    assert cut.truncated == 1
    assert 0.6 * keep < len(cut.steps) / len(whole.steps) < 1.0
    first = len(np.flatnonzero(cut.request == 0)) - 1
    assert np.array_equal(cut.confidence[:first], whole.confidence[:first])


def test_half_a_last_line_is_dropped(tmp_path):
    path = write_text(tmp_path / "log", *HEAD, good_line(), "a,0.9,1,1", end="")
    rows = read_step_logs([path])
    assert (len(rows.steps), rows.truncated) == (1, 1)


def test_two_files_may_use_the_same_ids(tmp_path):
    paths = [write_text(tmp_path / n, *HEAD, good_line()) for n in "xy"]
    assert read_step_logs(paths).request.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("threshold", "nan"),
        ("threshold", "0"),
        ("steps", "-1"),
        ("settled", "many"),
        ("limit_tokens", "0"),
        ("p75", "1.5"),
        ("finished", "bored"),
    ],
)
def test_a_bad_value_is_named_with_file_and_line(tmp_path, column, value):
    path = write_text(tmp_path / "log", *HEAD, good_line(), good_line(**{column: value}))
    with pytest.raises(FieldError, match=rf"log, line 4: '{value}'") as error:
        read_step_logs([path])
    assert error.value.field == f"log.{column}"


def test_what_is_no_step_log_is_refused(tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("hello")
    other = write_text(tmp_path / "other", "# stepserve step log 9", HEAD[1], good_line())
    short = write_text(tmp_path / "short", *HEAD, "a,0.9,1", good_line())
    empty = write_text(tmp_path / "empty", *HEAD)
    for path, why in (
        (tmp_path / "none", "cannot be read"),
        (plain, "cannot be read"),
        (other, "does not start as"),
        (short, "line 3: 3 values"),
        (empty, "no steps"),
    ):
        with pytest.raises(FieldError, match=why):
            read_step_logs([path])
    with pytest.raises(FieldError, match="cannot be written"):
        StepLog(tmp_path / "none" / "log")


def test_only_whole_requests_at_fixed_thresholds_are_learned_from(tmp_path):
    write_log(tmp_path / "good", 1, 11)
    log = StepLog(tmp_path / "bad")

    def note(name, steps, unmasked, settled, threshold=0.9, finished=None, forced=0):
        request = make_request(name, 64)
        outcome = StepOutcome(request.id, settled, 0, finished, SEEN, forced)
        step = make_step(request, threshold)
        log.note(request, Progress(50 + unmasked, 0, steps, None, SEEN), outcome, step)

    stop = FinishReason.STOP
    note("never ended", 0, 0, 5)
    note("cancelled", 0, 0, 5, finished=FinishReason.CANCELLED)
    note("began elsewhere", 3, 20, 5, finished=stop)
    note("lost a step", 0, 0, 5)
    note("lost a step", 1, 9, 5, finished=stop)
    note("threshold changed", 0, 0, 5)
    note("threshold changed", 1, 5, 5, threshold=0.5, finished=stop)
    note("capped", 0, 0, 9, finished=stop, forced=4)
    log.close()
    rows = training_rows(read_step_logs([tmp_path / "good", tmp_path / "bad"]))
    assert rows.requests == 55
    assert rows.left_out == {"incomplete": 4, "threshold changed": 1, "capped": 1}
    last = np.flatnonzero(np.diff(rows.rows.request, append=-1))
    assert set(rows.remaining[last]) == {1}
    first = np.flatnonzero(rows.rows.steps == 0)
    assert np.array_equal(rows.remaining[first], np.diff(first, append=len(rows.remaining)))
    with pytest.raises(FieldError, match=r"0 of 6 requests .*4 incomplete.* at least 50"):
        training_rows(read_step_logs([tmp_path / "bad"]))


def test_the_reach_is_the_limit_unless_most_requests_end_by_themselves(tmp_path):
    full = training_rows(read_step_logs([write_log(tmp_path / "full", 1, 11)]))
    assert full.natural_tokens is None
    assert np.array_equal(full.reach(), full.rows.limit_tokens)
    early = training_rows(read_step_logs([write_log(tmp_path / "e", 1, 11, lengths=(20, 40))]))
    assert 20 < early.natural_tokens < 40
    assert set(early.reach()) == {early.natural_tokens}
    assert set(early.output) == {20, 40}


def test_the_split_shares_no_request(tmp_path):
    rows = training_rows(read_step_logs([write_log(tmp_path / "log", 1, 12)]))
    first, second = split(rows, seed=3)
    assert (first.requests, second.requests) == (48, 12)
    assert not set(first.rows.request) & set(second.rows.request)
    assert len(first.remaining) + len(second.remaining) == len(rows.remaining)
    again = split(rows, seed=3)[0]
    assert np.array_equal(first.rows.request, again.rows.request)
    assert not np.array_equal(first.rows.request, split(rows, seed=4)[0].rows.request)


def test_features_of_a_row_and_of_a_table_agree(tmp_path):
    rows = training_rows(read_step_logs([write_log(tmp_path / "log", 1, 11, lengths=(40, 70))]))
    matrix = feature_matrix(rows.rows, rows.reach())
    assert matrix.shape == (len(rows.remaining), len(FEATURES))
    for i in range(0, len(matrix), 7):
        values = feature_values(
            rows.rows.threshold[i],
            rows.rows.limit_tokens[i],
            rows.rows.block_tokens[i],
            rows.reach()[i],
            rows.rows.steps[i],
            rows.rows.unmasked[i],
            Confidence(*rows.rows.confidence[i]),
        )
        assert matrix[i] == pytest.approx(values)

"""The prices of the knobs: schedules by thirds, paired differences, and a run of two problems."""

import random

import pytest

from stepserve.engine.bundled import knobs
from stepserve.engine.bundled.evaluate import Outcome
from stepserve.engine.bundled.tasks import arithmetic, lists


@pytest.fixture
def outcomes():
    """Outcomes of arithmetic problems and of a list at the end, right where ``right`` says so."""
    rng = random.Random(3)

    def build(right):
        problems = [arithmetic(rng) for _ in right[:-1]] + [lists(rng)]
        return [
            Outcome(problem, "", is_right, steps=4, tokens=9, recomputes=2, executed_tokens=50)
            for problem, is_right in zip(problems, right, strict=True)
        ]

    return build


def test_a_schedule_goes_by_thirds_of_a_length(make):
    request, _ = make(output=9)
    rule = [knobs.by_thirds((0.5, 0.7, 0.9), knobs.limit_tokens, request, k) for k in range(11)]
    assert rule == [0.5] * 3 + [0.7] * 3 + [0.9] * 5


def test_differences_are_paired(outcomes):
    """One answer of four lost and none won: a mean of -1/4, a deviation of 1/2, over root four."""
    base, after = outcomes([True, True, False, True]), outcomes([True, False, False, True])
    assert knobs.paired(base, after) == pytest.approx((-25.0, 25.0))
    assert knobs.paired(base, base) == (0.0, 0.0)


def test_lost_answers_are_net_by_kind(outcomes):
    base, after = outcomes([True, True, False, False]), outcomes([False, False, True, True])
    lost = knobs.lost_by_kind(base, after)
    assert lost.pop("arithmetic/steps") == 1
    assert list(lost.values()) == [-1]


def test_every_setting_is_a_row(capsys):
    knobs.main(["--problems", "2", "--knob", "refresh", "--thresholds", "0.9"])
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line[:5] == "| 0.9"]
    rows = rows[: len(knobs.REFRESHES)]
    tokens = [float(row[6]) for row in rows]
    assert [row[3].strip() == "-" for row in rows] == [True] + [False] * (len(rows) - 1)
    assert tokens[0] > tokens[1], "an output refresh executes less"
    assert tokens[0] > tokens[2], "and so do fewer refreshes"

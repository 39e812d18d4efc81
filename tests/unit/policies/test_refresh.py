"""Full refreshes out of slack: who gets one, and whom it may cost nothing."""

import math
import random

import pytest

from stepserve.core.forecast import StepForecast
from stepserve.core.request import CacheMode, OnMiss, Progress, RefreshScope
from stepserve.core.running import StepPace
from stepserve.core.step import StepKind
from stepserve.families.programs.diffusion import DiffusionProgram
from stepserve.policies.refresh.when_slack import WhenSlack
from support.parts import make_policy
from support.toy_world import make_request, make_running, make_spec

PROGRAM = DiffusionProgram()
SPEC = make_spec()
PACE = StepPace(0.068, 0.016)
FULL, CANVAS, BLOCK = 68, 48, 16  # tokens of make_request


class PerToken:
    """1 ms per token executed."""

    def step_time_s(self, tokens, rows, spec, mix=None):
        return tokens * 1e-3


def running(name, settled=16, *, steps=10.0, refresh=3, **options):
    request = make_request(name, refresh=refresh, **options)
    forecast = StepForecast((0.9, 0.5), (steps, steps / 2), 48.0)
    made = make_running(PROGRAM, request, Progress(20 + settled, settled, 5), forecast)
    made.forecast = forecast._replace(at_steps=5)
    made.has_state = settled > 0
    return made


def upgraded(*running_requests, margin=1.0, heavy_tokens=8192, spec=SPEC, now_s=0.0):
    """The batch of everybody's due steps, before and after."""
    slack = make_policy(WhenSlack, PerToken(), PROGRAM, margin=margin, heavy_tokens=heavy_tokens)
    rows = {r.request.id: r for r in running_requests}
    due = tuple(
        PROGRAM.next_step(r.request, r.progress, r.has_state, 0.9) for r in running_requests
    )
    return due, slack.upgrade(rows, due, PACE, spec, now_s)


def tokens(*running_requests, **options):
    return [step.query_tokens for step in upgraded(*running_requests, **options)[1]]


@pytest.mark.parametrize("cache", [CacheMode.DUAL, CacheMode.PREFIX])
@pytest.mark.parametrize("scope", RefreshScope)
@pytest.mark.parametrize("refresh", [1, 2, 3])
def test_whatever_opens_a_block_becomes_a_recompute_of_everything(cache, scope, refresh):
    for settled in range(0, 48, 4):
        row = running("a", settled, cache=cache, scope=scope, refresh=refresh)
        (due,), (step,) = upgraded(row)
        if settled % BLOCK:
            assert step == due
        else:
            assert (step.kind, step.query_tokens) == (StepKind.RECOMPUTE, FULL)
            assert step[3:] == due[3:], "the same context and threshold"


def test_without_a_cache_there_is_nothing_to_refresh():
    due, steps = upgraded(running("a", cache=CacheMode.NONE))
    assert steps == due


def test_it_fits_exactly_into_what_is_left():
    """10 steps of 16 ms; the block that opens costs 32 ms as asked and 68 in full."""
    assert tokens(running("a", e2e_s=0.160 + 0.0361)) == [FULL]
    assert tokens(running("a", e2e_s=0.160 + 0.0359)) == [2 * BLOCK]
    assert tokens(running("a", e2e_s=0.160 + 0.0361), margin=0.9) == [2 * BLOCK]
    assert tokens(running("a", e2e_s=1.0), now_s=0.9) == [2 * BLOCK]


def test_refreshes_that_were_asked_for_are_paid_first():
    row = running("a", refresh=2, e2e_s=0.160 + 0.052 + 0.0361)  # one more, of 68 ms, to come
    assert tokens(row) == [FULL]
    row = running("a", refresh=2, e2e_s=0.160 + 0.052 + 0.0359)
    assert tokens(row) == [2 * BLOCK]


def test_a_neighbour_in_a_hurry_keeps_everybody_from_it():
    assert tokens(running("a"), running("b", 5, e2e_s=0.170)) == [2 * BLOCK, BLOCK]
    assert tokens(running("a"), running("b", 5, e2e_s=0.200)) == [FULL, BLOCK]


@pytest.mark.parametrize("other", [{"e2e_s": 0.17, "on_miss": OnMiss.BEST_EFFORT}, {"e2e_s": None}])
def test_a_neighbour_that_loses_nothing_does_not(other):
    """It would rather be late, or has no deadline."""
    assert tokens(running("a"), running("b", 5, **other)) == [FULL, BLOCK]


def test_slack_is_spent_once():
    rows = [running("a"), running("b"), running("c", e2e_s=0.160 + 0.080)]
    assert tokens(*rows) == [FULL, FULL, 2 * BLOCK]
    assert tokens(*rows[:2], heavy_tokens=40) == [FULL, 2 * BLOCK]


def test_nobody_gets_one_where_every_place_is_taken_or_load_control_holds_back():
    rows = [running(f"r{i}") for i in range(SPEC.max_running_requests)]
    assert set(tokens(*rows)) == {2 * BLOCK}
    assert set(tokens(*rows[1:])) == {FULL}
    rows[1].cap = 0.5
    assert tokens(*rows[1:3]) == [2 * BLOCK, FULL]


def test_any_batch_stays_within_the_least_slack():
    """Properties over random batches: one step each, upgrades at openings alone, and nobody
    who could keep the preferred threshold before cannot after."""
    rng = random.Random(0)
    some = 0
    for _ in range(500):
        rows = [
            running(
                f"r{i}",
                rng.choice([0, 5, 16, 32, 40]),
                steps=rng.uniform(2.0, 20.0),
                refresh=rng.randint(1, 3),
                scope=rng.choice(list(RefreshScope)),
                e2e_s=rng.choice([None, rng.uniform(0.0, 2.0)]),
            )
            for i in range(rng.randint(1, 7))
        ]
        due, steps = upgraded(*rows)
        assert [s.request_id for s in steps] == [s.request_id for s in due]
        more_s = sum(s.query_tokens - d.query_tokens for s, d in zip(steps, due, strict=True)) / 1e3
        some += more_s > 0.0
        for row, step, before in zip(rows, steps, due, strict=True):
            assert step == before or (row.progress.settled - 20) % BLOCK == 0
            left_s = math.inf if row.request.slo.e2e_s is None else row.request.slo.e2e_s
            if more_s:
                assert row.time_left_s(0, PACE) + more_s <= left_s + 1e-9
    assert some > 50

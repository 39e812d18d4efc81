import pytest

from stepserve.core.forecast import StepForecast
from stepserve.core.request import CacheMode, Progress
from stepserve.families.programs.diffusion import DiffusionProgram
from stepserve.policies.batching.all_running import AllRunning
from stepserve.policies.batching.latency_budget import LatencyBudget
from support.parts import make_policy
from support.toy_world import make_request, make_running, make_spec

SPEC = make_spec()
PROGRAM = DiffusionProgram()


class PerToken:
    """1 ms per token executed, no floor: sums are easy to follow."""

    def step_time_s(self, tokens, rows, spec, mix=None):
        return tokens * 1e-3

    def observe(self, tokens, rows, spec, seconds, mix=None):
        raise AssertionError("batching policies do not learn")


def budget(**options):
    settings = {"margin": 1.0, "heavy_tokens": 1000, "starvation_batches": 3} | options
    return make_policy(LatencyBudget, PerToken(), **settings)


def candidate(name, settled=0, *, steps_left=10.0, skipped=0, **options):
    """prompt 20, output 48 in blocks of 16: a heavy step is 68 tokens, a light one 16."""
    request = make_request(name, **options)
    forecast = StepForecast((0.9, 0.5), (steps_left, steps_left), 48.0)
    running = make_running(PROGRAM, request, Progress(settled=20 + settled), forecast)
    running.has_state, running.skipped = settled > 0, skipped
    step = PROGRAM.next_step(request, running.progress, running.has_state, 0.9)
    return running, step


def names(steps):
    return [step.request_id for step in steps]


def test_all_running_runs_everybody():
    rows = [candidate("a"), candidate("b", 5), candidate("c")]
    assert names(make_policy(AllRunning, PerToken()).compose(rows, SPEC, 0.0)) == ["a", "b", "c"]


def test_light_steps_always_run_and_heavy_ones_fill_the_allowance():
    """b has 8 light and 2 heavy steps left, 136 ms of them heavy: 108 ms for each light one.
    Its own 16 tokens and one heavy step of 68 fit into that, two do not."""
    rows = [candidate("a"), candidate("b", 5, e2e_s=1.0), candidate("c")]
    assert names(budget().compose(rows, SPEC, 0.0)) == ["b", "a"]


def test_a_tight_heavy_step_does_not_wait_for_a_looser_light_one():
    """The light one allows 70 ms a batch; the heavy one is tighter and goes along with it."""
    loose = candidate("loose", 5, e2e_s=0.136 + 8 * 0.070)
    tight = candidate("tight", e2e_s=0.204 + 7 * 0.020)
    assert names(budget().compose([loose, tight], SPEC, 0.0)) == ["loose", "tight"]
    relaxed = candidate("relaxed", e2e_s=9.0)
    assert names(budget().compose([loose, relaxed], SPEC, 0.0)) == ["loose"]


def test_without_deadlines_the_token_budget_bounds_a_batch():
    rows = [candidate(n) for n in "abc"] + [candidate("d", 5)]
    assert names(budget().compose(rows, SPEC, 0.0)) == ["d", "a", "b", "c"]
    assert names(budget(heavy_tokens=140).compose(rows, SPEC, 0.0)) == ["d", "a", "b"]


def test_the_tightest_deadline_goes_first_and_lost_ones_last():
    rows = [candidate("a", e2e_s=9.0), candidate("lost", e2e_s=0.1), candidate("b", e2e_s=0.9)]
    assert names(budget(heavy_tokens=140).compose(rows, SPEC, 0.0)) == ["b", "a"]
    assert names(budget().compose(rows, SPEC, 0.0)) == ["b", "a", "lost"]


def test_without_a_cache_the_tightest_deadline_bounds_the_batch():
    """10 steps of 68 ms alone; 150 ms a step allows two rows together, not three."""
    rows = [candidate(n, e2e_s=1.5, cache=CacheMode.NONE) for n in "abc"]
    assert names(budget().compose(rows, SPEC, 0.0)) == ["a", "b"]


def test_a_lost_deadline_does_not_hold_the_others_up():
    rows = [candidate("late", 5, e2e_s=0.001), candidate("a"), candidate("b")]
    assert names(budget().compose(rows, SPEC, 0.0)) == ["late", "a", "b"]


def test_pace_prices_a_heavy_step_beside_everybodys_light_one():
    """One heavy step of 68 and two light ones of 16; the mix is 3 refreshes in 10 steps each."""
    running_requests = [candidate(n)[0] for n in "abc"]
    pace = budget().pace(running_requests, SPEC)
    assert pace.heavy_s == pytest.approx(0.100)
    assert pace.light_s == pytest.approx(round(3 * (0.3 * 68 + 0.7 * 16)) * 1e-3)


def test_heavy_steps_wait_for_a_tight_light_one_but_do_not_starve():
    tight = candidate("tight", 5, e2e_s=0.136 + 8 * 0.020)  # 20 ms: no room for 68 tokens
    assert names(budget().compose([tight, candidate("a")], SPEC, 0.0)) == ["tight"]
    starved = candidate("a", skipped=3)
    assert names(budget().compose([tight, starved], SPEC, 0.0)) == ["tight", "a"]


def test_a_batch_is_never_empty():
    big = candidate("a", e2e_s=0.001)
    assert names(budget(heavy_tokens=1).compose([big], SPEC, 0.0)) == ["a"]


@pytest.mark.parametrize("policy", [make_policy(AllRunning, PerToken()), budget()])
def test_more_running_requests_never_quicken_the_pace(policy):
    running_requests = [candidate(str(i), i)[0] for i in range(6)]
    paces = [policy.pace(running_requests[: n + 1], SPEC) for n in range(6)]
    for slower, faster in zip(paces[1:], paces, strict=False):
        assert slower.heavy_s >= faster.heavy_s
        assert slower.light_s >= faster.light_s
    assert policy.pace([], SPEC).heavy_s == 0.0

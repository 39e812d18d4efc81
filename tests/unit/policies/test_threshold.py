"""``deadline_fit``: highest that fits, monotone in time left and in pace (DiLaServe C3)."""

from hypothesis import given
from hypothesis import strategies as st

from stepserve.core.forecast import StepForecast
from stepserve.core.request import OnMiss, Progress
from stepserve.core.running import StepPace
from stepserve.families.programs.diffusion import DiffusionProgram
from stepserve.policies.threshold.deadline_fit import DeadlineFit
from stepserve.policies.threshold.fixed import FixedThreshold
from stepserve.policies.threshold.unless_infeasible import UnlessInfeasible
from support.parts import make_policy
from support.toy_world import make_request, make_running

PROGRAM = DiffusionProgram()
POLICY = make_policy(DeadlineFit)
FORECAST = StepForecast((0.9, 0.7, 0.5), (30.0, 20.0, 10.0), output_tokens=48.0)


def running(forecast=FORECAST, steps=0, **options):
    request = make_request(prompt=20, **options)
    return make_running(PROGRAM, request, Progress(settled=20, steps=steps), forecast)


def test_worked_example():
    """3 heavy steps of 10 ms; light steps 1 ms: 57 ms at 0.9, 47 at 0.7, 37 at 0.5."""
    pace = StepPace(heavy_s=0.010, light_s=0.001)
    picks = [POLICY.pick(running(e2e_s=ms / 0.9e3), pace, 0.0) for ms in (57.1, 56.9, 46.9, 1)]
    assert picks == [0.9, 0.7, 0.5, 0.5]


@given(st.sampled_from((1.0, 0.9, 0.7, 0.5, 0.1)), st.floats(0.001, 1.0))
def test_nothing_above_the_cap_is_picked_whatever_time_is_left(cap, e2e_s):
    pace = StepPace(heavy_s=0.010, light_s=0.001)
    free, capped = running(e2e_s=e2e_s), running(e2e_s=e2e_s)
    capped.cap = cap
    pick = POLICY.pick(capped, pace, 0.0)
    assert pick == min(POLICY.pick(free, pace, 0.0), max(cap, 0.5))


def test_a_lost_deadline_keeps_its_quality():
    """37 ms at 0.5, 57 at 0.9: between them the policy decides, below nothing is left to gain."""
    fit = UnlessInfeasible(make_policy(DeadlineFit, margin=1.0))
    pace = StepPace(heavy_s=0.010, light_s=0.001)
    picks = [fit.pick(running(e2e_s=ms / 1e3), pace, 0.0) for ms in (57.1, 37.1, 36.9, 1)]
    assert picks == [0.9, 0.5, 0.9, 0.9]
    capped = running(e2e_s=0.001)
    capped.cap = 0.5
    assert fit.pick(capped, pace, 0.0) == 0.9
    assert fit.pick(running(), pace, 1e9) == 0.9, "without a deadline nothing is lost"


def test_steps_run_since_the_forecast_are_subtracted():
    pace = StepPace(0.001, 0.001)
    assert POLICY.pick(running(e2e_s=0.025 / 0.9), pace, 0.0) == 0.7
    assert POLICY.pick(running(e2e_s=0.025 / 0.9, steps=6), pace, 0.0) == 0.9


def test_no_deadline_or_best_effort_keeps_the_preferred_threshold():
    slow = StepPace(1.0, 1.0)
    assert POLICY.pick(running(), slow, 0.0) == 0.9
    assert POLICY.pick(running(e2e_s=0.1, on_miss=OnMiss.BEST_EFFORT), slow, 0.0) == 0.9
    assert make_policy(FixedThreshold).pick(running(e2e_s=0.1), slow, 0.0) == 0.9


times = st.floats(0.001, 10.0)


@given(times, times, times, times, st.floats(0.0, 5.0))
def test_more_time_never_lowers_and_a_slower_pace_never_raises(
    e2e_s, more_s, heavy_s, light_s, now_s
):
    pace = StepPace(heavy_s, light_s)
    pick = POLICY.pick(running(e2e_s=e2e_s), pace, now_s)
    assert POLICY.pick(running(e2e_s=e2e_s + more_s), pace, now_s) >= pick
    assert POLICY.pick(running(e2e_s=e2e_s), StepPace(heavy_s * 2, light_s * 2), now_s) <= pick
    assert pick in FORECAST.thresholds

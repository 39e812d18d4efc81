"""Schedules: early thirds are lowered first; monotone as ``deadline_fit`` is (DiLaServe E2)."""

from hypothesis import given
from hypothesis import strategies as st

from stepserve.core.forecast import StepForecast
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.request import (
    SLO,
    DiffusionOptions,
    Family,
    OnMiss,
    Progress,
    Request,
    ThresholdBounds,
)
from stepserve.core.running import RunningRequest, StepPace
from stepserve.core.segment import Segment
from stepserve.families.programs.diffusion import DiffusionProgram
from stepserve.policies.threshold.at_cap import AtCap
from stepserve.policies.threshold.early_fit import EarlyFit
from stepserve.policies.threshold.schedule_fit import ScheduleFit, schedules
from support.parts import make_policy

PROGRAM = DiffusionProgram()
POLICY = make_policy(ScheduleFit, margin=1.0)
FORECAST = StepForecast((0.9, 0.7, 0.5), (60.0, 45.0, 30.0), output_tokens=240.0)
LIGHT = StepPace(heavy_s=0.001, light_s=0.001)


def running(*, e2e_s, settled=0, on_miss=OnMiss.DEGRADE, cap=1.0, forecast=FORECAST):
    options = DiffusionOptions(ThresholdBounds(0.9, 0.5), 16)
    slo = SLO(e2e_s=e2e_s, on_miss=on_miss)
    request = Request(RequestId("r"), Family.DIFFUSION, "m", 20, 240, 0.0, slo, options)
    progress = Progress(settled=20 + settled)
    segment = Segment(request.id, 0, progress.settled, None, InstanceId("i"), 1)
    heavy_left = PROGRAM.heavy_left(request, progress, forecast.output_tokens)
    return RunningRequest(
        request, segment, progress, forecast, 260, 16, heavy_left, progress.settled, cap=cap
    )


def pick(policy=POLICY, now_s=0.0, pace=LIGHT, **options):
    return policy.pick(running(**options), pace, now_s)


def test_early_goes_down_first_then_middle_before_late():
    assert schedules(1) == ((0, 0, 0),)
    assert schedules(3) == (
        (0, 0, 0),
        (1, 0, 0),
        (2, 0, 0),
        (2, 1, 0),
        (2, 2, 1),
        (2, 2, 2),
    )


def test_worked_example():
    """Thirds of 20, 15 and 10 steps at 0.9, 0.7 and 0.5, a millisecond each.

    At the start 60 ms fit all high, 50 ms low early; in the middle third, where as many steps
    are said to be left for two thirds, 60 ms fit high and 45 ms need the middle low.
    """
    assert [pick(e2e_s=ms / 1e3) for ms in (60.1, 55.1, 50.1, 30.1)] == [0.9, 0.7, 0.5, 0.5]
    middle = [pick(e2e_s=ms / 1e3, settled=80) for ms in (60.1, 52.6, 45.1)]
    assert middle == [0.9, 0.7, 0.5]
    assert [pick(e2e_s=ms / 1e3, settled=200) for ms in (60.1, 45.1, 30.1)] == [0.9, 0.7, 0.5]


def test_early_fit_is_careful_early_and_exact_late():
    """60 steps of a millisecond: half of 100 ms is too little at the start, all of it at the end
    plenty."""
    fit = make_policy(EarlyFit, early_margin=0.5, margin=1.0)
    assert pick(policy=fit, e2e_s=0.1) == 0.7
    assert pick(policy=fit, e2e_s=0.1, settled=120) == 0.9
    assert pick(policy=fit, e2e_s=None) == 0.9
    careful = make_policy(EarlyFit, early_margin=0.5, margin=0.6)
    overrun = [pick(policy=careful, e2e_s=0.0805, settled=n) for n in (239, 240, 2400)]
    assert overrun[1:] == [overrun[0]] * 2, "longer than forecast: no more than the margin"
    assert pick(policy=fit, e2e_s=0.01, on_miss=OnMiss.BEST_EFFORT) == 0.9


def test_the_cap_bounds_the_present_third():
    assert pick(e2e_s=10.0, cap=0.7) == 0.7
    assert pick(e2e_s=10.0, cap=0.1) == 0.5
    assert pick(policy=make_policy(AtCap), e2e_s=0.001, cap=0.7) == 0.7
    assert pick(policy=make_policy(AtCap), e2e_s=10.0, cap=0.1) == 0.5


def test_no_deadline_or_best_effort_keeps_the_preferred_threshold():
    assert pick(e2e_s=None) == 0.9
    assert pick(e2e_s=0.001, on_miss=OnMiss.BEST_EFFORT) == 0.9


times = st.floats(0.001, 0.2)


@given(times, times, st.floats(1.0, 5.0), st.integers(0, 239))
def test_more_time_never_lowers_and_a_slower_pace_never_raises(e2e_s, more_s, slower, settled):
    first = pick(e2e_s=e2e_s, settled=settled)
    assert pick(e2e_s=e2e_s + more_s, settled=settled) >= first
    slow = StepPace(LIGHT.heavy_s * slower, LIGHT.light_s * slower)
    assert pick(e2e_s=e2e_s, settled=settled, pace=slow) <= first

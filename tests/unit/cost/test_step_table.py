import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepserve.core.errors import FieldError
from stepserve.core.ids import RequestId
from stepserve.core.step import Step, StepKind
from stepserve.cost.step_table import StepProfile, StepTable
from support.toy_world import make_spec

SPEC = make_spec()
PROFILE = StepProfile((32, 64, 128), (0.010, 0.011, 0.030), "made up")


def steps(*tokens):
    return tuple(Step(RequestId(str(i)), StepKind.CACHED, t, t) for i, t in enumerate(tokens))


def test_sizes_round_up_and_large_batches_scale():
    table = StepTable(PROFILE)
    cases = {(): 0.0, (1,): 0.010, (32,): 0.010, (33,): 0.011, (40, 60): 0.030, (256,): 0.060}
    for tokens, seconds in cases.items():
        assert table.step_time_s(steps(*tokens), SPEC) == pytest.approx(seconds)


@given(st.floats(0.2, 5.0))
def test_a_wrong_profile_heals(factor):
    """Both at the sizes seen, and through the common factor at a size never seen."""
    table = StepTable(PROFILE)
    for _ in range(400):
        for size, seconds in ((32, 0.010), (64, 0.011)):
            table.observe(steps(size), SPEC, seconds * factor)
    assert table.step_time_s(steps(64), SPEC) == pytest.approx(0.011 * factor, rel=0.02)
    unseen = table.step_time_s(steps(128), SPEC) / 0.030
    assert abs(unseen - factor) <= abs(1.0 - factor)


def test_one_stall_does_not_poison_the_table():
    table = StepTable(PROFILE)
    table.observe(steps(32), SPEC, 3600.0)
    assert table.step_time_s(steps(32), SPEC) < 0.012


def test_profiles_are_checked_and_survive_a_round_trip(tmp_path):
    PROFILE.save(tmp_path / "p.json")
    assert StepProfile.load(tmp_path / "p.json") == PROFILE
    for sizes, seconds in [((), ()), ((2, 1), (1.0, 1.0)), ((1,), (0.0,)), ((1, 2), (1.0,))]:
        with pytest.raises(FieldError, match=r"profile\."):
            StepProfile(sizes, seconds, "bad")

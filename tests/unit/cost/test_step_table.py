from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepserve.core.errors import FieldError
from stepserve.cost.step_table import StepProfile, StepTable
from support.toy_world import make_spec

SPEC = make_spec()
PROFILE = StepProfile((32, 64, 128), (0.010, 0.011, 0.030), "made up")


def test_sizes_round_up_and_large_batches_scale():
    table = StepTable({1: PROFILE})
    cases = {0: 0.0, 1: 0.010, 32: 0.010, 33: 0.011, 100: 0.030, 256: 0.060}
    for tokens, seconds in cases.items():
        assert table.step_time_s(tokens, 1, SPEC) == pytest.approx(seconds)


def test_the_host_takes_its_time_for_every_step_and_row():
    table = StepTable({1: replace(PROFILE, host_s=0.002, host_row_s=0.001)})
    assert table.step_time_s(32, 1, SPEC) == pytest.approx(0.012)
    assert table.step_time_s(32, 4, SPEC) == pytest.approx(0.015)
    assert table.step_time_s(0, 0, SPEC) == 0.0


def test_each_degree_has_a_profile_of_its_own():
    """What is learned of one says nothing of the other."""
    fast = replace(PROFILE, seconds=(0.005, 0.006, 0.016))
    table = StepTable({1: PROFILE, 2: fast})
    pair = replace(SPEC, tp_degree=2)
    assert table.step_time_s(64, 1, pair) == pytest.approx(0.006)
    for _ in range(50):
        table.observe(64, 1, pair, 0.012)
    assert table.step_time_s(64, 1, pair) > 0.011
    assert table.step_time_s(64, 1, SPEC) == pytest.approx(0.011)
    with pytest.raises(KeyError):
        table.step_time_s(64, 1, replace(SPEC, tp_degree=4))


@given(st.floats(0.2, 5.0))
def test_a_wrong_profile_heals(factor):
    """Both at the sizes seen, and through the common factor at a size never seen."""
    table = StepTable({1: PROFILE})
    for _ in range(400):
        for size, seconds in ((32, 0.010), (64, 0.011)):
            table.observe(size, 1, SPEC, seconds * factor)
    assert table.step_time_s(64, 1, SPEC) == pytest.approx(0.011 * factor, rel=0.02)
    unseen = table.step_time_s(128, 1, SPEC) / 0.030
    assert abs(unseen - factor) <= abs(1.0 - factor)


def test_one_stall_does_not_poison_the_table():
    table = StepTable({1: PROFILE})
    table.observe(32, 1, SPEC, 3600.0)
    assert table.step_time_s(32, 1, SPEC) < 0.012


def test_profiles_are_checked_and_survive_a_round_trip(tmp_path):
    PROFILE.save(tmp_path / "p.json")
    assert StepProfile.load(tmp_path / "p.json") == PROFILE
    for sizes, seconds in [((), ()), ((2, 1), (1.0, 1.0)), ((1,), (0.0,)), ((1, 2), (1.0,))]:
        with pytest.raises(FieldError, match=r"profile\."):
            StepProfile(sizes, seconds, "bad")

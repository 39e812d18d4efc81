"""Load control: what fits, who is lowered first, who never is (DiLaServe B6, DiLaServe C4)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.instance import InstanceSpec
from stepserve.core.protocols import Demand
from stepserve.core.request import SLO, DiffusionOptions, Family, OnMiss, Request
from stepserve.cost.step_table import StepProfile, StepTable
from stepserve.policies.caps.horizon_caps import HorizonCaps
from stepserve.policies.caps.load_caps import LoadCaps, tokens_per_s
from support.parts import make_policy

SIZES = (32, 160, 1536, 7680, 8192)
H100 = StepProfile(SIZES, (0.0122, 0.0126, 0.0437, 0.2266, 0.2507), "DiLaServe B2, TP1")
COST = StepTable({1: H100})
SPECS = [InstanceSpec(InstanceId("i0"), 1, 4096, 16, 32)]
THRESHOLDS = (0.9, 0.7, 0.5)


def demand(
    name, tokens, *, done=0.0, arrival_s=0.0, e2e_s=10.0, least_s=0.0, on_miss=OnMiss.DEGRADE
):
    slo = SLO(e2e_s=e2e_s, on_miss=on_miss)
    request = Request(RequestId(name), Family.DIFFUSION, "m", 1000, 256, arrival_s, slo)
    light = tuple(count / 32 for count in tokens)
    return Demand(request, done, THRESHOLDS, (0.0,) * 3, light, 1256, 32, least_s)


def load_caps():
    return make_policy(LoadCaps, COST, utilisation=1.0)


def horizon_caps():
    return make_policy(HorizonCaps, COST, utilisation=1.0)


SUPPLY = 10.0 * tokens_per_s(COST, SPECS[0], 8192, DiffusionOptions())


def test_the_published_rate_of_an_h100():
    """DiLaServe D1: 20,451 tokens/s with the whole profile; five nominal requests in step."""
    assert tokens_per_s(COST, SPECS[0], 8192, DiffusionOptions()) == pytest.approx(20_451, rel=0.03)


@pytest.mark.parametrize("policy", [load_caps(), horizon_caps()])
def test_with_room_for_all_nobody_is_lowered(policy):
    rows = [demand("a", (1e4, 8e3, 6e3)), demand("b", (1e4, 8e3, 6e3))]
    assert policy.caps(rows, SPECS, 0.0) == [0.9, 0.9]


def test_the_most_advanced_is_served_first_and_the_others_minimum_is_reserved():
    share = SUPPLY / 10.0
    tokens = (5.9 * share, 5.0 * share, 4.0 * share)
    young, old = demand("young", tokens, done=0.1), demand("old", tokens, done=0.8)
    assert load_caps().caps([young, old], SPECS, 0.0) == [0.5, 0.9]


@pytest.mark.parametrize("policy", [load_caps(), horizon_caps()])
def test_who_is_not_to_be_lowered_counts_in_full(policy):
    """The others pay: one of them would fit alone."""
    tokens = (0.6 * SUPPLY, 0.3 * SUPPLY, 0.1 * SUPPLY)
    firm = demand("firm", tokens, on_miss=OnMiss.BEST_EFFORT)
    undated = demand("undated", tokens, e2e_s=None)
    assert policy.caps([demand("alone", tokens)], SPECS, 0.0) == [0.9]
    for other in (firm, undated):
        assert policy.caps([other, demand("r", tokens)], SPECS, 0.0)[0] == 0.9
        assert policy.caps([other, demand("r", tokens)], SPECS, 0.0)[1] < 0.9


SECOND = 32 * 32 / 0.0437
"""Tokens of cached steps in a second of an instance: 32 rows of 32 take a batch of 1,536."""


def test_one_level_for_all_where_the_published_rule_takes_it_all_from_one():
    """9 seconds are left of the margin; two requests of 5.5, 4 or 3.5 seconds each."""
    rows = [demand(name, (5.5 * SECOND, 4.0 * SECOND, 3.5 * SECOND)) for name in "ab"]
    assert horizon_caps().caps(rows, SPECS, 0.0) == [0.7, 0.7]
    share = SUPPLY / 10.0
    tokens = (5.9 * share, 4.5 * share, 4.0 * share)
    rows = [demand("a", tokens, done=0.5), demand("b", tokens)]
    assert load_caps().caps(rows, SPECS, 0.0) == [0.9, 0.5]


@pytest.mark.parametrize("policy", [load_caps(), horizon_caps()])
def test_a_lost_deadline_gets_the_lowest_and_no_deadline_the_highest(policy):
    lost = demand("lost", (100.0, 90.0, 80.0), e2e_s=10.0, least_s=9.5)
    free = demand("free", (100.0, 90.0, 80.0), e2e_s=None)
    other = demand("other", (100.0, 90.0, 80.0))
    assert policy.caps([lost, free, other], SPECS, 0.0) == [0.5, 0.9, 0.9]


@pytest.mark.parametrize("policy", [load_caps(), horizon_caps()])
@pytest.mark.parametrize("kept", [{"e2e_s": None}, {"on_miss": OnMiss.BEST_EFFORT}])
def test_who_keeps_its_threshold_keeps_it_where_nothing_fits(policy, kept):
    row = (100 * SUPPLY,) * 3
    assert policy.caps([demand("pinned", row, **kept), demand("other", row)], SPECS, 0.0) == [
        0.9,
        0.5,
    ]


def test_a_near_deadline_binds_though_the_mean_one_is_far():
    """What is due in 0.9 s must fit into 0.9 s."""
    tokens = (0.4 * SECOND, 0.28 * SECOND, 0.2 * SECOND)
    near = [demand(f"n{i}", tokens, e2e_s=1.0) for i in range(3)]
    far = [demand("far", (SECOND, SECOND, SECOND), e2e_s=30.0)]
    assert load_caps().caps(near + far, SPECS, 0.0) == [0.9] * 4
    assert horizon_caps().caps(near + far, SPECS, 0.0) == [0.7] * 4


amounts = st.floats(1.0, 1e5)


@st.composite
def demands(draw):
    rows = []
    for index in range(draw(st.integers(1, 12))):
        low = draw(amounts)
        middle = low + draw(amounts)
        tokens = (middle + draw(amounts), middle, low)
        rows.append(
            demand(
                f"r{index}",
                tokens,
                done=draw(st.floats(0.0, 1.0)),
                arrival_s=draw(st.floats(0.0, 5.0)),
                e2e_s=draw(st.sampled_from([None, 10.0])),
                least_s=draw(st.floats(0.0, 12.0)),
            )
        )
    return rows


@given(demands(), st.floats(5.0, 20.0))
def test_demand_at_the_caps_fits_or_everybody_is_at_the_floor(rows, now_s):
    """The invariant of DiLaServe C4, over those that can be lowered."""
    caps = load_caps().caps(rows, SPECS, now_s)
    used = sum(r.tokens[THRESHOLDS.index(c)] for r, c in zip(rows, caps, strict=True))
    lowered = [c == 0.5 for r, c in zip(rows, caps, strict=True) if r.request.slo.e2e_s]
    if lowered:
        assert used <= SUPPLY * (1 + 1e-6) or all(lowered)


@given(demands(), st.floats(5.0, 20.0))
def test_every_cap_is_a_candidate_and_more_instances_never_lower_one(rows, now_s):
    for policy in (load_caps(), horizon_caps()):
        caps = policy.caps(rows, SPECS, now_s)
        assert set(caps) <= set(THRESHOLDS)
    more = horizon_caps().caps(rows, SPECS * 2, now_s)
    assert all(a <= b for a, b in zip(horizon_caps().caps(rows, SPECS, now_s), more, strict=True))

"""Caps by marginal quality per second of load (DiLaServe E4)."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepserve.core.errors import FieldError
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.instance import InstanceSpec
from stepserve.core.protocols import Demand
from stepserve.core.request import SLO, Family, OnMiss, Request
from stepserve.cost.step_table import StepProfile, StepTable
from stepserve.policies.caps.horizon_caps import HorizonCaps
from stepserve.policies.caps.horizons import horizons
from stepserve.policies.caps.marginal_caps import MarginalCaps
from support.parts import make_policy

SIZES = (32, 160, 1536, 7680, 8192)
H100 = StepProfile(SIZES, (0.0122, 0.0126, 0.0437, 0.2266, 0.2507), "DiLaServe B2, TP1")
COST = StepTable({1: H100})
SPECS = [InstanceSpec(InstanceId("i0"), 1, 4096, 16, 32)]
THRESHOLDS = (0.9, 0.8, 0.7, 0.6, 0.5)
STEPS = (78.63, 60.92, 48.72, 40.16, 34.92)  # DiLaServe B3
POINTS = (78.6, 78.6, 77.0, 71.7, 65.9)
PLAN = {"margin": 0.9, "utilisation": 1.0}
POLICY = make_policy(MarginalCaps, COST, **PLAN)
STEP_S = 0.0437 / 32
"""A cached step's share of a full batch: 32 rows of 32 tokens take a batch of 1,536."""


def demand(seconds, *, weight=1.0, done=0.0, e2e_s=10.0, least_s=0.0, on_miss=OnMiss.DEGRADE):
    """``seconds``: of an instance at each threshold, or at 0.9 with the published steps."""
    if isinstance(seconds, float):
        seconds = tuple(seconds * steps / STEPS[0] for steps in STEPS)
    slo = SLO(e2e_s=e2e_s, on_miss=on_miss, weight=weight)
    request = Request(RequestId("r"), Family.DIFFUSION, "m", 1000, 256, 0.0, slo)
    light = tuple(s / STEP_S for s in seconds)
    return Demand(request, done, THRESHOLDS, (0.0,) * 5, light, 1256, 32, least_s)


def caps(rows, specs=SPECS, now_s=0.0, policy=POLICY):
    return policy.caps(rows, specs, now_s)


def levels(rows, **more):
    return [THRESHOLDS.index(cap) for cap in caps(rows, **more)]


def lost(row, level):
    return row.request.slo.weight * (1.0 - row.done) * (POINTS[0] - POINTS[level])


def total_lost(rows, chosen):
    return sum(lost(row, level) for row, level in zip(rows, chosen, strict=True))


def fits(rows, chosen, specs=SPECS):
    """Whether no horizon that binds has more due than supply."""
    found, used = horizons(COST, rows, specs, 0.0, **PLAN), 0.0
    for supply_s, indexes in found:
        used += sum(found.seconds[i][min(chosen[i], len(found.seconds[i]) - 1)] for i in indexes)
        if used > supply_s * (1 + 1e-9):
            return False
    return True


shares = st.floats(0.01, 8.0)
weights = st.sampled_from([0.25, 1.0, 1.5, 4.0])


@st.composite
def demands(draw, most=12, deadlines=(2.0, 5.0, 10.0), least=(0.0, 4.0)):
    """Requests of the published shape of steps."""
    return [
        demand(
            draw(shares),
            weight=draw(weights),
            done=draw(st.floats(0.0, 1.0)),
            e2e_s=draw(st.sampled_from(deadlines)),
            least_s=draw(st.sampled_from(least)),
        )
        for _ in range(draw(st.integers(1, most)))
    ]


@st.composite
def any_shape(draw, most=8):
    """Requests whose thresholds save anything, or nothing."""
    rows = []
    for row in draw(demands(most)):
        savings = draw(st.lists(st.floats(0.0, 2.0), min_size=4, max_size=4))
        seconds = [sum(savings[k:]) + 0.1 for k in range(5)]
        rows.append(replace(row, light=tuple(s / STEP_S for s in seconds)))
    return rows


def test_with_room_for_all_nobody_is_lowered():
    assert caps([demand(4.0), demand(4.0)]) == [0.9, 0.9]


def test_the_first_threshold_down_is_free_and_everybody_takes_it_before_anybody_takes_two():
    assert caps([demand(5.7)] * 2) == [0.8, 0.8]
    assert sorted(caps([demand(3.9)] * 3)) == [0.7, 0.8, 0.8]


def test_the_lighter_and_who_has_little_left_to_lose_pay():
    """9 s of supply; two of 6.5 s take 10.1 at 0.8, 9.1 at 0.8 and 0.7."""
    assert caps([demand(6.5, weight=5.0), demand(6.5)]) == [0.8, 0.6]
    assert caps([demand(6.5), demand(6.5, done=0.9)]) == [0.8, 0.6]
    assert caps([demand(6.5, weight=4.0), demand(6.5)]) == [0.7, 0.7], "1.6 points are cheap"


def test_only_who_is_due_within_the_horizon_is_lowered_for_it():
    near = [demand(1.0, e2e_s=2.0), demand(1.0, e2e_s=2.0)]
    far = demand(3.0, e2e_s=30.0)
    assert caps([*near, far]) == [0.8, 0.9, 0.9]


def test_who_cannot_be_saved_gets_the_lowest_and_takes_nobody_along():
    hopeless, other = demand(3.0, least_s=9.5), demand(3.0)
    assert caps([hopeless, other]) == [0.5, 0.9]


@pytest.mark.parametrize("policy", [POLICY, make_policy(HorizonCaps, COST, **PLAN)])
def test_a_deadline_that_passed_binds_nobody(policy):
    """Of a request that keeps its quality, too."""
    late = demand(1.0, e2e_s=2.0, least_s=0.5, on_miss=OnMiss.BEST_EFFORT)
    assert caps([late, demand(1.0)], now_s=5.0, policy=policy) == [0.9, 0.9]


def test_who_is_not_to_be_lowered_counts_in_full_and_the_others_pay():
    firm = demand(6.0, on_miss=OnMiss.BEST_EFFORT)
    undated = demand(6.0, e2e_s=None)
    for other in (firm, undated):
        assert caps([other, demand(4.0)]) == [0.9, 0.7]


def test_quality_between_the_points_of_the_table_is_linear():
    """0.8 is half way between 0.9 and 0.7: no longer free, as dear as 0.7."""
    quality = {"quality_thresholds": (0.9, 0.7, 0.5), "quality_points": (80.0, 70.0, 0.0)}
    policy = make_policy(MarginalCaps, COST, **quality, **PLAN)
    steep = demand((6.0, 5.0, 4.0, 3.9, 3.8))
    assert caps([steep, demand((5.8, 4.9, 4.0, 3.9, 3.8))], policy=policy) == [0.7, 0.8]


def test_a_threshold_that_saves_little_is_passed_through_to_one_that_saves_much():
    """Its own 0.8 saves nothing, but 0.7 more than the other's: both are one price."""
    stuck = demand((5.0, 5.0, 2.0, 1.9, 1.8))
    dear = demand((5.0, 4.95, 4.9, 4.8, 4.7))
    assert caps([stuck, dear]) == [0.7, 0.8]


@given(demands())
def test_supply_is_never_exceeded_if_that_can_be_avoided(rows):
    chosen = levels(rows)
    assert fits(rows, chosen) or not fits(rows, [4] * len(rows))


@given(any_shape())
def test_the_same_where_prices_rise_and_fall(rows):
    chosen = levels(rows)
    assert fits(rows, chosen) or not fits(rows, [4] * len(rows))


@given(any_shape(most=4), st.integers(2, 6))
def test_equal_requests_differ_by_one_threshold_at_most(rows, copies):
    chosen = levels(rows * copies)
    for first in range(len(rows)):
        own = chosen[first :: len(rows)]
        assert max(own) - min(own) <= 1


@given(any_shape(), st.lists(weights, min_size=2, max_size=2, unique=True))
def test_of_two_otherwise_equal_the_heavier_is_never_lower(rows, pair_of_weights):
    pair = [
        replace(
            rows[0], request=replace(rows[0].request, slo=replace(rows[0].request.slo, weight=w))
        )
        for w in sorted(pair_of_weights)
    ]
    for order in (1, -1):
        lighter, heavier = caps([*pair[::order], *rows[1:]])[:2][::order]
        assert lighter <= heavier


@given(any_shape(), st.integers(1, 4))
def test_with_one_deadline_more_supply_never_costs_quality(rows, instances):
    slo = SLO(e2e_s=5.0)
    rows = [
        replace(r, request=replace(r.request, slo=replace(slo, weight=r.request.slo.weight)))
        for r in rows
    ]
    fewer, more = (levels(rows, specs=SPECS * n) for n in (instances, instances + 1))
    assert all(a >= b for a, b in zip(fewer, more, strict=True))


@given(demands(most=10, least=(0.0,)), st.integers(1, 4))
def test_with_several_deadlines_it_costs_one_threshold_at_each_at_most(rows, instances):
    """A request lowered for one deadline may have saved too much for the next."""
    fewer, more = (
        total_lost(rows, levels(rows, specs=SPECS * n)) for n in (instances, instances + 1)
    )
    last = max(lost(row, k + 1) - lost(row, k) for row in rows for k in range(4))
    assert more <= fewer + 3 * last + 1e-9


@given(demands(most=4, deadlines=(5.0,), least=(0.0,)))
def test_against_all_choices_it_loses_less_than_one_threshold_more(rows):
    chosen = levels(rows)
    good = [c for c in itertools.product(range(5), repeat=len(rows)) if fits(rows, c)]
    if not good:
        assert chosen == [4] * len(rows)
        return
    best = min(total_lost(rows, choice) for choice in good)
    last = max(lost(row, k + 1) - lost(row, k) for row in rows for k in range(4))
    assert best - 1e-9 <= total_lost(rows, chosen) <= best + last + 1e-9


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("quality_points", (1.0,)),
        ("quality_points", (60.0, 61.0, 50.0, 40.0, 30.0)),
        ("quality_thresholds", (0.5, 0.6, 0.7, 0.8, 0.9)),
    ],
)
def test_a_table_of_quality_that_makes_no_sense_is_named(name, values):
    with pytest.raises(FieldError) as error:
        MarginalCaps.Options(**{name: values})
    assert error.value.field == name


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_a_weight_is_positive(weight):
    with pytest.raises(FieldError, match="weight"):
        SLO(weight=weight)

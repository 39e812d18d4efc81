import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepserve.core.actions import Action
from stepserve.core.config import ControlConfig
from stepserve.core.events import Event, InstanceUp
from stepserve.core.instance import InstanceSpec
from stepserve.core.plan import PlanProblem, Slot, WorkloadClass
from stepserve.core.request import SLO, DiffusionOptions, ThresholdBounds
from stepserve.live.codec import codec

numbers = st.floats(allow_nan=False)
st.register_type_strategy(float, numbers)
st.register_type_strategy(
    SLO, st.builds(SLO, e2e_s=st.none() | numbers, weight=st.floats(0.1, 9.0))
)
st.register_type_strategy(
    ThresholdBounds,
    st.tuples(st.floats(0.1, 1.0), st.floats(0.1, 1.0)).map(
        lambda pair: ThresholdBounds(max(pair), min(pair))
    ),
)
st.register_type_strategy(
    DiffusionOptions,
    st.builds(
        DiffusionOptions,
        thresholds=st.from_type(ThresholdBounds),
        block_tokens=st.integers(1, 64),
        refresh_blocks=st.integers(1, 4),
        max_forwards=st.none() | st.integers(1, 99),
    ),
)
st.register_type_strategy(
    Slot,
    st.builds(
        Slot, st.integers(0, 9), st.sets(st.integers(0, 7), min_size=1).map(sorted).map(tuple)
    ),
)
st.register_type_strategy(
    PlanProblem,
    st.builds(
        PlanProblem,
        gpus_per_node=st.just((4,)),
        tp_degrees=st.just((1, 2)),
        classes=st.just((WorkloadClass(20, 40, 2.5, 1.25),)),
        thresholds=st.just((0.9, 0.5)),
        tokens_per_step=st.tuples(st.floats(1.0, 9.0), st.floats(1.0, 9.0)),
        step_s=st.just({1: ((16, 0.1), (64, 0.3)), 2: ((16, 0.1), (64, 1 / 3))}),
    ),
)


@settings(max_examples=30)
@pytest.mark.parametrize("union", [Event, Action])
@given(data=st.data())
def test_events_and_actions_survive_the_way_through_json(union, data):
    value = data.draw(st.from_type(union))
    text = json.dumps(codec(union).encode(value))
    back = codec(union).decode(json.loads(text))
    assert back == value
    assert type(back) is type(value)


def test_defaults_are_left_out_and_members_of_a_union_are_named():
    assert codec(SLO).encode(SLO(e2e_s=2.0)) == {"e2e_s": 2.0}
    assert codec(ControlConfig).decode({}) == ControlConfig()
    spec = {
        "id": "i0",
        "tp_degree": 1,
        "page_capacity": 4,
        "page_tokens": 16,
        "max_running_requests": 2,
    }
    up = InstanceUp(InstanceSpec("i0", 1, 4, 16, 2))
    assert codec(Event).encode(up) == {"is": "InstanceUp", "spec": spec}
    assert codec(Event).decode({"is": "InstanceUp", "spec": spec}) == up


@pytest.mark.parametrize(
    "table", [{"is": "Nothing"}, {}, {"is": "InstanceUp"}, {"is": "CapsSet", "limits": []}]
)
def test_what_was_never_encoded_is_refused(table):
    with pytest.raises((KeyError, TypeError, ValueError)):
        codec(Event).decode(table)


def test_types_without_a_codec_are_named():
    with pytest.raises(TypeError, match="no codec for"):
        codec(set[int])

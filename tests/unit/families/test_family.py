"""What a family fills in, and what has no effect on it."""

import pickle

import pytest

from stepserve.core.config import Choice, ControlConfig
from stepserve.core.errors import FieldError
from stepserve.families.assemble import FAMILIES
from stepserve.families.autoregressive import AUTOREGRESSIVE
from stepserve.families.diffusion import DIFFUSION
from support.parts import make_control

VALUES = {
    "threshold": "deadline_fit",
    "thresholds": [0.9],
    "infeasible": "preempt",
    "load_control": "load_caps",
    "caps_every_s": 9.0,
    "migration": "any_step",
    "refresh": "when_slack",
    "segment_cost": "elapsed",
    "tbt_s": 0.2,
    "chunk_tokens": 64,
    "push_pages": 0,
}


@pytest.mark.parametrize(
    ("family", "name"), [(f, name) for f in FAMILIES.values() for name in f.without_effect]
)
def test_an_option_without_effect_is_an_error_that_names_it(family, name):
    with pytest.raises(FieldError, match=f"has no effect on {family.name} models") as error:
        family.resolved(make_control(**{name: VALUES[name]}))
    assert error.value.field == f"control.{name}"
    (other,) = (f for f in FAMILIES.values() if f is not family)
    other.resolved(make_control(**{name: VALUES[name]}))


def test_what_says_the_same_as_the_family_is_no_error():
    control = make_control(threshold="fixed", load_control="none", migration="none")
    assert AUTOREGRESSIVE.resolved(control) == AUTOREGRESSIVE.resolved(ControlConfig())


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_resolving_leaves_nothing_open_and_does_so_once(family):
    control = family.resolved(ControlConfig())
    assert {kind: getattr(control, kind) for kind in family.defaults} == family.defaults
    assert control.predict_every_tokens == family.predict_every_tokens
    assert family.resolved(control) == control
    assert pickle.loads(pickle.dumps(control)) == control


def test_a_table_without_use_changes_the_default():
    control = DIFFUSION.resolved(make_control(threshold={"margin": 0.5}))
    assert control.threshold == Choice("deadline_fit", {"margin": 0.5})
    control = AUTOREGRESSIVE.resolved(make_control(placement={"gain": 0.1}))
    assert control.placement == Choice("tandem_split", {"gain": 0.1})


def test_a_policy_that_weighs_requests_says_so():
    assert DIFFUSION.weighs(make_control(load_control="marginal_caps"))
    assert AUTOREGRESSIVE.weighs(make_control(batching={"order": "priority"}))
    assert not DIFFUSION.weighs(ControlConfig())
    assert not AUTOREGRESSIVE.weighs(ControlConfig())


def test_layouts_are_planned_for_diffusion_models_only():
    control = make_control(planner="greedy")
    DIFFUSION.check(control, 2)
    with pytest.raises(FieldError) as error:
        AUTOREGRESSIVE.check(control, 2)
    assert error.value.field == "control.planner"


def test_options_that_make_no_sense_on_so_few_instances_are_named():
    control = make_control(placement={"use": "disaggregated", "prefill_instances": 2})
    AUTOREGRESSIVE.check(control, 3)
    with pytest.raises(FieldError) as error:
        AUTOREGRESSIVE.check(control, 2)
    assert error.value.field == "control.placement.prefill_instances"


@pytest.mark.parametrize("wrong", ["two", 0, True])
def test_options_of_a_wrong_type_are_named_before_anything_is_made(wrong):
    control = make_control(placement={"use": "disaggregated", "prefill_instances": wrong})
    with pytest.raises(FieldError) as error:
        AUTOREGRESSIVE.check(control, 3)
    assert error.value.field == "control.placement.prefill_instances"

"""Placement by fixed roles, the disaggregated baseline."""

from stepserve.core.forecast import StepForecast
from stepserve.core.ids import RequestId
from stepserve.core.instance import ClusterView, InstanceLoad, Work
from stepserve.core.request import Family, Progress, Request
from stepserve.policies.placement.disaggregated import Disaggregated
from support.parts import make_policy
from support.toy_world import make_spec


def load(name, tokens=0, waiting=0):
    work = (Work(waiting, 0, 100.0),) * 2
    return InstanceLoad(make_spec(name), 2, tokens, 200, 0.0, work)


def by_role(prefill_instances, **options):
    return make_policy(Disaggregated, prefill_instances=prefill_instances, **options)


def place(policy, *loads, emitted=0, limit=500):
    request = Request(RequestId("r"), Family.AUTOREGRESSIVE, "m", 1000, limit, 0.0)
    view = ClusterView(0.0, {row.spec.id: row for row in loads})
    placement = policy.place(request, Progress(0, emitted), StepForecast((1.0,), (9.0,), 9.0), view)
    return [(s.index, s.instance, s.start, s.stop) for s in placement.segments]


def test_prompts_go_to_the_least_loaded_of_the_first_and_outputs_to_that_of_the_others():
    loads = load("d", 5), load("a", 9), load("c", 7), load("b", 8)
    assert place(by_role(2), *loads) == [(0, "b", 0, 1000), (1, "d", 1000, None)]
    assert place(by_role(3), *loads) == [(0, "c", 0, 1000), (1, "d", 1000, None)]
    tied = load("b"), load("d"), load("c"), load("a")
    assert place(by_role(2), *tied) == [(0, "a", 0, 1000), (1, "c", 1000, None)]


def test_what_was_emitted_is_computed_again_with_the_prompt():
    loads = load("a"), load("b")
    assert place(by_role(1), *loads, emitted=7)[1] == (1, "b", 1007, None)


def test_a_prompt_that_fits_the_bypass_is_computed_where_it_is_decoded():
    loads = load("a"), load("b", 9, waiting=100)
    assert place(by_role(1, bypass_tokens=1200), *loads) == [(0, "b", 0, None)]
    assert len(place(by_role(1, bypass_tokens=1199), *loads)) == 2


def test_one_token_needs_no_second_instance():
    assert place(by_role(1), load("b"), load("a"), limit=1) == [(0, "a", 0, None)]


def test_a_full_instance_keeps_its_role():
    kept = by_role(1)
    place(kept, load("a"), load("b"), load("c"))
    # a has no room: b decodes still, and the request stays with those who do.
    assert place(kept, load("c", 3), load("b", 5)) == [(0, "c", 0, None)]
    assert place(kept, load("a")) == [(0, "a", 0, None)]

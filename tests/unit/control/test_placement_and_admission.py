from dataclasses import replace

import pytest

from stepserve.control.admission import Admission, refusal
from stepserve.control.ledger import RequestState
from stepserve.core.actions import Finish, Reject
from stepserve.core.config import Choice, ControlConfig
from stepserve.core.errors import FieldError
from stepserve.core.forecast import StepForecast
from stepserve.core.instance import ClusterView, InstanceLoad
from stepserve.core.request import OnMiss, Progress, Refusal
from stepserve.cost.step_table import StepTable
from stepserve.families.assemble import assemble_global
from stepserve.families.diffusion import DIFFUSION
from stepserve.families.programs.autoregressive import AutoregressiveProgram
from stepserve.families.programs.diffusion import DiffusionProgram
from stepserve.policies.placement.least_loaded import LeastLoaded
from stepserve.policies.placement.step_completion import StepCompletion
from support.parts import make_policy
from support.toy_ar import make_token_request
from support.toy_world import PROFILE, ToyWorld, make_request, make_spec

PROGRAM = DiffusionProgram()
COST = StepTable({1: PROFILE})
FORECAST = StepForecast((0.9,), (8.0,), 32.0)


def load(name, tokens=0, running_requests=0, ends_s=0.0, limit=8):
    spec = make_spec(name, running_requests=limit)
    return InstanceLoad(spec, running_requests, tokens, 200, ends_s)


def place(policy, *loads, at_s=0.0):
    view = ClusterView(at_s, {row.spec.id: row for row in loads})
    (segment,) = policy.place(make_request(), Progress(settled=20), FORECAST, view).segments
    assert (segment.start, segment.stop) == (20, None)
    return segment.instance


def test_least_loaded_takes_the_smallest_load_and_breaks_ties_by_name():
    assert place(make_policy(LeastLoaded), load("b", 10), load("a", 200)) == "b"
    assert place(make_policy(LeastLoaded), load("b"), load("a")) == "a"


def test_step_completion_counts_the_running_batch_and_the_newcomer():
    soonest = make_policy(StepCompletion, COST, PROGRAM)
    busy, full = load("busy", 0, ends_s=5.1), load("full", 300)
    assert place(soonest, busy, full, at_s=5.0) == "full"  # 108 ms against 30 ms
    assert place(soonest, busy, full, at_s=5.09) == "busy"  # 18 ms against 30 ms
    assert place(soonest, load("b", ends_s=1.0), load("a", ends_s=2.0), at_s=9.0) == "a"


def completion(loads, ahead=0):
    request = make_request(prompt=16, output=48)
    forecast = StepForecast((0.9, 0.5), (30.0, 10.0), 48.0)
    state = RequestState(request, PROGRAM.start(request), forecast=forecast)
    room = [row for row in loads if row.running_requests < row.spec.max_running_requests]
    return Admission(None, None, None, PROGRAM, COST).completion_s(state, room, loads, ahead)


def test_predicted_completion_grows_with_load_and_queue():
    idle, busy = completion([load("a")]), completion([load("a", running_requests=7)])
    assert idle < busy < completion([load("a", running_requests=7)], ahead=8)
    assert completion([load("a", running_requests=7), load("b")]) == idle
    assert completion([]) == float("inf")


def test_an_autoregressive_request_is_priced_by_what_its_batches_are_made_of():
    """A decode is no prefill of one token: the two are learned apart."""

    class Priced:
        def step_time_s(self, tokens, rows, spec, mix=None):
            assert (tokens, rows) == (mix.prefill_tokens + mix.decodes, mix.decodes + (tokens > 4))
            return 0.5 if mix.prefill_tokens else 0.01 * mix.decodes

    request = make_token_request("r", prompt=150, output=40)
    program, forecast = AutoregressiveProgram(64), StepForecast((1.0,), (40.0,), 40.0)
    rows = [load("a", running_requests=3)]
    state = RequestState(request, program.start(request), forecast=forecast)
    admission = Admission(None, None, None, program, Priced())
    seconds = admission.completion_s(state, rows, rows, ahead=0)
    assert seconds == pytest.approx(3 * 0.5 + 40 * 0.01 * 4)


@pytest.mark.parametrize(("on_miss", "answer"), [(OnMiss.REJECT, Reject), (OnMiss.DEGRADE, Finish)])
def test_only_those_who_asked_are_rejected_for_a_hopeless_deadline(on_miss, answer):
    world = ToyWorld(0)
    request = make_request(arrival_s=0.1, e2e_s=0.001, on_miss=on_miss)
    world.arrive(request)
    world.run()
    assert isinstance(world.truths["r0"].answers[0], answer)


@pytest.mark.parametrize(
    ("e2e_s", "fixed", "reason", "retry_s"),
    [
        (-1.0, False, Refusal.DEADLINE, None),
        (0.0, False, Refusal.DEADLINE, None),
        (1.9, False, Refusal.DEADLINE, None),
        (3.0, False, Refusal.SATURATED, 2.0),
        (4.99, False, Refusal.SATURATED, 0.1),
        (3.0, True, Refusal.SATURATED, None),
    ],
)
def test_a_refusal_says_whether_asking_again_can_help(e2e_s, fixed, reason, retry_s):
    """Five seconds from now, or two if nothing else ran."""
    request = make_request(e2e_s=e2e_s)
    request = replace(request, slo=replace(request.slo, fixed_deadline=fixed))
    refused = refusal(request, need_s=5.0, alone_s=2.0, left_s=e2e_s)
    assert (refused.reason, refused.retry_after_s) == (reason, pytest.approx(retry_s, abs=0.1))


def test_a_feasible_deadline_is_not_rejected():
    world = ToyWorld(0)
    world.arrive(make_request(arrival_s=0.1, e2e_s=9.0, on_miss=OnMiss.REJECT))
    world.run()
    assert isinstance(world.truths["r0"].answers[0], Finish)


def test_an_unknown_policy_is_named():
    with pytest.raises(FieldError, match=r"control\.placement: unknown 'nearest'"):
        assemble_global(DIFFUSION, ControlConfig(placement=Choice("nearest")), COST)

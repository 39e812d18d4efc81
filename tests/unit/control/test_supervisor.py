"""What outlives a global scheduler."""

from stepserve.control.supervisor import Supervisor
from stepserve.core.actions import Finish, Rebuild
from stepserve.core.events import (
    InstanceLost,
    InstanceUp,
    OpenRequest,
    Predicted,
    RequestArrived,
    RequestCancelled,
    SchedulerStarted,
)
from stepserve.core.forecast import StepForecast
from stepserve.core.ids import RequestId
from stepserve.core.request import FinishReason, Progress
from stepserve.cost.step_table import StepTable
from stepserve.families.assemble import assemble_global
from stepserve.families.diffusion import DIFFUSION
from support.parts import make_control
from support.scripted_cluster import PROFILE, request, slot_spec

A, B = slot_spec(0), slot_spec(1)
REACHED = Progress(21, 1, 1)


def supervisor():
    config = make_control(tp_degrees=(1, 2))
    made = Supervisor(
        lambda: assemble_global(DIFFUSION, config, StepTable({1: PROFILE, 2: PROFILE}))
    )
    handle(made, made.start((A, B)))
    return made


def handle(made, event):
    """As a driver: every action is carried out."""
    actions = made.handle(0.0, event)
    for action in actions:
        made.note(action)
    return actions


def up(made, *specs):
    for spec in specs:
        handle(made, InstanceUp(spec))


def placed(made, name):
    handle(made, RequestArrived(request(name)))
    forecast = StepForecast((0.9, 0.7, 0.5), (20.0, 15.0, 10.0), 48.0)
    handle(made, Predicted(RequestId(name), forecast))


def test_the_next_scheduler_is_told_where_instances_are():
    made = supervisor()
    assert set(made.starting.values()) == {A, B}, "the first scheduler asked for them"
    up(made, A)
    (started,) = made.restart(lambda _: None)
    assert started == SchedulerStarted(1, (A, B), (), (A,), (B,))


def test_a_lost_instance_is_formed_anew_and_the_layout_stands():
    made = supervisor()
    up(made, A, B)
    handle(made, InstanceLost(B, ()))
    (started,) = made.restart(lambda _: None)
    assert started == SchedulerStarted(1, (A, B), (), (A,), (B,)), "its rebuild was asked for"


def test_open_requests_are_told_with_their_epochs_and_who_left_is_told_again():
    made = supervisor()
    up(made, A, B)
    placed(made, "stays")
    placed(made, "leaves")
    handle(made, RequestArrived(request("waits")))
    handle(made, RequestCancelled(RequestId("leaves"), FinishReason.CANCELLED))
    started, *cancels = made.restart(lambda name: REACHED if name == "stays" else None)
    assert started.requests == (
        OpenRequest(request("stays"), REACHED, 1),
        OpenRequest(request("leaves"), None, 1),
        OpenRequest(request("waits"), None, 0),
    )
    assert cancels == [RequestCancelled(RequestId("leaves"), FinishReason.CANCELLED)]
    assert made.restarts == 1


def test_what_is_answered_is_forgotten():
    made = supervisor()
    up(made, A)
    handle(made, RequestArrived(request("gone")))
    handle(made, RequestCancelled(RequestId("gone"), FinishReason.CANCELLED))
    handle(made, RequestArrived(request("given up")))
    made.forget(RequestId("given up"))
    (started,) = made.restart(lambda _: None)
    assert not started.requests


def test_an_action_that_was_not_carried_out_is_not_taken_for_done():
    made = supervisor()
    up(made, A, B)
    handle(made, RequestArrived(request("waits")))
    left = RequestCancelled(RequestId("waits"), FinishReason.CANCELLED)
    assert [type(action) for action in made.handle(0.0, left)] == [Finish]
    assert Rebuild in [type(action) for action in made.handle(0.0, InstanceLost(B, ()))]
    started, *cancels = made.restart(lambda _: None)
    assert started.requests == (OpenRequest(request("waits"), None, 0),), "its client still waits"
    assert cancels == [left]
    assert started.layout == (A, B)
    assert started.starting == (), "nobody has begun to start B"

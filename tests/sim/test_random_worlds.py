"""Seeded random worlds: arrivals, cancellations, losses; invariants after every event.

``tools/fuzz_simulations.py`` runs the same worlds by the thousand.
"""

import pytest

from stepserve.core.actions import Finish, Reject
from stepserve.core.config import ControlConfig
from stepserve.core.request import FinishReason
from support.parts import make_control
from support.random_worlds import random_config, random_faults, run_world
from support.toy_world import ToyWorld, make_request, make_spec

POLICIES = [
    make_control(placement=p, batching=b, threshold=t, thresholds=(0.9, 0.7, 0.5), queue_limit=q)
    for p, b, t, q in [
        ("least_loaded", "all_running", "fixed", 1000),
        ("step_completion", "all_running", "deadline_fit", 20),
        ("step_completion", "latency_budget", "deadline_fit", 1000),
        ("least_loaded", "latency_budget", "fixed", 10),
    ]
]


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_lost_and_nothing_is_left(seed):
    world = run_world(seed, random_config(seed), **random_faults(seed))
    for truth in world.truths.values():
        (answer,) = truth.answers
        if isinstance(answer, Finish) and answer.reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert truth.emitted == truth.ends_at
        if isinstance(answer, Reject):
            assert truth.steps == 0, "a rejected request cost nothing"


def test_these_worlds_do_what_they_are_for():
    """Guards the test above: worlds where nothing happens would make it vacuous."""
    worlds = [run_world(seed, random_config(seed), **random_faults(seed)) for seed in range(12)]
    assert sum(w.world.losses for w in worlds) >= 5
    assert sum(w.world.supervisor.scheduler.reconfiguration.changes for w in worlds) >= 3
    releases = [r.releases for w in worlds for r in w.world.records.values()]
    assert sum(releases) >= 20
    events = {type(event).__name__ for w in worlds for _, event, _ in w.log}
    assert {"InstanceLost", "InstanceStopped", "PlanSolved", "RequestCancelled"} <= events


def test_same_seed_same_actions():
    one, two = run_world(5, POLICIES[2]), run_world(5, POLICIES[2])
    assert one.log == two.log
    assert one.log != run_world(6, POLICIES[2]).log


def test_failed_rows_end_their_requests_alone():
    world = run_world(7, POLICIES[2], cancel_share=0.0, row_error_rate=0.02)
    reasons = [
        t.answers[0].reason for t in world.truths.values() if isinstance(t.answers[0], Finish)
    ]
    assert FinishReason.ERROR in reasons
    assert reasons.count(FinishReason.ERROR) < len(reasons) / 2


def test_1000_cancellations_at_random_moments_leak_nothing():
    """A disconnect in mid-block leaked one block of KV each time."""
    run_world(11, POLICIES[2], requests=1000, cancel_share=1.0)


def test_a_request_that_outgrows_every_instance_fails_at_once():
    world = ToyWorld(0, specs=[make_spec(pages=2)])
    world.arrive(make_request(prompt=400, output=10, arrival_s=0.1))
    world.run()
    (answer,) = world.truths["r0"].answers
    assert answer.reason is FinishReason.ERROR
    assert "KV pages" in answer.error


def test_queue_limit_rejects_with_a_retry_time():
    config = ControlConfig(thresholds=(0.9, 0.5), queue_limit=2)
    world = ToyWorld(0, config=config, specs=[make_spec(running_requests=1)])
    for index in range(8):
        world.arrive(make_request(f"r{index}", arrival_s=0.1 + index * 1e-3))
    world.run()
    rejected = [t for t in world.truths.values() if isinstance(t.answers[0], Reject)]
    assert rejected
    assert all(t.answers[0].retry_after_s >= 0.1 for t in rejected)
    world.check_rest()


def test_requests_are_kept_while_every_instance_is_gone():
    world = ToyWorld(0, specs=[make_spec()])
    world.arrive(make_request(arrival_s=0.1, output=64), 64)
    world.lose_at(0.105, "i0")
    world.arrive(make_request("r1", arrival_s=0.2))
    world.run()
    world.check_rest()
    assert all(t.answers[0].reason is not FinishReason.ERROR for t in world.truths.values())
    assert world.truths["r0"].emitted == 64

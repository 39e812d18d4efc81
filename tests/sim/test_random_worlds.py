"""Seeded random worlds: arrivals, cancellations, losses; invariants after every event."""

import random

import pytest

from stepserve.core.actions import Finish, Reject
from stepserve.core.config import ControlConfig
from stepserve.core.request import CacheMode, FinishReason, OnMiss
from support.toy_world import ToyWorld, make_request, make_spec


def random_request(rng, name, now_s):
    preferred = rng.choice([0.9, 0.8, 0.5])
    return make_request(
        name,
        prompt=rng.randint(1, 120),
        output=rng.randint(1, 90),
        arrival_s=now_s,
        block=rng.choice([8, 16, 32]),
        cache=rng.choice(list(CacheMode)),
        refresh=rng.choice([1, 1, 2, 3]),
        e2e_s=rng.choice([None, 0.02, 0.2, 1.0]),
        on_miss=rng.choice(list(OnMiss)),
        preferred=preferred,
        floor=rng.choice([preferred, 0.5]),
    )


def run_world(seed, config, requests=60, loss_rate=0.01, cancel_share=0.2, error_rate=0.0):
    world = ToyWorld(seed, config=config, loss_rate=loss_rate, error_rate=error_rate)
    rng = random.Random(seed + 1)
    when_s = 0.0
    for index in range(requests):
        when_s += rng.expovariate(40.0)
        request = random_request(rng, f"r{index}", when_s)
        world.at(when_s, world.arrive, request)
        if rng.random() < cancel_share:
            world.at(when_s + rng.random() * 0.3, world.cancel, request.id)
    world.run()
    world.check_rest()
    return world


POLICIES = [
    ControlConfig(placement=p, batching=b, threshold=t, thresholds=(0.9, 0.7, 0.5), queue_limit=q)
    for p, b, t, q in [
        ("least_loaded", "all_resident", "fixed", 1000),
        ("step_completion", "all_resident", "deadline_fit", 20),
        ("step_completion", "latency_budget", "deadline_fit", 1000),
        ("least_loaded", "latency_budget", "fixed", 10),
    ]
]


@pytest.mark.parametrize(
    "config", POLICIES, ids=lambda c: f"{c.placement}-{c.batching}-{c.threshold}"
)
@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_lost_and_nothing_is_left(config, seed):
    world = run_world(seed, config)
    for truth in world.truths.values():
        (answer,) = truth.answers
        if isinstance(answer, Finish) and answer.reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert truth.emitted == truth.ends_at
        if isinstance(answer, Reject):
            assert truth.steps == 0, "a rejected request cost nothing"


def test_losses_do_happen_in_these_worlds():
    """Guards the test above: a fault injector that never fires would make it vacuous."""
    world = run_world(3, POLICIES[0], loss_rate=0.02)
    assert max(world.incarnation.values()) >= 2
    assert world.false_losses


def test_same_seed_same_actions():
    one, two = run_world(5, POLICIES[2]), run_world(5, POLICIES[2])
    assert one.log == two.log
    assert one.log != run_world(6, POLICIES[2]).log


def test_failed_rows_end_their_requests_alone():
    world = run_world(7, POLICIES[2], cancel_share=0.0, error_rate=0.02)
    reasons = [
        t.answers[0].reason for t in world.truths.values() if isinstance(t.answers[0], Finish)
    ]
    assert FinishReason.ERROR in reasons
    assert reasons.count(FinishReason.ERROR) < len(reasons) / 2


def test_1000_cancellations_at_random_moments_leak_nothing():
    """Known fault 4: a disconnect in mid-block leaked one block of KV each time."""
    run_world(11, POLICIES[2], requests=1000, loss_rate=0.0, cancel_share=1.0)


def test_a_request_that_outgrows_every_instance_fails_at_once():
    world = ToyWorld(0, specs=[make_spec(pages=2)])
    world.at(0.1, world.arrive, make_request(prompt=400, output=10))
    world.run()
    (answer,) = world.truths["r0"].answers
    assert answer.reason is FinishReason.ERROR
    assert "KV pages" in answer.error


def test_queue_limit_rejects_with_a_retry_time():
    config = ControlConfig(thresholds=(0.9, 0.5), queue_limit=2)
    world = ToyWorld(0, config=config, specs=[make_spec(residents=1)])
    for index in range(8):
        world.at(0.1 + index * 1e-3, world.arrive, make_request(f"r{index}", arrival_s=0.1))
    world.run()
    rejected = [t for t in world.truths.values() if isinstance(t.answers[0], Reject)]
    assert rejected
    assert all(t.answers[0].retry_after_s >= 1.0 for t in rejected)
    world.check_rest()


def test_requests_are_kept_while_every_instance_is_gone():
    world = ToyWorld(0, specs=[make_spec()])
    world.at(0.1, world.arrive, make_request(arrival_s=0.1, output=64), 64)
    world.at(0.105, world.lose, "i0")
    world.at(0.2, world.arrive, make_request("r1", arrival_s=0.2))
    world.run()
    world.check_rest()
    assert all(t.answers[0].reason is not FinishReason.ERROR for t in world.truths.values())
    assert world.truths["r0"].emitted == 64

"""Worlds drawn from a seed: any combination of policies, faults, cancellations and requests."""

import random
from dataclasses import replace

from stepserve.core.request import CacheMode, OnMiss, RefreshScope
from support.parts import make_control
from support.toy_world import ToyWorld, make_request, make_slots


def random_config(seed):
    """Any policy may meet any other. Planners ask often, so that layouts do change."""
    rng = random.Random(f"{seed}/config")
    queue, infeasible = rng.choice(
        [
            ("deadline", "lowest_threshold"),
            ("deadline", "preempt"),
            ("fcfs", "lowest_threshold"),
            ("fcfs_drop", "lowest_threshold"),
        ]
    )
    drawn = {
        "placement": rng.choice(["least_loaded", "step_completion"]),
        "batching": rng.choice(["all_running", "latency_budget"]),
        "threshold": rng.choice(["fixed", "deadline_fit", "at_cap"]),
        "load_control": rng.choice(["none", "load_caps", "horizon_caps", "marginal_caps"]),
        "migration": rng.choice(["none", "recompute_step", "any_step"]),
        "planner": rng.choice(["none", "greedy", "greedy"]),
        "queue": queue,
        "tenant_weights": {"a": 2.0},
        "infeasible": infeasible,
        "refresh": rng.choice(["as_asked", "when_slack"]),
        "thresholds": (0.9, 0.7, 0.5),
        "queue_limit": rng.choice([5, 20, 1000]),
        "admitted_limit": rng.choice([0, 0, 6]),
        "running_tokens": rng.choice([0, 0, 400]),
    }
    options = {"heavy_tokens": rng.choice([64, 8192])}
    for kind in ("batching", "refresh"):
        if drawn[kind] in ("latency_budget", "when_slack"):
            drawn[kind] = {"use": drawn[kind], **options}
    drawn |= {
        "predict_every_tokens": rng.choice([1, 8, 1000]),
        "caps_every_s": rng.choice([0.0, 0.1]),
        "report_every_s": rng.choice([0.0, 0.01, 0.25]),
        "plan_every_s": 0.4,
        "tp_degrees": (1, 2),
    }
    gain = rng.choice([0.0, 0.05])
    if drawn["migration"] != "none":
        drawn["migration"] = {"use": drawn["migration"], "gain": gain}
    return make_control(**drawn)


def random_faults(seed):
    """Fields of ``FaultConfig``; a third of the worlds have none but jitter."""
    rng = random.Random(f"{seed}/faults")
    if rng.random() < 1 / 3:
        return {}
    return {
        "losses_per_hour": rng.choice([0.0, 2000.0, 8000.0]),
        "false_loss_share": rng.choice([0.0, 0.5]),
        "restarts_per_hour": random.Random(f"{seed}/restarts").choice([0.0, 0.0, 3600.0, 20000.0]),
        "row_error_rate": rng.choice([0.0, 0.01]),
        "late_share": rng.choice([0.0, 0.05]),
        "late_s": 0.02,
        "slow_instances": rng.choice([0, 1]),
        "slow_factor": 4.0,
        "step_cv": rng.choice([0.0, 0.3]),
    }


def random_request(rng, name, now_s):
    preferred = rng.choice([0.9, 0.9, 0.8, 0.5])
    cache = rng.choice(list(CacheMode))
    scopes = [RefreshScope.FULL] if cache.exact else list(RefreshScope)
    return make_request(
        name,
        prompt=rng.randint(1, 120),
        output=rng.randint(1, 90),
        arrival_s=now_s,
        block=rng.choice([8, 16, 32]),
        cache=cache,
        refresh=rng.choice([1, 1, 2, 3]),
        scope=rng.choice(scopes),
        e2e_s=rng.choice([None, 0.02, 0.2, 1.0]),
        on_miss=rng.choice(list(OnMiss)),
        preferred=preferred,
        floor=rng.choice([preferred, 0.5, 0.5]),
    )


def run_world(seed, config, requests=60, cancel_share=0.2, **faults):
    """Run a world to its rest and check that nothing is left."""
    specs = make_slots(pages=60) if config.planner != "none" else None
    world = ToyWorld(seed, config=config, specs=specs, **faults)
    rng, whose = random.Random(seed + 1), random.Random(f"{seed}/tenants")
    tenants = whose.choice([("",), ("a", "b"), ("a", "b", "b", "b", "c")])
    when_s = 0.0
    for index in range(requests):
        when_s += rng.expovariate(40.0)
        request = random_request(rng, f"r{index}", when_s)
        request = replace(request, tenant=whose.choice(tenants))
        world.arrive(request)
        if rng.random() < cancel_share:
            world.cancel_at(when_s + rng.random() * 0.3, request.id)
    world.run()
    world.check_rest()
    return world

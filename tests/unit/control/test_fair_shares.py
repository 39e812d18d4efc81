"""The fair order: who waits for whom, by how much shares differ, and who is refused."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepserve.control.fair_shares import FairQueue
from stepserve.core.actions import Reject
from stepserve.core.config import ControlConfig
from stepserve.core.errors import FieldError
from stepserve.core.events import (
    RequestArrived,
    RequestCancelled,
    SegmentEnded,
    SegmentPlaced,
    SegmentReleased,
)
from stepserve.core.request import FinishReason, Progress
from stepserve.core.segment import SegmentEnd
from support.scripted_cluster import ScriptedCluster, request, sent
from support.toy_world import make_spec

NAMES = "abc"
WEIGHTS = st.fixed_dictionaries({name: st.sampled_from([0.25, 1.0, 3.0]) for name in NAMES})
COSTS = st.floats(0.01, 5.0)
ARRIVALS = st.tuples(st.sampled_from(NAMES), st.floats(0.0, 100.0))
STEPS = st.lists(st.one_of(ARRIVALS, COSTS), max_size=80)


def waiting(queue):
    return {name: queue.had_s[name] for name in queue._rows}


def serve(queue, tenants, cost_s):
    """Place the head and charge for it; its key, and what every waiting tenant had before."""
    before = waiting(queue)
    key = queue.head()
    queue.remove(tenants[key[2]], key)
    queue.charge(tenants[key[2]], cost_s, served=True)
    return key, before


@given(WEIGHTS, STEPS)
def test_no_tenant_below_its_share_waits_for_one_above(weights, steps):
    queue, tenants = FairQueue(weights), {}
    for step in steps:
        if isinstance(step, tuple):
            name = f"r{len(tenants):03d}"
            tenants[name] = step[0]
            queue.push(step[0], (step[1], 0.0, name))
        elif queue:
            rows = {name: list(keys) for name, keys in queue._rows.items()}
            key, before = serve(queue, tenants, step)
            assert before[tenants[key[2]]] == min(before.values())
            assert key == min(rows[tenants[key[2]]]), "of one tenant, due time decides"


@given(WEIGHTS, st.lists(COSTS, min_size=1, max_size=120))
def test_shares_of_tenants_that_wait_all_the_while_differ_by_two_requests_at_most(weights, costs):
    queue, tenants, had = FairQueue(weights), {}, dict.fromkeys(NAMES, 0.0)
    for index in range(len(costs)):
        for name in NAMES:
            tenants[f"{name}{index}"] = name
            queue.push(name, (float(index), 0.0, f"{name}{index}"))
    for cost_s in costs:
        key, _ = serve(queue, tenants, cost_s)
        had[tenants[key[2]]] += cost_s
        by_weight = [had[name] / weights[name] for name in NAMES]
        longest = max(max(costs) / weights[name] for name in NAMES)
        assert max(by_weight) - min(by_weight) <= 2.0 * longest + 1e-9


@given(WEIGHTS, st.lists(COSTS, min_size=60, max_size=60), st.integers(0, 5))
def test_a_request_waits_for_its_own_and_for_a_bounded_share_of_others(weights, costs, own):
    """However many others wait and come, whatever they had before."""
    queue, tenants = FairQueue(weights), {}

    def push(name, due_s):
        request_id = f"{name}{len(tenants)}"
        tenants[request_id] = name
        queue.push(name, (due_s, 0.0, request_id))
        return request_id

    for due_s in range(30):
        push("a", float(due_s))
    for cost_s in costs[:20]:
        serve(queue, tenants, cost_s)
    for due_s in range(own):
        push("b", float(due_s))
    last = push("b", 1e6)
    others_s = 0.0
    for cost_s in costs * 100:
        push("a", 0.0)
        push("c", 0.0)
        key, _ = serve(queue, tenants, cost_s)
        if key[2] == last:
            break
        others_s += 0.0 if tenants[key[2]] == "b" else cost_s
    else:
        pytest.fail("starved")
    longest = max(costs)
    turns_s = (own * longest / weights["b"]) * (weights["a"] + weights["c"])
    assert others_s <= turns_s + 2.0 * longest + 1e-6


@given(st.lists(st.tuples(st.floats(0.0, 9.0), st.floats(0.0, 9.0)), max_size=40))
def test_one_tenant_is_in_order_of_due_time(times):
    queue = FairQueue({})
    keys = [(due_s, at_s, f"r{n}") for n, (due_s, at_s) in enumerate(times)]
    for key in keys:
        queue.push("", key)
    assert [key for _, key in queue.ranks()] == sorted(keys)
    for n, key in enumerate(sorted(keys)):
        assert queue.ahead("", key) == n


def test_a_tenant_that_comes_back_has_saved_nothing_up():
    queue, tenants = FairQueue({}), {}
    for n in range(20):
        tenants[f"a{n}"] = "a"
        queue.push("a", (float(n), 0.0, f"a{n}"))
    for _ in range(10):
        serve(queue, tenants, 1.0)
    queue.push("b", (50.0, 0.0, "b0"))
    assert waiting(queue) == {"a": 10.0, "b": 10.0}
    tenants["b0"] = "b"
    assert serve(queue, tenants, 1.0)[0][2] == "a10", "both are even: the earlier is due first"
    assert serve(queue, tenants, 1.0)[0][2] == "b0"


def test_a_full_queue_refuses_whose_share_of_it_is_used_up():
    queue = FairQueue({"b": 3.0})
    for n in range(8):
        queue.push("a", (float(n), 0.0, f"a{n}"))
    assert queue.is_full("a", 8)
    for n in range(6):
        assert not queue.is_full("b", 8)
        queue.push("b", (float(n), 0.0, f"b{n}"))
    assert queue.is_full("b", 8)
    assert queue.is_full("a", 8)


# -- in the scheduler


class Cluster(ScriptedCluster):
    """An instance with few places; requests end when the test says so."""

    def __init__(self, places=1, **config):
        super().__init__(make_spec("i0", running_requests=places), **config)

    def ask(self, tenant, name, **options):
        asked = replace(request(name, arrival_s=self.now_s, **options), tenant=tenant)
        return self.tell(RequestArrived(asked))

    def end(self, name, steps=20):
        state = self.scheduler.ledger.requests[name]
        tokens = state.request.prompt_tokens + 2 * steps
        progress = Progress(tokens, 2 * steps, steps, FinishReason.STOP)
        return self.tell(SegmentEnded(state.segment, SegmentEnd.FINISHED, progress))


def placed(actions):
    return [event.request.id for _, event in sent(actions, SegmentPlaced)]


def released(actions):
    return [event.request_id for _, event in sent(actions, SegmentReleased)]


def test_a_flood_does_not_make_another_tenant_wait():
    cluster = Cluster()
    for n in range(50):
        cluster.ask("flood", f"f{n:02d}")
    cluster.now_s = 1.0
    cluster.ask("other", "o0")
    order = [name for n in range(2) for name in placed(cluster.end(["f00", "f01"][n]))]
    assert order == ["f01", "o0"], "even: the earlier; then the one that had less"


def test_one_queue_lets_the_flood_go_first():
    cluster = Cluster(tenant_order="together")
    for n in range(5):
        cluster.ask("flood", f"f{n}")
    cluster.now_s = 1.0
    cluster.ask("other", "o0")
    order = [name for n in range(5) for name in placed(cluster.end(f"f{n}"))]
    assert order == ["f1", "f2", "f3", "f4", "o0"]
    full = Cluster(tenant_order="together", queue_limit=1)
    asked = [full.ask(tenant, f"x{n}") for n, tenant in enumerate("aab")]
    assert isinstance(asked[-1][0], Reject), "of one queue nobody has a share"


def test_weights_share_the_machine_out():
    cluster = Cluster(tenant_weights={"a": 3.0})
    cluster.ask("", "first")
    for n in range(60):
        cluster.ask("a", f"a{n:02d}")
        cluster.ask("b", f"b{n:02d}")
    order, running = [], "first"
    for _ in range(40):
        (running,) = placed(cluster.end(running))
        order.append(running[0])
    assert 29 <= order.count("a") <= 31


def test_a_tenant_pays_for_what_was_run_not_for_what_was_predicted():
    cluster = Cluster(places=2)
    cluster.ask("a", "a0")
    cluster.ask("b", "b0")
    cluster.ask("a", "a1")
    cluster.ask("b", "b1")
    queue = cluster.scheduler._queue
    predicted_s = queue.had_s["b"]
    cluster.end("b0", steps=5)
    assert cluster.scheduler.ledger.requests["b1"].segment is not None
    paid_s = queue.had_s["b"] - predicted_s
    state = cluster.scheduler.ledger.requests["b1"]
    assert paid_s < state.charged[1], "less than a second request: the first was short"
    cluster.tell(RequestCancelled("b1", FinishReason.CANCELLED))
    cluster.tell(SegmentEnded(state.segment, SegmentEnd.RELEASED, Progress(20, 0, 0)))
    assert "b1" not in cluster.scheduler.ledger.requests
    assert queue.had_s["b"] < predicted_s, "a request that ran nothing costs nothing"


def test_a_flood_that_fills_the_queue_leaves_room_for_others():
    cluster = Cluster(queue_limit=6)
    refused = [cluster.ask("flood", f"f{n}") for n in range(10)]
    assert sum(isinstance(a, Reject) for actions in refused for a in actions) == 3
    assert not cluster.ask("other", "o0")
    cluster.tell(RequestCancelled("o0", FinishReason.CANCELLED))
    assert isinstance(cluster.ask("flood", "f10")[0], Reject)


def test_an_infeasible_request_is_not_preempted_for_a_tenant_above_its_own():
    """It would be next again at once."""
    cluster = Cluster(infeasible="preempt")
    cluster.ask("above", "x0", e2e_s=100.0)
    cluster.ask("above", "x1", e2e_s=100.0)
    cluster.ask("below", "o0", e2e_s=0.5)
    cluster.end("x0")
    running = [r for r, segment in cluster.segments().items() if segment]
    assert running == ["o0"]
    cluster.scheduler._queue.had_s["above"] += 100.0
    cluster.now_s = 1.0
    assert released(cluster.report("i0")) == []
    cluster.scheduler._queue.had_s["below"] += 200.0
    assert released(cluster.report("i0")) == ["o0"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tenant_order": "unfair"}, "control.tenant_order"),
        ({"tenant_weights": {"a": 0.0}}, "control.tenant_weights.a"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, field):
    with pytest.raises(FieldError) as error:
        ControlConfig(**options)
    assert error.value.field == field

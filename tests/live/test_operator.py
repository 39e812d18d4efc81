"""The operator changes the layout under load: nobody notices but by the clock."""

import asyncio

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from stepserve.cli.cluster import lines
from stepserve.core.config import ControlConfig, ServeConfig
from stepserve.core.errors import FieldError, StepserveError
from stepserve.core.plan import Slot
from stepserve.core.request import FinishReason
from stepserve.engine.loader import load_model
from stepserve.gateway.errors import install_error_handlers
from stepserve.gateway.operator import add_operator
from stepserve.live.operator import slots_for
from support.live_cluster import (
    assert_at_rest,
    collect,
    make_live_request,
    running_cluster,
    tiny_checkpoint,
)
from support.step_profiles import write_step_profiles

LENGTH = 64


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_model(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


def make_config(folder, instances=3):
    return ServeConfig(
        instances=instances,
        threads_per_instance=1,
        kv_pages=64,
        max_running_requests=8,
        operator_api=True,
        profile=str(write_step_profiles(folder, (1, 2))),
        control=ControlConfig(tp_degrees=(1, 2)),
    )


def submit(cluster, name, on_tokens=None):
    asked = make_live_request(cluster.frontend, name, output=LENGTH)
    return asyncio.ensure_future(collect(cluster.frontend, *asked, on_tokens))


async def until(cluster, *degrees):
    """All of these are up, and nothing is being changed."""
    while (state := cluster.operator.state())["layout"] != list(degrees) or state["changing"]:
        await asyncio.sleep(0)
    return state


async def test_a_layout_asked_for_under_load_is_carried_out_and_no_answer_changes(tmp_path, loaded):
    config = make_config(tmp_path)
    async with running_cluster(config, loaded=loaded) as cluster:
        await until(cluster, 1, 1, 1)
        begun = asyncio.Event()
        jobs = [submit(cluster, str(i), lambda _: begun.set()) for i in range(9)]
        await begun.wait()
        cluster.operator.change([2, 1])
        with pytest.raises(StepserveError, match="already"):
            cluster.operator.change([1, 1, 1])
        state = await until(cluster, 2, 1)
        assert {tuple(i["gpus"]) for i in state["instances"]} == {(0,), (1, 2)}, "one may stay"
        assert state["changes"] == 1
        cluster.operator.change([1, 2])  # as it is: nothing to do
        assert not cluster.operator.state()["changing"]
        answers = await asyncio.gather(*jobs)
        assert_at_rest(cluster)
    assert all(answer.end.reason is FinishReason.LENGTH for answer in answers)
    moved = [answer for answer in answers if answer.end.report.migrations]
    # One that moves before its first step has no pause.
    assert any(answer.end.report.paused_s > 0.0 for answer in moved)
    for answer in answers:
        assert answer.end.report.paused_s < answer.end.report.e2e_s
    async with running_cluster(make_config(tmp_path, instances=1), loaded=loaded) as cluster:
        for i, answer in enumerate(answers):
            assert (await submit(cluster, str(i))).tokens == answer.tokens


async def test_a_drained_instance_goes_and_comes_back_when_asked_for(tmp_path, loaded):
    async with running_cluster(make_config(tmp_path, instances=2), loaded=loaded) as cluster:
        state = await until(cluster, 1, 1)
        jobs = [submit(cluster, str(i)) for i in range(4)]
        name = state["instances"][0]["id"]
        cluster.operator.drain(name)
        left = await until(cluster, 1)
        assert [i["id"] for i in left["instances"]] != [name]
        with pytest.raises(FieldError, match="nothing would be left"):
            cluster.operator.drain(left["instances"][0]["id"])
        with pytest.raises(KeyError):
            cluster.operator.drain(name)
        answers = await asyncio.gather(*jobs)
        assert all(len(answer.tokens) == LENGTH for answer in answers)
        cluster.operator.change([1, 1])
        await until(cluster, 1, 1)


async def test_what_cannot_be_is_refused_by_name(tmp_path, loaded):
    async with running_cluster(make_config(tmp_path, instances=2), loaded=loaded) as cluster:
        await until(cluster, 1, 1)
        app = FastAPI()
        install_error_handlers(app)
        add_operator(app, cluster.operator)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://cluster") as client:
            refused = {
                (400, "layout"): [[4], [2, 1], []],
                (400, "layout.0"): [[0], ["two"]],
            }
            for (status, param), layouts in refused.items():
                for layout in layouts:
                    reply = await client.put("/cluster/layout", json={"layout": layout})
                    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)
            reply = await client.post("/cluster/instances/nobody/drain")
            assert (reply.status_code, reply.json()["error"]["param"]) == (404, "instance")
            first = (await client.get("/cluster")).json()
            assert first["layout"] == [1, 1]
            reply = await client.put("/cluster/layout", json={"layout": [2]})
            assert (reply.status_code, reply.json()["changing"]) == (202, True)
            reply = await client.put("/cluster/layout", json={"layout": [1]})
            assert (reply.status_code, reply.json()["error"]["code"]) == (409, "busy")
            await until(cluster, 2)


async def test_nothing_is_changed_while_it_is_not_known_what_is_there(tmp_path, loaded):
    async with running_cluster(make_config(tmp_path), loaded=loaded) as cluster:
        await until(cluster, 1, 1, 1)
        operator = cluster.operator
        cluster.transport.kill(cluster.specs[2].id)
        while operator.state()["instances"][2]["state"] != "starting":
            await asyncio.sleep(0)
        for change in (lambda: operator.change([1, 1]), lambda: operator.drain("node0-gpu0")):
            with pytest.raises(StepserveError, match="an instance is starting"):
                change()
        await until(cluster, 1, 1, 1)
        operator.restart_scheduler()
        state = operator.state()
        assert [i["state"] for i in state["instances"]] == ["asked"] * 3
        assert lines(state)[2].split()[-3:] == ["?", "of", str(state["instances"][0]["pages"])]
        with pytest.raises(StepserveError, match="asks the instances what they hold"):
            operator.drain("node0-gpu0")
        await until(cluster, 1, 1, 1)
        operator.drain("node0-gpu2")
        await until(cluster, 1, 1)
        operator.restart_scheduler()
        await until(cluster, 1, 1)
        assert not cluster.loop.status().forming, "what was drained stays away"


def test_instances_that_stay_are_kept_where_they_are():
    present = (Slot(0, (0,)), Slot(0, (1,)), Slot(0, (2, 3)))
    assert slots_for([2, 2], {0: 4}, present) == (Slot(0, (0, 1)), Slot(0, (2, 3)))
    assert slots_for([1, 2], {0: 4}, present) == (present[0], present[2])
    assert slots_for([4], {0: 4}, present) == (Slot(0, (0, 1, 2, 3)),)
    crossed = (Slot(0, (1,)),)
    assert slots_for([2, 1], {0: 3}, crossed) == (Slot(0, (0, 1)), Slot(0, (2,)))


def fits(layout, gpus):
    """By trying every node for each."""
    if not layout:
        return True
    first, *others = layout
    left = (
        [count - first * (i == node) for i, count in enumerate(gpus)] for node in range(len(gpus))
    )
    return any(min(counts) >= 0 and fits(others, counts) for counts in left)


@given(
    st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=6),
    st.lists(st.integers(1, 8), min_size=1, max_size=3),
)
def test_a_layout_is_formed_of_gpus_that_there_are_or_refused(layout, gpus):
    nodes = dict(enumerate(gpus))
    try:
        slots = slots_for(layout, nodes)
    except FieldError:
        assert not fits(sorted(layout, reverse=True), gpus)
        return
    assert sorted(slot.tp_degree for slot in slots) == sorted(layout)
    taken = [(slot.node, gpu) for slot in slots for gpu in slot.gpus]
    assert len(taken) == len(set(taken))
    assert all(gpu < nodes[node] for node, gpu in taken)

"""Instances of unequal degrees in one cluster, each degree so many processes."""

import asyncio
import json
import multiprocessing
import unittest.mock
from dataclasses import replace

import pytest

from stepserve.core.config import ControlConfig, NoOptions, ServeConfig
from stepserve.core.errors import FieldError
from stepserve.core.ids import RequestId
from stepserve.core.payload import Payload, SamplingParams
from stepserve.core.protocols import Placement
from stepserve.core.request import Family, FinishReason, Request
from stepserve.core.segment import Segment
from stepserve.engine import torch_engine
from stepserve.engine.loader import load_model
from stepserve.engine.torch_engine import TorchEngine, facts_of
from stepserve.families import setup
from stepserve.families.profiles import tp_degrees
from stepserve.live import deploy
from support.ar_models import write_checkpoint
from support.live_cluster import (
    assert_at_rest,
    collect,
    engine_of,
    make_live_request,
    quick_profile,
    running_cluster,
    tiny_checkpoint,
    tiny_model,
)
from support.parts import make_control

LAYOUT = "2,1"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return load_model(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    return load_model(write_checkpoint(tmp_path_factory.mktemp("causal")))


def make_config(folder, **options):
    table = {"source": "made up", "sizes": (16, 256, 2048), "seconds": (0.01, 0.1, 1.0)}
    for name in ("steps.json", "steps_tp2.json"):
        (folder / name).write_text(json.dumps(table))
    usual = {"threads_per_instance": 1, "kv_pages": 64, "profile": str(folder / "steps.json")}
    return ServeConfig(**usual | options)


def submit(cluster, name):
    asked = make_live_request(cluster.frontend, name, output=32)
    return asyncio.ensure_future(collect(cluster.frontend, *asked))


async def all_up(cluster):
    while len(cluster.loop.status().instances) < len(cluster.specs):
        await asyncio.sleep(0)


async def test_a_lost_worker_is_a_lost_instance_and_the_text_is_the_same(tmp_path, tiny):
    config = make_config(tmp_path, layout=LAYOUT)
    names = [str(i) for i in range(4)]
    async with running_cluster(make_config(tmp_path, instances=1), loaded=tiny) as cluster:
        whole = [(await submit(cluster, name)).tokens for name in names]
    async with running_cluster(config, loaded=tiny) as cluster:
        await all_up(cluster)
        assert cluster.control_reading().instances == {2: 1, 1: 1}
        specs = cluster.specs
        assert [(spec.id, spec.page_capacity) for spec in specs] == [
            ("node0-gpu0.1", 128),
            ("node0-gpu2", 64),
        ]
        (worker,) = multiprocessing.active_children()
        jobs = [submit(cluster, name) for name in names]
        while not any(i.running for i in cluster.loop.status().instances):
            await asyncio.sleep(0)
        worker.kill()
        answers = await asyncio.gather(*jobs, *(submit(cluster, f"1{name}") for name in names))
        while not cluster.loop.losses:  # it is noticed at the next batch there
            await submit(cluster, "99")
        await all_up(cluster)
        assert cluster.loop.losses == 1
        (other,) = multiprocessing.active_children()
        assert other.pid != worker.pid
        assert_at_rest(cluster)
    assert not multiprocessing.active_children()
    assert [answer.tokens for answer in answers[: len(names)]] == whole
    assert {answer.end.reason for answer in answers} == {FinishReason.LENGTH}


class CutAtTwenty:
    """From one instance to the other, in the order that the request's name says."""

    def place(self, request, progress, forecast, view):
        first, second = sorted(view.loads, reverse=request.id == "to wide")
        if request.id == "whole":
            return Placement((Segment(request.id, 0, 0, None, first, 0),))
        start = Segment(request.id, 0, 0, 20, first, 0)
        return Placement((start, Segment(request.id, 1, 20, None, second, 0)))


async def test_autoregressive_requests_are_handed_over_between_unequal_degrees(tmp_path, causal):
    quick_profile(causal).save(tmp_path / "batches.json")
    config = make_config(tmp_path, layout=LAYOUT, profile=str(tmp_path / "batches.json"))
    texts = {}
    async with running_cluster(config, loaded=causal) as cluster:
        await all_up(cluster)
        cluster.loop.supervisor.scheduler._placement = CutAtTwenty()
        for name in ("whole", "to wide", "to narrow"):
            kind, now_s = Family.AUTOREGRESSIVE, cluster.frontend.now_s()
            request = Request(RequestId(name), kind, "tiny", 12, 16, now_s)
            payload = Payload(tuple(range(5, 17)), SamplingParams(ignore_eos=True))
            texts[name] = await collect(cluster.frontend, request, payload)
        assert cluster.control_reading().handovers == 2
    assert len(texts["whole"].tokens) == 16
    assert len({tuple(text.tokens) for text in texts.values()}) == 1


async def test_without_a_profile_an_instance_of_the_lowest_degree_is_measured(causal):
    """Its own workers are gone before the instances start. Only what it reported is kept."""
    config = ServeConfig(layout="2", model=str(causal.folder), threads_per_instance=1, kv_pages=64)
    engine = TorchEngine(NoOptions(), config)
    profile = setup.make_setup(config, engine).profile
    assert "2 x 1 threads" in profile.source
    assert not multiprocessing.active_children()
    with pytest.raises(FieldError, match="profile: needed where instances live elsewhere"):
        setup.make_setup(replace(config, cluster="ray"), engine)


async def test_an_operator_may_ask_for_degrees_whose_times_are_known(tmp_path, tiny, causal):
    """And that the model can be split by."""
    options = {"instances": 4, "operator_api": True}

    def offered(loaded, **control):
        config = make_config(tmp_path, **options, control=ControlConfig(**control))
        return tp_degrees(config, engine_of(config, loaded))

    assert offered(tiny, tp_degrees=(1, 2, 4)) == (1, 2)
    assert offered(causal, tp_degrees=(1, 2, 4)) == (1, 2, 4)
    assert offered(causal, tp_degrees=(3, 4, 8)) == (1, 4)


def test_a_model_that_nobody_holds_whole_is_not_loaded(tmp_path, tiny):
    def loads(**options):
        """Onto which devices a server loads the model before it starts instances."""
        config = make_config(tmp_path, model=str(tiny.folder), **options)
        with unittest.mock.patch.object(torch_engine, "load_model", wraps=load_model) as loader:
            engine = TorchEngine(NoOptions(), config)
            deploy.build_cluster(config, engine)
        assert engine.facts == facts_of(tiny, tiny.folder)
        return [str(call.args[1]) for call in loader.mock_calls]

    for options in ({"layout": "2,1"}, {"layout": "2,2", "operator_api": True}):
        assert loads(**options) == ["meta", "cpu"]
    assert loads(layout="2,2") == ["meta"]


@pytest.mark.parametrize(
    ("layout", "options", "field"),
    [
        ("3,1", {}, "tp_degree: 3 ranks cannot share 2 heads"),
        ("4", {"planner": "greedy"}, "control.tp_degrees: needs 4"),
        ("2,1", {"planner": "greedy", "tp_degrees": (1, 4)}, "control.tp_degrees: needs 2"),
    ],
)
def test_a_layout_that_cannot_be_formed_is_refused(tmp_path, tiny, layout, options, field):
    control = make_control(**{"tp_degrees": (1, 2)} | options)
    config = make_config(tmp_path, layout=layout, control=control)
    with pytest.raises(FieldError, match=field):
        deploy.build_cluster(config, engine_of(config, tiny))


def test_a_model_without_a_folder_is_not_split(tmp_path):
    config = make_config(tmp_path, layout=LAYOUT)
    with pytest.raises(FieldError, match="model: only a model in a folder"):
        deploy.build_cluster(config, engine_of(config, tiny_model()))


@pytest.mark.parametrize(
    ("options", "field"),
    [({"cluster": "ray"}, "layout: .* on GPUs need --cluster local"), ({}, "layout: degree 1")],
)
def test_gpus_are_divided_by_one_degree_in_one_process(tmp_path, tiny, options, field):
    config = make_config(tmp_path, layout=LAYOUT, device="cuda", **options)
    with pytest.raises(FieldError, match=field):
        engine_of(config, tiny).check((1, 2))

"""An autoregressive model run by a local scheduler: the tokens of running every request whole."""

import random

import pytest

from stepserve.core.actions import LoadState, RunBatch
from stepserve.core.events import BatchDone, SegmentPlaced
from stepserve.core.ids import InstanceId
from stepserve.core.payload import Payload, SamplingParams
from stepserve.core.request import Progress
from stepserve.core.segment import Segment
from stepserve.core.step import StepKind
from stepserve.cost.step_table import StepTable
from stepserve.engine.ar_executor import AutoregressiveExecutor
from stepserve.engine.ar_offline import generate
from stepserve.engine.loader import load_model
from stepserve.families.assemble import assemble_local
from stepserve.families.autoregressive import AUTOREGRESSIVE
from support.ar_models import VOCAB, write_checkpoint
from support.ar_requests import ar_request, forecast_of
from support.parts import make_control
from support.toy_world import PROFILES, make_spec

SPEC = make_spec(pages=400)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_model(write_checkpoint(tmp_path_factory.mktemp("model"), seed=7))


def workload():
    chance, rows = random.Random(3), []
    for index, prompt in enumerate((300, 1, 40, 150, 16)):
        ids = tuple(chance.randrange(3, VOCAB) for _ in range(prompt))
        request = ar_request(f"r{index}", prompt=prompt, output=6 + index)
        rows.append((request, Payload(ids, SamplingParams(seed=index, ignore_eos=True))))
    return rows


def engine(loaded):
    return AutoregressiveExecutor(loaded, page_tokens=16, page_capacity=400)


def test_chunks_and_decodes_as_scheduled_give_the_tokens_of_whole_prompts(loaded):
    executor, rows = engine(loaded), workload()
    config = make_control(tbt_s=0.009, batching={"overhead_s": 0.0})  # 64 to 256 tokens a batch
    local = assemble_local(AUTOREGRESSIVE, config, SPEC, StepTable(PROFILES))
    now_s, produced, ran, todo = 0.0, {request.id: [] for request, _ in rows}, [], []
    payloads = {request.id: payload for request, payload in rows}
    for request, _ in rows:
        segment = Segment(request.id, 0, 0, None, InstanceId("i0"), 1)
        placed = SegmentPlaced(segment, request, Progress(), forecast_of(6))
        todo += local.handle(now_s, placed)
    while todo:
        action = todo.pop(0)
        if isinstance(action, LoadState):
            executor.add(action.request, payloads[action.request.id], action.progress, {})
        elif isinstance(action, RunBatch):
            now_s += action.predicted_s
            ran += action.batch.steps
            done = executor.run(action.batch)
            assert not any(outcome.error for outcome in done.outcomes)
            for name, settled in done.settled.items():
                produced[name] += [token.token_id for token in settled]
            todo += local.handle(
                now_s, BatchDone(action.batch.id, done.outcomes, action.predicted_s)
            )
    assert not local.running_requests
    assert sum(s.kind is StepKind.PREFILL for s in ran) > len(rows), "some prompts were cut"
    whole = generate(engine(loaded), workload())
    assert produced == {name: result.token_ids for name, result in whole.items()}

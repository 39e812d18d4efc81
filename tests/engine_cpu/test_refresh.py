"""Refreshes that were not asked for, on the bundled model: the answers of those that were."""

import pytest
from tokenizers import Tokenizer

from stepserve.core.actions import Predict, RunBatch
from stepserve.core.events import BatchDone, Predicted, SegmentPlaced
from stepserve.core.forecast import StepForecast
from stepserve.core.ids import InstanceId
from stepserve.core.payload import Payload
from stepserve.core.request import CacheMode, Progress, RefreshScope
from stepserve.core.segment import Segment
from stepserve.core.step import StepKind
from stepserve.cost.step_table import StepTable
from stepserve.engine.bundled.evaluate import BUNDLED_MODEL, held_out_problems
from stepserve.engine.bundled.vocabulary import prompt_ids
from stepserve.engine.diffusion_executor import DiffusionExecutor
from stepserve.engine.loader import load_model
from stepserve.families.assemble import assemble_local
from stepserve.families.diffusion import DIFFUSION
from support.parts import make_control
from support.toy_world import PROFILES, make_request, make_spec

PROBLEMS, CANVAS = 6, 96


@pytest.fixture(scope="module")
def bundled():
    loaded = load_model(BUNDLED_MODEL)
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    prompts = [tuple(prompt_ids(tokenizer, p.prompt)) for p in held_out_problems(PROBLEMS, 5)]
    return loaded, prompts


def serve(bundled, policy, **options):
    """All problems together on one instance: their tokens, and the steps that ran."""
    loaded, prompts = bundled
    engine = DiffusionExecutor(loaded, threads=1)
    spec = make_spec(running_requests=PROBLEMS + 1)
    config = make_control(refresh=policy, batching="all_running")
    local = assemble_local(DIFFUSION, config, spec, StepTable(PROFILES))
    tokens, steps, todo = {}, [], []
    for index, prompt in enumerate(prompts):
        request = make_request(f"p{index}", prompt=len(prompt), output=CANVAS, **options)
        engine.add(request, Payload(prompt), Progress(), {})
        progress = Progress(settled=request.prompt_tokens)
        segment = Segment(request.id, 0, progress.settled, None, InstanceId("i0"), 1)
        forecast = StepForecast((0.9, 0.5), (40.0, 20.0), 96.0)
        tokens[request.id] = {}
        todo += local.handle(0.0, SegmentPlaced(segment, request, progress, forecast))
    while todo:
        action = todo.pop(0)
        if isinstance(action, Predict):
            steps_run = action.progress.steps
            forecast = StepForecast(action.thresholds, (40.0, 20.0), 96.0, steps_run)
            todo += local.handle(0.0, Predicted(action.request.id, forecast))
        elif isinstance(action, RunBatch):
            steps += action.batch.steps
            done = engine.run(action.batch)
            assert not any(outcome.error for outcome in done.outcomes)
            for name, settled in done.settled.items():
                tokens[name] |= {token.offset: token.token_id for token in settled}
            todo += local.handle(0.0, BatchDone(action.batch.id, done.outcomes, 0.0))
    assert not local.running_requests
    return tokens, steps


@pytest.mark.parametrize("cache", [CacheMode.DUAL, CacheMode.PREFIX])
def test_with_nothing_but_slack_permissions_are_not_used(bundled, cache):
    """Token by token and step by step as if every block had been asked to be refreshed."""
    asked = serve(bundled, "as_asked", cache=cache)
    permitted = {"cache": cache, "refresh": 2, "scope": RefreshScope.OUTPUT}
    assert serve(bundled, "when_slack", **permitted) == asked
    cheap, steps = serve(bundled, "as_asked", **permitted)
    assert cheap.keys() == asked[0].keys()
    heavy = [sum(step.kind is StepKind.RECOMPUTE for step in ran) for ran in (steps, asked[1])]
    assert heavy[0] < heavy[1]

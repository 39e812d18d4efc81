import math

import pytest

from stepserve.core.request import CacheMode, FinishReason, Progress
from stepserve.core.step import StepKind, StepOutcome
from stepserve.families.programs.diffusion import DiffusionProgram
from support.toy_world import make_request

PROGRAM = DiffusionProgram()


def step(settled_output, *, has_state=True, **options):
    request = make_request(prompt=20, **options)
    return PROGRAM.next_step(request, Progress(settled=20 + settled_output), has_state, 0.9)


def test_the_first_step_of_a_block_recomputes_everything():
    for settled in (0, 16, 32):
        due = step(settled)
        assert (due.kind, due.query_tokens, due.context_tokens) == (StepKind.RECOMPUTE, 68, 68)


def test_inside_a_block_a_cached_step_executes_the_block_or_the_rest():
    assert step(1).kind is StepKind.CACHED
    assert step(1).query_tokens == 16
    prefix = step(17, cache=CacheMode.PREFIX)
    assert (prefix.kind, prefix.query_tokens) == (StepKind.CACHED, 32)


def test_without_a_cache_every_step_recomputes():
    assert step(5, cache=CacheMode.NONE).kind is StepKind.RECOMPUTE


def test_refresh_every_second_block():
    kinds = [step(settled, refresh=2).kind for settled in (0, 16, 32)]
    assert kinds == [StepKind.RECOMPUTE, StepKind.CACHED, StepKind.RECOMPUTE]


def test_a_request_that_lost_its_state_rebuilds_it():
    assert step(5, has_state=False).kind is StepKind.RECOMPUTE


def test_canvas_is_whole_blocks_and_kv_follows_the_cache_mode():
    assert PROGRAM.full_tokens(make_request(prompt=20, output=33)) == 68
    assert PROGRAM.kv_tokens(make_request(prompt=20, output=33)) == 68
    assert PROGRAM.kv_tokens(make_request(cache=CacheMode.NONE)) == 0


@pytest.mark.parametrize(
    ("settled", "refresh", "output_tokens", "left"),
    [
        (0, 1, 48.0, 3),
        (1, 1, 48.0, 2),
        (16, 1, 48.0, 2),
        (47, 1, 48.0, 0),
        (0, 2, 48.0, 2),
        (1, 2, 48.0, 1),
        (17, 2, 48.0, 1),
        (0, 1, 20.0, 2),
        (33, 2, 48.0, 0),
    ],
)
def test_heavy_left_counts_refreshes_not_yet_begun(settled, refresh, output_tokens, left):
    request = make_request(prompt=20, output=48, refresh=refresh)
    progress = Progress(settled=20 + settled)
    assert PROGRAM.heavy_left(request, progress, output_tokens) == left


@pytest.mark.parametrize(
    ("settled", "query", "context", "to_cut"),
    [
        (0, 16, 32, 12),  # the block that the output begins in has 4 tokens of the prompt
        (1, 16, 32, 11),
        (12, 32, 48, 0),  # the finished block once more, now without a mask
        (13, 16, 48, 15),
        (28, 32, 64, 0),
        (47, 16, 80, 13),
    ],
)
def test_a_block_causal_model_executes_a_finished_block_once_more(settled, query, context, to_cut):
    request = make_request(prompt=20, output=48, block=16, cache=CacheMode.BLOCK)
    progress = Progress(settled=20 + settled)
    due = PROGRAM.next_step(request, progress, True, 0.9)
    assert (due.kind, due.query_tokens) == (StepKind.CACHED, query)
    assert due.context_tokens == context, "what lies behind the block is not seen"
    moved = PROGRAM.next_step(request, progress, False, 0.9)
    assert (moved.kind, moved.query_tokens) == (StepKind.RECOMPUTE, context)
    assert PROGRAM.tokens_to_cut(request, progress) == to_cut
    assert PROGRAM.heavy_left(request, progress, 48.0) == (settled == 0)
    assert PROGRAM.fuller_step(request, progress, due) is None


def test_the_cost_of_a_block_causal_request():
    request = make_request(prompt=20, output=40, block=16, cache=CacheMode.BLOCK)
    assert PROGRAM.heavy_tokens(request) == 32, "the prompt, and the block that it ends in"
    assert PROGRAM.light_tokens(request) == 16
    assert PROGRAM.full_tokens(request) == PROGRAM.kv_tokens(request) == 64, "whole blocks from 0"


def test_without_a_cache_every_step_left_is_heavy():
    uncached = make_request(cache=CacheMode.NONE)
    assert PROGRAM.heavy_left(uncached, Progress(settled=20), 48.0) == math.inf


def test_advance_counts_a_step_and_keeps_the_last_confidence():
    request = make_request()
    outcome = StepOutcome(request.id, settled=3, emitted=2, finished=FinishReason.STOP)
    after = PROGRAM.advance(request, PROGRAM.start(request), outcome)
    assert (after.settled, after.emitted, after.steps) == (23, 2, 1)
    assert after.finished is FinishReason.STOP

"""The local scheduler with autoregressive requests, as assembled from a configuration."""

import random

import pytest

from stepserve.core.actions import Predict, Report, RunBatch, Send
from stepserve.core.events import (
    BatchDone,
    InstanceReported,
    InstanceUp,
    Predicted,
    RequestArrived,
    SegmentEnded,
    SegmentPlaced,
)
from stepserve.core.ids import InstanceId
from stepserve.core.request import Progress
from stepserve.core.segment import Segment, SegmentEnd
from stepserve.core.step import Mix, StepKind
from stepserve.families.assemble import assemble_global, assemble_local
from stepserve.families.autoregressive import AUTOREGRESSIVE
from stepserve.families.diffusion import DIFFUSION
from support.ar_requests import TokenRow, ar_request, forecast_of
from support.parts import make_control
from support.toy_world import make_request, make_spec

SPEC = make_spec(pages=4096, running_requests=64)
START = Progress()
BUDGET = {"use": "tbt_budget", "overhead_s": 0.0, "safety": 1.0}


class Learning:
    """1 ms and 0.1 ms per token; keeps what it was told."""

    def __init__(self):
        self.seen = []

    def step_time_s(self, tokens, rows, spec, mix=None):
        return tokens * 1e-4 + 1e-3

    def observe(self, tokens, rows, spec, seconds, mix=None):
        self.seen.append((tokens, rows, seconds, mix))


class Instance:
    """One local scheduler, told one thing at a time; rows run what it says."""

    def __init__(self, family=AUTOREGRESSIVE, batching=BUDGET, **options):
        self.cost = Learning()
        config = make_control(batching=batching, **options)
        self.local = assemble_local(family, config, SPEC, self.cost)
        self.rows, self.now_s, self.batch, self.reports, self.ended = {}, 0.0, None, [], []

    def place(self, request, progress=START, *, stop=None, ends_at=None):
        segment = Segment(request.id, 0, progress.settled, stop, InstanceId("i0"), 1)
        self.rows[request.id] = TokenRow(
            request, held=progress.settled, emitted=progress.emitted, ends_at=ends_at
        )
        forecast = forecast_of(request.max_output_tokens)
        self.tell(SegmentPlaced(segment, request, progress, forecast))

    def tell(self, event):
        for action in self.local.handle(self.now_s, event):
            match action:
                case RunBatch():
                    self.batch = action
                    steps = action.batch.steps
                    decoded = {s.request_id for s in steps if s.kind is StepKind.DECODE}
                    due = {name for name in self.local.running_requests if self.rows[name].emitted}
                    assert decoded == due, "decodes run in every batch"
                case Report(event=InstanceReported() as report):
                    self.reports.append(report)
                case Report(event=SegmentEnded() as ended):
                    self.ended.append(ended)

    def step(self, seconds=None):
        """Finish the running batch, as predicted unless told otherwise; return what it ran."""
        done, self.batch = self.batch, None
        seconds = done.predicted_s if seconds is None else seconds
        self.now_s += seconds
        outcomes = tuple(self.rows[s.request_id].run(s) for s in done.batch.steps)
        self.tell(BatchDone(done.batch.id, outcomes, seconds))
        return done


def test_one_long_prefill_alone_is_run_in_chunks():
    instance = Instance()
    instance.place(ar_request(prompt=2000, output=2))
    tokens = [instance.step().query_tokens for _ in range(4)]
    assert tokens == [976, 976, 48, 1], "0.1 s each, in pages; then a decode"
    assert [end.end for end in instance.ended] == [SegmentEnd.FINISHED]
    assert instance.local.pages.free == SPEC.page_capacity


def test_a_prefill_ends_where_its_segment_does():
    instance = Instance()
    instance.place(ar_request(prompt=2000, output=2), stop=1100)
    assert [instance.step().query_tokens for _ in range(2)] == [976, 124]
    instance = Instance(batching="all_running")
    instance.place(ar_request(prompt=2000, output=2), stop=1100)
    assert instance.step().query_tokens == 1100


def test_what_a_batch_was_made_of_goes_with_its_time():
    instance = Instance()
    instance.place(ar_request("a", prompt=32, output=9))
    instance.place(ar_request("b", prompt=48, output=9))
    first = instance.step(seconds=0.5)
    assert first.mix == Mix(32, 32 * 33 // 2)
    both = instance.step(seconds=0.25)
    assert both.mix == Mix(48, 48 * 49 // 2, decodes=1, decode_context=33)
    assert instance.cost.seen == [(32, 1, 0.5, first.mix), (49, 2, 0.25, both.mix)]
    reported = [(report.measured, report.mix) for report in instance.reports]
    assert reported == [
        (None, None),
        ((32, 1, 0.5), first.mix),
        ((49, 2, 0.25), both.mix),
    ]


def test_denoising_batches_have_no_mix():
    instance = Instance(family=DIFFUSION, batching="latency_budget")
    instance.place(make_request(), Progress(20))
    assert instance.batch.mix is None
    assert instance.reports[-1].mix is None


def test_a_running_request_knows_when_it_joined_and_when_its_latest_token_came():
    instance = Instance()
    instance.now_s = 5.0
    instance.place(ar_request("a", prompt=32, output=9), Progress(settled=33, emitted=2))
    running = instance.local.running_requests["a"]
    assert (running.joined_s, running.last_token_s) == (5.0, 5.0)
    instance.step(seconds=0.25)
    instance.step(seconds=0.5)
    assert (running.joined_s, running.last_token_s) == (5.0, 5.75)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("batching", [BUDGET, "all_running"])
def test_random_requests_run_to_their_end(seed, batching):
    """Rows refuse inputs that do not follow on."""
    rng, instance, number = random.Random(seed), Instance(batching=batching), 30
    waiting = [
        ar_request(str(i), prompt=rng.randint(1, 1500), output=rng.randint(1, 40))
        for i in range(number)
    ]
    while waiting or instance.batch is not None:
        if waiting and (instance.batch is None or rng.random() < 0.4):
            request = waiting.pop()
            instance.place(request, ends_at=rng.randint(1, request.max_output_tokens))
        ran = instance.step()
        if batching is BUDGET:
            assert ran.predicted_s <= 0.1 + 1e-12
    assert len(instance.ended) == number
    assert all(row.emitted == row.ends_at for row in instance.rows.values())
    assert instance.local.pages.free == SPEC.page_capacity


def test_an_autoregressive_cluster_places_requests_from_their_first_input():
    scheduler = assemble_global(AUTOREGRESSIVE, make_control(placement="least_loaded"), Learning())
    scheduler.handle(0.0, InstanceUp(SPEC))
    request = ar_request(prompt=50, output=9)
    (ask,) = scheduler.handle(0.0, RequestArrived(request))
    assert isinstance(ask, Predict)
    assert ask.thresholds == (1.0,)
    (send,) = scheduler.handle(0.0, Predicted(request.id, forecast_of(9)))
    assert isinstance(send, Send)
    assert (send.event.segment.start, send.event.progress) == (0, Progress())

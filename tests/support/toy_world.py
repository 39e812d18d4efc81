"""Small requests and instances for tests, and a small simulated cluster that checks itself.

``ToyWorld`` is ``stepserve.sim`` with random outcomes (positions settle in any order within a
block) and the invariants of ``invariants.py`` checked after every event.
"""

import random
from dataclasses import dataclass, field

from stepserve.core.config import Choice, ControlConfig
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.instance import InstanceSpec
from stepserve.core.plan import ClusterPlan, Slot
from stepserve.core.request import (
    SLO,
    CacheMode,
    Confidence,
    DiffusionOptions,
    Family,
    FinishReason,
    OnMiss,
    RefreshScope,
    Request,
    ThresholdBounds,
)
from stepserve.core.running import RunningRequest
from stepserve.core.segment import Segment
from stepserve.core.step import StepKind, StepOutcome
from stepserve.cost.remaining_steps import MeanYield, Yields
from stepserve.cost.step_table import StepProfile, StepTable
from stepserve.families.assemble import assemble_global, assemble_local
from stepserve.families.diffusion import DIFFUSION
from stepserve.planning.layouts import arrange, partitions
from stepserve.sim.delays import Delays
from stepserve.sim.faults import FaultConfig, Faults
from stepserve.sim.record import DiffusionRecord
from stepserve.sim.world import CLIENT, World
from support.invariants import Invariants
from support.parts import make_forecast

PROFILE = StepProfile((16, 64, 256, 1024, 4096), (0.002, 0.003, 0.008, 0.03, 0.12), "made up")
FASTER = StepProfile((16, 64, 256, 1024, 4096), (0.002, 0.003, 0.005, 0.016, 0.06), "made up")
PROFILES = {1: PROFILE, 2: FASTER}
YIELDS = Yields({0.5: 4.0, 0.7: 3.0, 0.9: 2.0}, 40.0, "made up")
SOME_CONFIDENCE = Confidence(0.1, 0.2, 0.3, 0.4, 0.5)
DELAYS = Delays(0.0001, 0.0005, plan_s=0.1, stop_s=0.05, rebuild_s=0.5, detect_s=0.05)


def make_spec(name="i0", pages=256, running_requests=8, slot=None):
    return InstanceSpec(InstanceId(name), 1, pages, 16, running_requests, slot)


def make_slots(nodes=2, gpus=2, pages=256, running_requests=8):
    """One instance on every GPU, so that a planner may change the layout."""
    return [
        make_spec(f"node{n}-gpu{g}", pages, running_requests, Slot(n, (g,)))
        for n in range(nodes)
        for g in range(gpus)
    ]


def make_request(
    name="r0",
    *,
    prompt=20,
    output=48,
    arrival_s=0.0,
    block=16,
    cache=CacheMode.DUAL,
    refresh=1,
    scope=RefreshScope.FULL,
    e2e_s=None,
    on_miss=OnMiss.DEGRADE,
    preferred=0.9,
    floor=0.5,
):
    return Request(
        RequestId(name),
        Family.DIFFUSION,
        "toy",
        prompt,
        output,
        arrival_s,
        SLO(e2e_s=e2e_s, on_miss=on_miss),
        DiffusionOptions(ThresholdBounds(preferred, floor), block, cache, refresh, scope),
    )


def make_running(program, request, progress, forecast):
    """A request as an instance holds it, right after it joined."""
    return RunningRequest(
        request=request,
        segment=Segment(request.id, 0, progress.settled, None, InstanceId("i0"), 1),
        progress=progress,
        forecast=forecast,
        heavy_tokens=program.heavy_tokens(request),
        light_tokens=program.light_tokens(request),
        heavy_left=program.heavy_left(request, progress, forecast.output_tokens),
        forecast_settled=progress.settled,
    )


@dataclass
class Truth:
    """What really happened to a request, kept apart from what any scheduler believes."""

    request: Request
    ends_at: int  # output tokens
    settled: set = field(default_factory=set)
    emitted: int = 0
    steps: int = 0
    answers: list = field(default_factory=list)


class ToyExecutors:
    """Executors that hold rows like real ones and refuse steps that do not match their state."""

    def __init__(self, rng, ends_at, cuts_anywhere):
        self.rng, self.ends_at = rng, ends_at
        self.cuts_anywhere = cuts_anywhere  # requests may move at any step
        self.truths = {}
        self.held = {}  # instance -> {request id: has keys and values}
        self.torn = set()  # requests that lost their instance, and may go on in mid-block

    def arrive(self, index, request):
        ends_at = self.ends_at.get(request.id) or self.rng.randint(1, request.max_output_tokens)
        self.truths[request.id] = Truth(request, ends_at)

    def load(self, instance, request, progress):
        for name, rows in self.held.items():
            assert request.id not in rows, f"{request.id} is on {name}, too"
        truth = self.truths[request.id]
        assert progress.settled == request.prompt_tokens + len(truth.settled)
        if progress.finished is FinishReason.ERROR:
            truth.steps = progress.steps  # a row failed here, and the news of it was lost
        assert progress.steps == truth.steps
        options = request.diffusion
        inside = len(truth.settled) % (options.block_tokens * options.refresh_blocks)
        if options.cache_mode is CacheMode.BLOCK:
            inside = truth.settled and progress.settled % options.block_tokens
        if inside and options.cache_mode is not CacheMode.NONE:
            excused = request.id in self.torn or progress.finished is not None
            assert self.cuts_anywhere or excused, "cut where no recompute is due"
        self.torn.discard(request.id)
        self.held.setdefault(instance, {})[request.id] = False

    def run(self, instance, batch):
        assert len({s.request_id for s in batch.steps}) == len(batch.steps)
        return tuple(self.step(self.held[instance], step) for step in batch.steps)

    def step(self, rows, step):
        truth = self.truths[step.request_id]
        request, options = truth.request, truth.request.diffusion
        block = options.block_tokens
        if truth.emitted >= truth.ends_at:  # the news of its end was lost
            return StepOutcome(request.id, 0, truth.emitted, self.reason(truth), SOME_CONFIDENCE)
        causal = options.cache_mode is CacheMode.BLOCK
        lead = request.prompt_tokens % block if causal else 0  # its blocks begin at position 0
        index, inside = divmod(lead + len(truth.settled), block)
        canvas = -(-request.max_output_tokens // block) * block
        if causal:
            assert step.context_tokens == request.prompt_tokens - lead + (index + 1) * block
            assert rows[request.id] is (step.kind is not StepKind.RECOMPUTE), "once, and no more"
            expected = block if inside else 2 * block
            assert step.query_tokens == (expected if rows[request.id] else step.context_tokens)
            rows[request.id] = True
        elif step.kind is StepKind.RECOMPUTE:
            part = rows[request.id] and options.refresh_scope is RefreshScope.OUTPUT
            whole = request.prompt_tokens + canvas
            assert step.query_tokens == (canvas if part else whole) or (
                step.query_tokens == whole and not inside
            ), "more than was asked only where a block opens"
            rows[request.id] = options.cache_mode is not CacheMode.NONE
        else:
            assert rows[request.id], "a cached step needs keys and values"
            assert inside or index % options.refresh_blocks, "a recompute step was due"
        last = min((index + 1) * block - lead, request.max_output_tokens)
        open_ = [p for p in range(max(0, index * block - lead), last) if p not in truth.settled]
        chosen = self.rng.sample(open_, self.rng.randint(1, len(open_)))
        truth.settled.update(chosen)
        truth.steps += 1
        while truth.emitted in truth.settled:
            truth.emitted += 1
        truth.emitted = min(truth.emitted, truth.ends_at)
        finished = self.reason(truth) if truth.emitted == truth.ends_at else None
        return StepOutcome(request.id, len(chosen), truth.emitted, finished, SOME_CONFIDENCE)

    def reason(self, truth):
        limit = truth.request.max_output_tokens
        return FinishReason.LENGTH if truth.ends_at == limit else FinishReason.STOP

    def free(self, instance, request_id):
        assert self.held[instance].pop(request_id, None) is not None, "state is freed once"

    def lost(self, instance):
        self.torn.update(self.held.pop(instance, ()))

    def end(self, request_id):
        """Kept: tests ask."""


class RandomPlanner:
    """Any layout at all: what it is good for is not what the toy world tests."""

    def __init__(self, seed):
        self.rng = random.Random(f"{seed}/plans")

    def plan(self, problem):
        chosen = [
            self.rng.choice(partitions(gpus, problem.tp_degrees)) for gpus in problem.gpus_per_node
        ]
        return ClusterPlan(arrange(problem, chosen), 0.9, 0.0, "at random")


class ToyWorld:
    """Clients, schedulers, random outcomes and faults; everything is checked after every event."""

    def __init__(self, seed, *, config=None, specs=None, delays=DELAYS, **faults):
        """``faults``: of ``FaultConfig``. Messages jitter by up to 2 ms unless told otherwise."""
        self.rng = random.Random(seed)
        self.config = config or ControlConfig(thresholds=(0.9, 0.7, 0.5), queue_limit=20)
        self.specs = specs or [make_spec("i0"), make_spec("i1", pages=40, running_requests=3)]
        self.log, self.requests, self.ends_at = [], [], {}
        any_step = (self.config.migration or Choice()).use == "any_step"
        self.executors = ToyExecutors(self.rng, self.ends_at, any_step)
        self.world = World(
            lambda: assemble_global(DIFFUSION, self.config, StepTable(PROFILES)),
            lambda spec: assemble_local(DIFFUSION, self.config, spec, StepTable(PROFILES)),
            executors=self.executors,
            record=DiffusionRecord,
            truth=StepTable(PROFILES),
            predictor=make_forecast(MeanYield, YIELDS),
            planner=RandomPlanner(seed),
            delays=delays,
            faults=Faults(FaultConfig(**{"jitter_s": 0.002, **faults}), seed),
            timed=self.logged,
        )
        self.world.after_event = Invariants(self.world, self.executors).check

    def logged(self, part, handle):
        """Notes what the global scheduler was told and asked for."""
        if part != "global":
            return handle

        def call(now_s, event):
            actions = handle(now_s, event)
            self.log.append((now_s, event, tuple(actions)))
            return actions

        return call

    @property
    def truths(self):
        for name, truth in self.executors.truths.items():
            answer = self.world.records[name].answer
            truth.answers = [] if answer is None else [answer]
        return self.executors.truths

    def arrive(self, request, ends_at=None):
        """Have a request come at its arrival time, and end by itself at ``ends_at`` tokens."""
        self.requests.append(request)
        self.ends_at[request.id] = ends_at

    def cancel_at(self, when_s, request_id):
        self.world.cancel_at(when_s, request_id)

    def lose_at(self, when_s, instance):
        self.world.at(when_s, CLIENT, lambda _, __: self.world.lose(InstanceId(instance)), None)

    def run(self, limit=400_000):
        self.world.start(self.specs, sorted(self.requests, key=lambda r: r.arrival_s))
        self.world.run(limit)

    def check_rest(self):
        """At the end nothing is left, and everybody got exactly one answer."""
        Invariants(self.world, self.executors).check_rest()

"""A toy world for the schedulers: virtual time, random outcomes, injected faults, invariants.

Every message between schedulers is delivered in order per link, after a random delay; a lost
instance loses its inbox. After every event the invariants of the architecture are checked.
"""

import heapq
import itertools
import random
from dataclasses import dataclass, field

from stepserve.control.assemble import assemble_global, assemble_local
from stepserve.core.actions import (
    Finish,
    FreeState,
    LoadState,
    Predict,
    Rebuild,
    Reject,
    Report,
    RunBatch,
    Send,
)
from stepserve.core.config import ControlConfig
from stepserve.core.events import (
    BatchDone,
    InstanceLost,
    InstanceUp,
    Predicted,
    RequestArrived,
    RequestCancelled,
)
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.instance import InstanceSpec
from stepserve.core.request import (
    SLO,
    CacheMode,
    Confidence,
    DiffusionOptions,
    Family,
    FinishReason,
    OnMiss,
    Progress,
    Request,
    ThresholdBounds,
)
from stepserve.core.resident import Resident
from stepserve.core.segment import Segment
from stepserve.core.step import StepKind, StepOutcome
from stepserve.cost.remaining_steps import MeanYield, Yields
from stepserve.cost.step_table import StepProfile, StepTable

PROFILE = StepProfile((16, 64, 256, 1024, 4096), (0.002, 0.003, 0.008, 0.03, 0.12), "made up")
YIELDS = Yields({0.5: 4.0, 0.7: 3.0, 0.9: 2.0}, 40.0, "made up")
SOME_CONFIDENCE = Confidence(0.1, 0.2, 0.3, 0.4, 0.5)


def make_spec(name="i0", pages=256, residents=8):
    return InstanceSpec(InstanceId(name), 1, pages, 16, residents)


def make_request(
    name="r0",
    *,
    prompt=20,
    output=48,
    arrival_s=0.0,
    block=16,
    cache=CacheMode.DUAL,
    refresh=1,
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
        DiffusionOptions(ThresholdBounds(preferred, floor), block, cache, refresh),
    )


def make_resident(program, request, progress, forecast):
    """A request as an instance holds it, right after it joined."""
    return Resident(
        request=request,
        segment=Segment(request.id, 0, progress.settled, None, InstanceId("i0"), 1),
        progress=progress,
        forecast=forecast,
        full_tokens=program.full_tokens(request),
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


class ToyExecutor:
    """Holds rows like a real one and refuses steps that do not match the row's state."""

    def __init__(self, world, spec):
        self.world, self.spec = world, spec
        self.rows = {}  # id -> (settled count, has KV)

    def load(self, action):
        request = action.request
        assert request.id not in self.rows, "a request is loaded once"
        truth = self.world.truths[request.id]
        assert action.progress.settled == request.prompt_tokens + len(truth.settled)
        self.rows[request.id] = False

    def run(self, batch, rng):
        outcomes = []
        assert len({s.request_id for s in batch.steps}) == len(batch.steps)
        for step in batch.steps:
            truth = self.world.truths[step.request_id]
            request = truth.request
            block = request.diffusion.block_tokens
            index = len(truth.settled) // block
            full = request.prompt_tokens + -(-request.max_output_tokens // block) * block
            if step.kind is StepKind.RECOMPUTE:
                assert step.query_tokens == full
                self.rows[request.id] = True
            else:
                assert self.rows[request.id], "a cached step needs keys and values"
                assert request.diffusion.cache_mode is not CacheMode.NONE
                inside = len(truth.settled) % block
                assert inside or index % request.diffusion.refresh_blocks
            open_ = [
                p
                for p in range(index * block, min((index + 1) * block, request.max_output_tokens))
                if p not in truth.settled
            ]
            chosen = set(rng.sample(open_, rng.randint(1, len(open_))))
            outcomes.append((step, chosen))
        return outcomes

    def free(self, request_id):
        assert self.rows.pop(request_id, None) is not None, "state is freed once"


class ToyWorld:
    """Global and local schedulers, clients and faults, in virtual time.

    ``loss_rate``: chance that an instance is lost at the end of a batch. Half of the losses
    are false: the instance was only slow, and what it had said still arrives afterwards.
    ``error_rate``: chance that a row of a batch fails.
    """

    def __init__(self, seed, *, config=None, specs=None, loss_rate=0.0, error_rate=0.0):
        self.rng = random.Random(seed)
        self.config = config or ControlConfig(thresholds=(0.9, 0.7, 0.5), queue_limit=20)
        self.specs = specs or [make_spec("i0"), make_spec("i1", pages=40, residents=3)]
        self.predictor = MeanYield(YIELDS)
        self.global_ = assemble_global(self.config, StepTable(PROFILE))
        self.locals, self.executors, self.incarnation = {}, {}, {}
        self.truths, self.log = {}, []
        self.now_s, self._order, self._heap = 0.0, itertools.count(), []
        self._link_free_s = {}
        self.loss_rate, self.error_rate = loss_rate, error_rate
        self.false_losses = set()  # (instance, incarnation) whose late messages still arrive
        for spec in self.specs:
            self.incarnation[spec.id] = 0
            self.at(0.0, self.boot, spec)

    # -- time
    def at(self, when_s, call, *args):
        heapq.heappush(self._heap, (when_s, next(self._order), call, args))

    def run(self, limit=200_000):
        for _ in range(limit):
            if not self._heap:
                return
            when_s, _, call, args = heapq.heappop(self._heap)
            assert when_s >= self.now_s, "no time goes backward"
            self.now_s = when_s
            call(*args)
            self.check()
        raise AssertionError("the world does not come to rest")

    def message(self, link, call, *args):
        """In order per link, with a random delay."""
        when_s = max(self.now_s + self.rng.random() * 0.002, self._link_free_s.get(link, 0.0))
        self._link_free_s[link] = when_s
        self.at(when_s, call, *args)

    # -- instances
    def boot(self, spec):
        self.locals[spec.id] = assemble_local(self.config, spec, StepTable(PROFILE))
        self.executors[spec.id] = ToyExecutor(self, spec)
        self.tell_global(InstanceUp(spec))

    def lose(self, instance):
        if instance not in self.locals:
            return
        placed = self.global_.ledger.instances.get(instance)
        if self.rng.random() < 0.5:
            self.false_losses.add((instance, self.incarnation[instance]))
        self.incarnation[instance] += 1
        spec = self.locals.pop(instance).spec
        del self.executors[instance]
        ids = tuple(placed.placed) if placed else ()
        progress = tuple((i, self.reached(i)) for i in ids)
        self.tell_global(InstanceLost(spec, progress))

    def reached(self, request_id):
        truth = self.truths[request_id]
        return Progress(
            truth.request.prompt_tokens + len(truth.settled), truth.emitted, truth.steps
        )

    # -- events
    def tell_global(self, event):
        actions = self.global_.handle(self.now_s, event)
        self.log.append((self.now_s, event, tuple(actions)))
        for action in actions:
            assert action.why
            match action:
                case Send():
                    incarnation = self.incarnation[action.to]
                    self.message(
                        ("to", action.to), self.tell_local, action.to, incarnation, action.event
                    )
                case Predict():
                    forecast = self.predictor.remaining_steps(
                        action.request, action.progress, action.thresholds
                    )
                    self.message(
                        "predict", self.tell_global, Predicted(action.request.id, forecast)
                    )
                case Rebuild():
                    self.at(self.now_s + 0.5 + action.after_s, self.boot, action.spec)
                case Reject() | Finish():
                    self.truths[action.request_id].answers.append(action)

    def tell_local(self, instance, incarnation, event):
        if incarnation != self.incarnation[instance] or instance not in self.locals:
            return
        executor = self.executors[instance]
        for action in self.locals[instance].handle(self.now_s, event):
            assert action.why
            match action:
                case Report():
                    self.message(
                        ("from", instance), self.from_local, instance, incarnation, action.event
                    )
                case LoadState():
                    executor.load(action)
                case FreeState():
                    executor.free(action.request_id)
                case Predict():
                    forecast = self.predictor.remaining_steps(
                        action.request, action.progress, action.thresholds
                    )
                    self.message(
                        ("to", instance),
                        self.tell_local,
                        instance,
                        incarnation,
                        Predicted(action.request.id, forecast),
                    )
                case RunBatch():
                    seconds = StepTable(PROFILE).step_time_s(action.batch.steps, executor.spec)
                    self.at(
                        self.now_s + seconds,
                        self.batch_ends,
                        instance,
                        incarnation,
                        action.batch,
                        seconds,
                    )

    def from_local(self, instance, incarnation, event):
        current = incarnation == self.incarnation[instance]
        if current or (instance, incarnation) in self.false_losses:
            self.tell_global(event)

    def batch_ends(self, instance, incarnation, batch, seconds):
        if incarnation != self.incarnation[instance] or instance not in self.locals:
            return
        if self.rng.random() < self.loss_rate:
            self.lose(instance)
            return
        outcomes = []
        for step, chosen in self.executors[instance].run(batch, self.rng):
            truth = self.truths[step.request_id]
            if self.rng.random() < self.error_rate:
                error = FinishReason.ERROR
                outcomes.append(StepOutcome(step.request_id, 0, 0, error, error="row failed"))
                continue
            assert not chosen & truth.settled, "a token is settled once"
            truth.settled |= chosen
            truth.steps += 1
            while truth.emitted in truth.settled:
                truth.emitted += 1
            finished = None
            if truth.emitted >= truth.ends_at:
                truth.emitted = truth.ends_at
                limit = truth.request.max_output_tokens
                finished = FinishReason.LENGTH if truth.ends_at == limit else FinishReason.STOP
            outcomes.append(
                StepOutcome(step.request_id, len(chosen), truth.emitted, finished, SOME_CONFIDENCE)
            )
        self.tell_local(instance, incarnation, BatchDone(batch.id, tuple(outcomes), seconds))

    # -- clients
    def arrive(self, request, ends_at=None):
        ends_at = ends_at or self.rng.randint(1, request.max_output_tokens)
        self.truths[request.id] = Truth(request, ends_at)
        self.tell_global(RequestArrived(request))

    def cancel(self, request_id):
        self.tell_global(RequestCancelled(request_id, FinishReason.CANCELLED))

    # -- invariants
    def check(self):
        ledger = self.global_.ledger
        queued = [row[2] for row in self.global_._queue]
        assert queued == [r for _, _, r in sorted(self.global_._queue)]
        placed = [r for i in ledger.instances.values() for r in i.placed]
        assert len(placed) == len(set(placed)), "a request is reserved in one place"
        assert not set(placed) & set(queued)
        for request_id in queued + placed:
            assert request_id in ledger.requests
        for instance in ledger.instances.values():
            assert 0 <= instance.pages.free <= instance.pages.capacity
            assert len(instance.placed) <= instance.spec.max_residents
        for name, local in self.locals.items():
            assert local.pages.free + sum(local.pages._held.values()) == local.pages.capacity
            assert set(local.residents) == set(self.executors[name].rows)
            assert set(local.residents) == set(local.pages._held)
        residents = [r for local in self.locals.values() for r in local.residents]
        assert len(residents) == len(set(residents)), "a request is resident in one place"

    def check_rest(self):
        """At the end nothing is left, and everybody got exactly one answer."""
        assert not self.global_.ledger.requests
        assert not self.global_._queue
        for instance in self.global_.ledger.instances.values():
            assert instance.pages.free == instance.pages.capacity
            assert instance.resident_tokens == 0
        for local in self.locals.values():
            assert not local.residents
            assert local.pages.free == local.pages.capacity
            assert local._running is None
        for truth in self.truths.values():
            assert len(truth.answers) == 1, truth.answers

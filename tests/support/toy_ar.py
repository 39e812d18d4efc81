"""Small autoregressive clusters that check themselves; random ones from a seed.

``TokenWorld`` is ``ToyWorld`` with outputs of drawn lengths, cuts at any token, chunks that may
land damaged, and step times that are linear in what a batch is made of.
"""

import random

from stepserve.core.actions import Finish
from stepserve.core.ids import RequestId
from stepserve.core.protocols import Placement
from stepserve.core.request import SLO, Family, FinishReason, Request
from stepserve.core.segment import Segment
from stepserve.core.step import Mix
from stepserve.families.assemble import assemble_global, assemble_local
from stepserve.families.autoregressive import AUTOREGRESSIVE
from stepserve.sim.ar_executors import ArExecutors
from stepserve.sim.ar_record import ArRecord
from stepserve.sim.delays import Delays
from stepserve.sim.faults import FaultConfig, Faults
from stepserve.sim.known_lengths import KnownLengths
from stepserve.sim.links import Links
from stepserve.sim.transfers import Transfers
from stepserve.sim.world import World
from support.invariants import Invariants
from support.parts import make_control, make_forecast
from support.random_worlds import random_faults
from support.toy_world import DELAYS, RandomPlanner, ToyWorld, make_slots, make_spec

KV_BYTES_PER_TOKEN = 1000.0
SOON = Delays(0.005, 0.0005, plan_s=0.1, stop_s=0.01, rebuild_s=0.01, detect_s=0.005)


class LinearCost:
    """A ``CostModel``: 2 ms, 20 us a prefilled token, 1 ns a pair, 30 us a decode, 50 ns a key."""

    def step_time_s(self, tokens, rows, spec, mix=None):
        if tokens <= 0:
            return 0.0
        prefill, pairs, decodes, context = mix or Mix(tokens, tokens * (tokens + 1) // 2)
        return 0.002 + 2e-5 * prefill + 1e-9 * pairs + 3e-5 * decodes + 5e-8 * context

    def observe(self, tokens, rows, spec, seconds, mix=None):
        """Nothing to learn."""


def make_global(config, placement=None):
    scheduler = assemble_global(AUTOREGRESSIVE, config, LinearCost())
    if placement is not None:
        scheduler._placement = placement
    return scheduler


def make_local(config, spec):
    return assemble_local(AUTOREGRESSIVE, config, spec, LinearCost())


class RandomCuts:
    """Cuts of requests at any token at all, over any two instances; some run in one piece."""

    def __init__(self, seed, share=0.7):
        self.seed, self.share = seed, share

    def place(self, request, progress, forecast, view):
        rng = random.Random(f"{self.seed}/{request.id}/{progress.emitted}/{view.at_s}")
        names = sorted(view.loads)
        if len(names) == 1 or rng.random() >= self.share:
            return Placement((Segment(request.id, 0, 0, None, rng.choice(names), 0),))
        names = rng.sample(names, rng.choice([2, 2, len(names)]))
        prompt, end = request.prompt_tokens, request.prompt_tokens + request.max_output_tokens
        drawn = [(rng.randint(1, prompt), prompt, rng.randint(1, end + 3)) for _ in names[1:]]
        cuts = sorted({rng.choice(choices) for choices in drawn})
        rows = enumerate(zip([0, *cuts], [*cuts, None], names, strict=False))
        segments = tuple(Segment(request.id, i, a, b, name, 0) for i, (a, b, name) in rows)
        predicted_s = tuple(0.1 * n for n in range(len(segments)))
        return Placement(segments, predicted_s, 0.01, f"cut at {cuts}")


def make_token_request(name="r0", *, prompt=40, output=24, arrival_s=0.0, **slo):
    return Request(
        RequestId(name), Family.AUTOREGRESSIVE, "toy", prompt, output, arrival_s, SLO(**slo)
    )


class TokenWorld(ToyWorld):
    """See the module. ``placement`` replaces the configured one."""

    def __init__(
        self,
        seed,
        *,
        config=None,
        specs=None,
        delays=DELAYS,
        placement=None,
        links=None,
        damaged_share=0.0,
        sigma_tokens=0.0,
        on_handled=None,
        **faults,
    ):
        self.rng = random.Random(seed)
        self.config = config or token_config()
        self.specs = specs or [make_spec("i0"), make_spec("i1"), make_spec("i2", 30, 3)]
        self.log, self.requests, self.ends_at = [], [], {}
        self.executors = ArExecutors(self.end_of)
        damage = random.Random(f"{seed}/damage")
        self.transfers = Transfers(
            self.executors,
            KV_BYTES_PER_TOKEN,
            links or Links(25e9),
            damaged=lambda: damage.random() < damaged_share,
        )
        self.world = World(
            lambda: make_global(self.config, placement),
            lambda spec: make_local(self.config, spec),
            executors=self.executors,
            record=ArRecord,
            truth=LinearCost(),
            predictor=make_forecast(
                KnownLengths, truths=self.executors.truths, seed=seed, sigma_tokens=sigma_tokens
            ),
            planner=RandomPlanner(seed),
            delays=delays,
            faults=Faults(FaultConfig(**{"jitter_s": 0.002, **faults}), seed),
            transfers=self.transfers,
            timed=self.logged,
            on_handled=on_handled,
        )
        self.world.after_event = Invariants(self.world, self.executors).check

    def end_of(self, index):
        request = self.world._arrivals[index]
        ends_at = self.ends_at.get(request.id)
        return ends_at or random.Random(f"{index}/end").randint(1, request.max_output_tokens)

    @property
    def truths(self):
        return self.executors.truths

    @property
    def records(self):
        return list(self.world.records.values())

    def check_rest(self):
        super().check_rest()
        assert not any(self.executors.held.values()), "nothing is held any more"
        assert self.transfers.links.next_s == float("inf")
        for record in self.records:
            truth = self.truths[record.request.id]
            times = list(record.times_s)
            assert times == sorted(times)
            assert len(times) == record.tokens <= truth.output_tokens
            if isinstance(record.answer, Finish) and record.answer.reason is truth.reason:
                assert record.tokens == truth.output_tokens, "the whole answer, each token once"


BATCHING = ("order", "ignore_ttft", "least_chunk_tokens")


def token_config(**options):
    """``options``: of batching (``BATCHING``), or of ``ControlConfig``."""
    batching = {"use": options.pop("batching", "age_budget")}
    batching |= {name: options.pop(name) for name in BATCHING if name in options}
    return make_control(**{"placement": "least_loaded", "batching": batching, **options})


def random_token_config(seed):
    """Any options may meet any others; chunks are small, so that prompts have several."""
    rng = random.Random(f"{seed}/config")
    batching = rng.choice(["all_running", "latency_budget", "latency_budget"])
    drawn = {
        "queue": rng.choice(["deadline", "fcfs", "fcfs_drop"]),
        "queue_limit": rng.choice([5, 20, 1000]),
        "admitted_limit": rng.choice([0, 0, 6]),
        "predict_every_tokens": rng.choice([1, 8, 1000]),
        "report_every_s": rng.choice([0.0, 0.01, 0.25]),
    }
    budget = rng.choice(["age_budget", "tbt_budget", "static_chunk"])
    drawn |= {"tbt_s": rng.choice([0.004, 0.02]), "chunk_tokens": rng.choice([16, 64, 2048])}
    options = {
        "least_chunk_tokens": rng.choice([1, 16]),
        "order": rng.choice(["fcfs", "priority", "shortest", "deadline"]),
        "ignore_ttft": rng.choice([False, True]),
    }
    if batching == "latency_budget":
        drawn |= {"batching": budget, **options}
    else:
        drawn["batching"] = batching
    return token_config(
        **drawn,
        push_pages=rng.choice([8, 0]),
        planner=rng.choice(["none", "none", "greedy"]),
        plan_every_s=0.4,
        tp_degrees=(1, 2),
    )


def random_token_faults(seed):
    """Options of ``TokenWorld``; a third of the worlds have none but jitter."""
    rng = random.Random(f"{seed}/token faults")
    faults = {**random_faults(seed), "sigma_tokens": rng.choice([0.0, 20.0])}
    if "late_s" in faults:
        faults["late_s"] = rng.choice([0.02, 0.02, 0.6, 2.5])  # the last two are given up on
        faults["losses_per_hour"] = rng.choice([0.0, 2000.0, 20_000.0])
        faults["delays"] = rng.choice([DELAYS, SOON])  # placed anew before old messages arrive
    return {**faults, "damaged_share": rng.choice([0.0, 0.0, 0.02, 0.3])}


def random_token_request(rng, name, now_s):
    return make_token_request(
        name,
        prompt=rng.choice([rng.randint(1, 40), rng.randint(1, 200)]),
        output=rng.choice([rng.randint(1, 60), rng.randint(1, 60), rng.randint(1, 300)]),
        arrival_s=now_s,
        e2e_s=rng.choice([None, 0.05, 0.5]),
        ttft_s=rng.choice([None, 0.02, 0.2]),
        tbt_s=rng.choice([None, 0.01]),
    )


def run_token_world(seed, config=None, requests=50, cancel_share=0.2, share=0.7, **options):
    """Run a random world to its rest and check that nothing is left. ``share``: of cuts."""
    config = config or random_token_config(seed)
    world = TokenWorld(
        seed,
        config=config,
        specs=make_slots(pages=60) if config.planner != "none" else None,
        placement=RandomCuts(seed, share),
        **{"links": Links(random.Random(f"{seed}/links").choice([1e6, 1e8, 25e9])), **options},
    )
    rng = random.Random(seed + 1)
    when_s = 0.0
    for index in range(requests):
        when_s += rng.expovariate(40.0)
        request = random_token_request(rng, f"r{index}", when_s)
        world.arrive(request)
        if rng.random() < cancel_share:
            world.cancel_at(when_s + rng.random() * 0.5, request.id)
    world.run()
    world.check_rest()
    return world


def whole(record):
    """Whether the request got all of its output."""
    answer = record.answer
    ended = (FinishReason.STOP, FinishReason.LENGTH)
    return isinstance(answer, Finish) and answer.reason in ended

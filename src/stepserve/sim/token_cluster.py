"""Puts a simulated cluster of autoregressive models together, runs it, and makes a row of it."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from stepserve.control.local_scheduler import LocalScheduler
from stepserve.core.errors import FieldError
from stepserve.core.events import Predicted
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.instance import InstanceSpec, Link
from stepserve.core.protocols import StepPredictor
from stepserve.core.request import SLO, Family, Request
from stepserve.core.step import Mix
from stepserve.cost.batch_table import BatchTable
from stepserve.cost.output_length import ClassMean, MaxTokens
from stepserve.cost.roofline import roofline_on_a100
from stepserve.families.assemble import assemble_global, assemble_local
from stepserve.families.autoregressive import AUTOREGRESSIVE
from stepserve.metrics.latency import percentile

from .a100 import A100Truth, ModelShape
from .ar_executors import ArExecutors
from .ar_record import ArRecord
from .datasets import SimRequest
from .faults import Faults
from .known_lengths import KnownLengths
from .lengths import token_requests
from .links import Links
from .results import Row
from .run import rare_collection
from .token_config import TokenSetting, TokenSystem
from .token_results import machine_summary, token_summary
from .token_watch import CountedTruth, HopelessError, Judge, Samples, Watch
from .transfers import Transfers
from .world import Timed, World, untimed

Drawn = tuple[SimRequest, ...]

WARM_UP = 1_000_003
"""Added to a seed for the times of warm-up batches."""

CHUNK_TOKENS, DECODES = 512, 32
"""A usual batch, by which the first rate of a search is estimated."""

FIRST_SHARE = 0.6
"""Of the rate at which all instances would be busy with usual batches."""

WARM_UP_MIXES = tuple(
    Mix(prefill, prefill * prefill // 2, decodes, decodes * context)
    for prefill, decodes, context in itertools.product(
        (0, 128, 256, 512, 1024, 2048), (0, 8, 32, 64, 128), (512, 2048)
    )
    if prefill or decodes
)
"""What an instance runs before it serves, so many times (DynaServe 3.2)."""

WARM_UP_ROUNDS = 3


class Run(NamedTuple):
    """Which load a system is to serve."""

    model: str
    workload: str
    rate_per_s: float
    seed: int


def draw(setting: TokenSetting, workload: str, rate_per_s: float, seed: int) -> Drawn:
    """What arrives: for a seed the same at every rate, but for the unit of time."""
    return token_requests(workload, rate_per_s, seed, requests=setting.requests_at(rate_per_s))


def _requests(setting: TokenSetting, model: str, drawn: Drawn) -> list[Request]:
    slo = SLO(tbt_s=setting.tbt_s, ttft_s=setting.ttft_s or None)
    return [
        Request(
            id=RequestId(str(r.index)),
            family=Family.AUTOREGRESSIVE,
            model=model,
            prompt_tokens=r.prompt_tokens,
            max_output_tokens=r.output_tokens + setting.slack_tokens,
            arrival_s=r.arrival_s,
            slo=slo,
        )
        for r in drawn
    ]


def first_rate_per_s(setting: TokenSetting, model: str, workload: str, seed: int) -> float:
    """Where a search for capacity may begin: a share of what usual batches would take.

    A request alone costs its prompt in chunks, and its share of batches of ``DECODES``.
    """
    truth = A100Truth(model, setting.hardware)
    spec = _specs(truth.shape, TokenSystem(), 1)[0]
    drawn = draw(setting, workload, 1.0, seed)
    prompt = sum(r.prompt_tokens for r in drawn) / len(drawn)
    output = sum(r.output_tokens for r in drawn) / len(drawn)
    chunk = Mix(CHUNK_TOKENS, CHUNK_TOKENS * int(prompt + CHUNK_TOKENS) // 2)
    decodes = Mix(decodes=DECODES, decode_context=DECODES * int(prompt + output / 2.0))
    chunk_s = truth.step_time_s(CHUNK_TOKENS, 1, spec, chunk)
    decodes_s = truth.step_time_s(DECODES, DECODES, spec, decodes)
    seconds = chunk_s * prompt / CHUNK_TOKENS + decodes_s * output / DECODES
    return FIRST_SHARE * setting.instances / seconds


def _specs(shape: ModelShape, system: TokenSystem, instances: int) -> tuple[InstanceSpec, ...]:
    """Instances of the TP degree and KV room of a model."""
    page = system.page_tokens
    return tuple(
        InstanceSpec(
            InstanceId(f"i{n}"),
            shape.tp,
            shape.kv_tokens // page,
            page,
            system.max_running_requests,
        )
        for n in range(instances)
    )


class _Places:
    """Measures how long the global scheduler takes to place a request, in microseconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.took_us: list[float] = []

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """See ``world.Timed``: requests are placed when their prediction comes."""
        if part != "global":
            return call
        clock, took_us = self._clock, self.took_us

        def measured(now_s: float, event: Any) -> Any:
            if not isinstance(event, Predicted):
                return call(now_s, event)
            start_s = clock()
            actions = call(now_s, event)
            took_us.append(1e6 * (clock() - start_s))
            return actions

        return measured

    def row(self) -> Row:
        """Percentiles, measured on this machine."""
        names = {"place_us_p50": 50.0, "place_us_p99": 99.0}
        return {name: percentile(self.took_us, at) for name, at in names.items()}


def run_world(
    setting: TokenSetting,
    system: TokenSystem,
    run: Run,
    *,
    clock: Callable[[], float] | None = None,
    until_hopeless: bool = False,
) -> tuple[Row, Row] | None:
    """Run to the end: the row, and what was measured on this machine by ``clock``, if given.

    With ``until_hopeless`` a run ends, without a row, as soon as its rate is certainly not held.
    """
    drawn = draw(setting, run.workload, run.rate_per_s, run.seed)
    requests = _requests(setting, run.model, drawn)
    count = sum(r.arrival_s >= setting.warm_up_s for r in requests)
    if not count:
        raise FieldError("warm_up_s", f"no request arrives later at {run.rate_per_s}/s")
    places = None if clock is None else _Places(clock)
    cluster = _make_cluster(setting, system, run, drawn, places.timed if places else untimed)
    world, shape = cluster.world, cluster.truth.shape
    world.start(_specs(shape, system, setting.instances), requests)
    samples = Samples(world, requests[-1].arrival_s)
    if until_hopeless:
        gaps = sum(r.output_tokens - 1 for r in drawn[-count:])
        names = [r.id for r in requests[-count:]]
        Judge(world, names, gaps, setting.tbt_s, setting.patience_s)
    try:
        with rare_collection():
            world.run()
    except HopelessError:
        return None
    records = [r for r in world.records.values() if isinstance(r, ArRecord)]
    row = {
        "gpus": setting.instances * shape.tp,
        "instances": setting.instances,
        "rate_per_s": run.rate_per_s,
        **token_summary(setting, records[-count:], samples),
        **machine_summary(world, records, cluster.watch, cluster.truth, cluster.tables),
    }
    return row, {} if places is None else places.row()


class _Cluster(NamedTuple):
    """A world that has not started, and what is read of it afterwards."""

    world: World
    truth: CountedTruth
    tables: list[BatchTable]  # of the local schedulers
    watch: Watch


def _make_cluster(
    setting: TokenSetting, system: TokenSystem, run: Run, drawn: Drawn, timed: Timed
) -> _Cluster:
    """Every scheduler has its own policies, and its own table of batch times, warmed up."""
    truth = A100Truth(run.model, setting.hardware)
    counted, watch, control = CountedTruth(truth), Watch(), system.control
    tables: list[BatchTable] = []

    def make_local(spec: InstanceSpec) -> LocalScheduler:
        tables.append(_warm_table(setting, run, truth))
        return assemble_local(AUTOREGRESSIVE, control, spec, tables[-1])

    rows = ArExecutors([r.output_tokens for r in drawn].__getitem__)
    predictor = _predictor(system, rows, run.seed)
    link_bytes_per_s = system.link_bytes_per_s or setting.link_bytes_per_s
    kv_bytes, rtt_s = truth.shape.kv_bytes_per_token, setting.link_rtt_s
    known = _warm_table(setting, run, truth)
    link = Link(kv_bytes, link_bytes_per_s, rtt_s)
    world = World(
        lambda: assemble_global(AUTOREGRESSIVE, control, known, link),
        make_local,
        executors=rows,
        record=ArRecord,
        truth=counted,
        predictor=predictor,
        delays=setting.delays,
        faults=Faults(setting.faults, run.seed),
        transfers=Transfers(rows, kv_bytes, Links(link_bytes_per_s, rtt_s)),
        learn=() if isinstance(predictor, KnownLengths) else (predictor.learn,),
        timed=timed,
        on_handled=watch.on_handled,
    )
    return _Cluster(world, counted, tables, watch)


def _warm_table(setting: TokenSetting, run: Run, truth: A100Truth) -> BatchTable:
    """A table that starts from the model's roofline and has seen the batches of a warm-up."""
    spec = _specs(truth.shape, TokenSystem(), 1)[0]
    table = BatchTable({spec.tp_degree: roofline_on_a100(run.model, spec.tp_degree)})
    noise = Faults(setting.faults, WARM_UP + run.seed).noise
    for mix in WARM_UP_MIXES * WARM_UP_ROUNDS:
        tokens, rows = mix.prefill_tokens + mix.decodes, mix.decodes + (mix.prefill_tokens > 0)
        seconds = noise() * truth.step_time_s(tokens, rows, spec, mix)
        table.observe(tokens, rows, spec, seconds, mix)
    return table


def _predictor(system: TokenSystem, rows: ArExecutors, seed: int) -> StepPredictor:
    if system.predictor == "class_mean":
        return ClassMean()
    if system.predictor == "longest":
        return MaxTokens()
    return KnownLengths(rows, system.sigma_tokens, seed)

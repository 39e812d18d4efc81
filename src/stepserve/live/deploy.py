"""Assembles a live cluster from configuration: model, instances, schedulers, gateway."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI

from stepserve.core.config import ServeConfig
from stepserve.core.errors import FieldError
from stepserve.core.instance import InstanceSpec
from stepserve.core.model import Engine, ModelFacts
from stepserve.core.plan import Planner
from stepserve.core.protocols import StepPredictor
from stepserve.core.request import CacheMode, RefreshScope
from stepserve.cost.batch_profile import BatchProfile
from stepserve.cost.step_log import StepLog
from stepserve.families.assemble import FAMILIES, make_planner
from stepserve.families.setup import SchedulerSetup, make_setup
from stepserve.gateway.app import create_app
from stepserve.gateway.contract import ModelCard
from stepserve.gateway.tokenizer import TextTokenizer
from stepserve.metrics.control import ControlReading
from stepserve.metrics.prometheus import LoadGauges, PrometheusMetrics

from .counters import Counters
from .event_log import EventLog
from .first_layout import announcement, first_specs
from .frontend import LiveFrontend
from .instance import Instance
from .instance_factory import InstanceFactory, make_engine
from .kept_batches import KeptBatches
from .listening import check_tls, listen, listen_for_operator
from .loop import ControlLoop
from .operator import LiveOperator
from .operator_port import operator_api, uvicorn_config
from .predictor import SharedPredictor
from .recording import Listener
from .remote_frontend import RemoteFrontend
from .server import Server, both_signals
from .transport import OutputSink, Transport
from .transport_local import LocalTransport

logger = logging.getLogger(__name__)

HostInstances = Callable[
    [InstanceFactory, OutputSink, Sequence[Listener], StepPredictor], Transport
]
"""Makes the transport: of what, where outputs go, who listens to and who learns from instances."""


@dataclass(frozen=True)
class Cluster:
    """A live cluster. ``start`` and ``stop`` run on the asyncio thread.

    ``logs`` are ended last.
    """

    loop: ControlLoop
    transport: Transport
    frontend: LiveFrontend
    specs: tuple[InstanceSpec, ...]
    counters: Counters
    operator: LiveOperator
    logs: tuple[EventLog | KeptBatches | SharedPredictor, ...] = ()

    def start(self) -> None:
        """Start every instance; the frontend is ready when the first is up."""
        self.loop.attach(self.transport, asyncio.get_running_loop())
        self.loop.start(self.specs)
        self.frontend.start()

    def control_reading(self) -> ControlReading:
        """What the control plane decided so far."""
        status, counters = self.loop.status(), self.counters
        caps = status.caps or (1.0,)
        return ControlReading(
            cap_lowest=min(caps),
            cap_mean=sum(caps) / len(caps),
            caps_updates=counters.caps_updates,
            migrations_asked=counters.migrations_asked,
            migrations_done=self.loop.migrations,
            handovers=counters.handovers,
            forecasts_refreshed=counters.forecasts_refreshed,
            plans_solved=counters.plans_solved,
            layout_changes=self.loop.supervisor.layout_changes,
            scheduler_restarts=self.loop.supervisor.restarts,
            instance_losses=self.loop.losses,
            instances=Counter(i.spec.tp_degree for i in status.instances),
            scheduler_seconds=counters.seconds,
            scheduler_events=counters.events,
        )

    async def stop(self) -> None:
        """Let running batches end, then stop."""
        try:
            await self.frontend.stop()
        finally:
            with contextlib.ExitStack() as stack:  # each, whatever the others do
                for log in reversed(self.logs):
                    stack.callback(log.close)


def build_cluster(
    config: ServeConfig,
    engine: Engine,
    listeners: Sequence[Listener] = (),
    planner: Planner | None = None,
    host: HostInstances | None = None,
) -> Cluster:
    """Assemble schedulers, executors and transport around an engine.

    Each instance has its own pages and its own scheduler; those in this process share ``engine``.
    ``planner`` replaces the configured one. ``host``: where else instances live.
    """
    setup = make_setup(config, engine)
    return assemble(config, setup, engine.facts, host or in_threads(engine), listeners, planner)


def in_threads(engine: Engine) -> HostInstances:
    """Instances live in this process, and share an engine."""

    def host(
        factory: InstanceFactory,
        sink: OutputSink,
        listeners: Sequence[Listener],
        predictor: StepPredictor,
    ) -> Transport:
        def build(spec: InstanceSpec, incarnation: int) -> Instance:
            return factory.instance(engine, spec, incarnation, predictor, time.monotonic, listeners)

        return LocalTransport(build, sink, factory.config.hang_s)

    return host


def assemble(
    config: ServeConfig,
    setup: SchedulerSetup,
    facts: ModelFacts,
    host: HostInstances,
    listeners: Sequence[Listener] = (),
    planner: Planner | None = None,
) -> Cluster:
    """As ``build_cluster``, of what is known of the model, and without an engine."""
    factory = InstanceFactory(config, setup)
    planner = planner or make_planner(FAMILIES[setup.family], setup.control)
    specs = first_specs(config)
    setup.new_local(specs[0])  # refuses unknown policies now
    log = StepLog(Path(config.log_steps)) if config.log_steps else None
    predictor = SharedPredictor(factory.predictor(facts), log)
    counters = Counters()
    listeners = [*listeners, counters.note]
    logs: list[EventLog | KeptBatches | SharedPredictor] = [predictor]
    if isinstance(setup.profile, BatchProfile) and config.keep_profile:
        lowest = setup.control.tp_degrees[0]
        kept = KeptBatches(Path(config.keep_profile), setup.profile, lowest)
        listeners.append(kept.note)
        logs.append(kept)
    if config.events:
        events = EventLog(Path(config.events), setup, config.events_bytes, config.events_keep)
        listeners.append(events.note)
        logs.append(events)
    loop = ControlLoop(setup.new_global, predictor, time.monotonic, planner, listeners)
    transport = host(factory, loop.sink, listeners, predictor)
    frontend = LiveFrontend(loop, transport)
    operator = LiveOperator(loop, specs, setup.control.tp_degrees)
    return Cluster(loop, transport, frontend, specs, counters, operator, tuple(logs))


def build_app(
    config: ServeConfig,
    facts: ModelFacts,
    frontend: LiveFrontend | RemoteFrontend,
    read: Callable[[], ControlReading],
) -> FastAPI:
    """The gateway over a cluster; ``read``: what ``/metrics`` says of its schedulers."""
    load_gauges = LoadGauges(frontend.running, frontend.waiting, frontend.kv_usage, read)
    pages = sum(spec.page_capacity for spec in first_specs(config))
    card = model_card(config, facts)
    metrics = PrometheusMetrics(card.id, load_gauges, config.page_tokens, pages)
    return create_app(frontend, TextTokenizer.from_folder(facts.folder), card, config, metrics)


def model_card(config: ServeConfig, facts: ModelFacts) -> ModelCard:
    """What requests are validated against. Raises FieldError for a cache that means nothing."""
    return ModelCard(
        id=config.served_model_name or facts.name,
        family=facts.family,
        context_tokens=min(facts.context_tokens, config.kv_pages * config.page_tokens),
        vocab_size=facts.vocab_size,
        eos_token_ids=frozenset(facts.eos_token_ids),
        default_max_tokens=facts.default_max_tokens,
        request_fields=FAMILIES[facts.family].request_fields,
        block_lengths=facts.block_lengths,
        default_block_length=facts.default_block_length,
        mask_token_id=facts.mask_token_id,
        default_cache=_default_cache(config, facts),
        default_refresh_scope=RefreshScope(config.refresh_scope),
        weighs=FAMILIES[facts.family].weighs(config.control),
    )


def _default_cache(config: ServeConfig, facts: ModelFacts) -> CacheMode:
    """As configured; what is exact about a block-causal model is its architecture, not a choice."""
    if facts.block_causal:
        return CacheMode.BLOCK
    if CacheMode(config.cache_mode) is CacheMode.BLOCK:
        raise FieldError("cache_mode", f"{facts.name} is no block-causal model")
    return CacheMode(config.cache_mode)


def serve(config: ServeConfig, host: HostInstances | None = None) -> int:
    """Serve until told to stop; the exit status. ``host``: see ``build_cluster``."""
    check_tls(config)
    listener, operators = listen(config), listen_for_operator(config)
    engine = make_engine(config)
    TextTokenizer.from_folder(engine.facts.folder)  # or refuses, before anything is measured
    cluster = build_cluster(config, engine, host=host)
    app = build_app(config, engine.facts, cluster.frontend, cluster.control_reading)
    drains = cluster.frontend, both_signals(config), config.drain_s
    server = Server(uvicorn_config(app, config), *drains)

    async def run() -> None:
        cluster.start()
        watch = asyncio.ensure_future(announce())
        try:
            async with operator_api(config, cluster.operator, operators):
                await server.serve(sockets=[listener])
        finally:
            watch.cancel()
            await cluster.stop()

    async def announce() -> None:
        """Say that it serves once it does, or that no instance could be built, and leave then."""
        while not (server.started and cluster.frontend.ready()):
            if not cluster.loop.ever_up and len(cluster.loop.lost_ids) >= len(config.degrees):
                logger.error("no instance could be started")
                server.should_exit = True
                return
            await asyncio.sleep(0.1)
        port = listener.getsockname()[1]
        logger.info(announcement(config, engine.facts.name, port))

    asyncio.run(run())
    return 0 if server.started and cluster.loop.ever_up else 1

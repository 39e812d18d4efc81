"""Assembles a live cluster from configuration: model, instances, schedulers, gateway."""

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from stepserve.control.reconfigure import slot_id
from stepserve.core.config import ServeConfig
from stepserve.core.errors import FieldError
from stepserve.core.instance import InstanceSpec
from stepserve.core.model import Engine, ModelFacts
from stepserve.core.plan import Planner, Slot
from stepserve.core.protocols import StepPredictor
from stepserve.core.request import CacheMode, RefreshScope
from stepserve.cost.batch_profile import BatchProfile
from stepserve.cost.step_log import StepLog
from stepserve.families.assemble import FAMILIES, make_planner
from stepserve.families.profiles import cores_per_share
from stepserve.families.setup import make_setup
from stepserve.gateway.app import create_app
from stepserve.gateway.contract import ModelCard
from stepserve.gateway.operator import add_operator
from stepserve.gateway.tokenizer import TextTokenizer
from stepserve.metrics.control import ControlReading
from stepserve.metrics.prometheus import LoadGauges, PrometheusMetrics

from .counters import Counters
from .event_log import EventLog
from .frontend import LiveFrontend
from .instance import Instance
from .instance_factory import InstanceFactory, make_engine
from .kept_batches import KeptBatches
from .loop import ControlLoop
from .operator import LiveOperator
from .predictor import SharedPredictor
from .recording import Listener
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
    factory = InstanceFactory(config, setup)
    planner = planner or make_planner(FAMILIES[setup.family], setup.control)
    specs = _first_specs(config)
    setup.new_local(specs[0])  # refuses unknown policies now
    log = StepLog(Path(config.log_steps)) if config.log_steps else None
    predictor = SharedPredictor(factory.predictor(engine), log)
    counters = Counters()
    listeners = [*listeners, counters.note]
    logs: list[EventLog | KeptBatches | SharedPredictor] = [predictor]
    if isinstance(setup.profile, BatchProfile) and config.keep_profile:
        lowest = setup.control.tp_degrees[0]
        kept = KeptBatches(Path(config.keep_profile), setup.profile, lowest)
        listeners.append(kept.note)
        logs.append(kept)
    if config.events:
        events = EventLog(Path(config.events), setup)
        listeners.append(events.note)
        logs.append(events)
    loop = ControlLoop(setup.new_global, predictor, time.monotonic, planner, listeners)

    def build_instance(spec: InstanceSpec, incarnation: int) -> Instance:
        return factory.instance(engine, spec, incarnation, predictor, time.monotonic, listeners)

    transport: Transport
    if host is None:
        transport = LocalTransport(build_instance, loop.sink, config.hang_s)
    else:
        transport = host(factory, loop.sink, listeners, predictor)
    frontend = LiveFrontend(loop, transport)
    operator = LiveOperator(loop, specs, setup.control.tp_degrees)
    return Cluster(loop, transport, frontend, specs, counters, operator, tuple(logs))


def _first_specs(config: ServeConfig) -> tuple[InstanceSpec, ...]:
    """Instances side by side; pages and places grow with the shares (or GPUs) of each."""
    specs, first = [], 0
    for degree in config.degrees:
        slot = Slot(0, tuple(range(first, first + degree)))
        first += degree
        spec = InstanceSpec(
            id=slot_id(slot),
            tp_degree=degree,
            page_capacity=config.kv_pages * degree,
            page_tokens=config.page_tokens,
            max_running_requests=config.max_running_requests * degree,
            slot=slot,
        )
        specs.append(spec)
    return tuple(specs)


def build_app(config: ServeConfig, facts: ModelFacts, cluster: Cluster) -> FastAPI:
    """The gateway over a cluster."""
    frontend = cluster.frontend
    load_gauges = LoadGauges(
        frontend.running, frontend.waiting, frontend.kv_usage, cluster.control_reading
    )
    pages = sum(spec.page_capacity for spec in cluster.specs)
    card = model_card(config, facts)
    metrics = PrometheusMetrics(card.id, load_gauges, config.page_tokens, pages)
    app = create_app(frontend, TextTokenizer.from_folder(facts.folder), card, config, metrics)
    if config.operator_api:
        add_operator(app, cluster.operator)
    return app


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


class _Server(uvicorn.Server):
    """On SIGTERM or SIGINT: take nothing new, finish what was accepted, then leave with 0."""

    def __init__(self, config: uvicorn.Config, frontend: LiveFrontend) -> None:
        super().__init__(config)
        self._frontend = frontend

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but the signal is not raised again afterwards: the cluster stops first."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: drain. A second SIGINT ends at once."""
        logger.info("draining: accepted requests are finished, nothing new is taken")
        self._frontend.drain()
        super().handle_exit(sig, frame)


def listen(config: ServeConfig) -> socket.socket:
    """Take the port before anything is loaded. Raises FieldError if it cannot be had."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen(2048)  # who connects while the model loads waits instead of failing
    except OSError as error:
        listener.close()
        raise FieldError("port", f"{config.host}:{config.port} cannot be used: {error}") from error
    return listener


def _instances(config: ServeConfig) -> str:
    """How many, their degrees where not all are 1, and what they run on."""
    degrees, threads = config.degrees, cores_per_share(config)
    what = f"{len(degrees)} instance{'s' * (len(degrees) > 1)}"
    if max(degrees) > 1:
        what += f" of tensor-parallel degrees {'+'.join(map(str, degrees))}"
    each = "share" if max(degrees) > 1 else "instance"
    cpus = f"{threads} CPU thread{'s' * (threads > 1)} per {each}"
    return f"{what}, {cpus if config.device == 'cpu' else config.device}"


def serve(config: ServeConfig, host: HostInstances | None = None) -> int:
    """Serve until told to stop; the exit status. ``host``: see ``build_cluster``."""
    listener = listen(config)
    engine = make_engine(config)
    cluster = build_cluster(config, engine, host=host)
    app = build_app(config, engine.facts, cluster)
    options = uvicorn.Config(app, log_level="warning")
    server = _Server(options, cluster.frontend)

    async def run() -> None:
        cluster.start()
        watch = asyncio.ensure_future(announce())
        try:
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
        what = f"{engine.facts.name} at http://{config.host}:{port} ({_instances(config)})"
        logger.info("serving %s", what)

    asyncio.run(run())
    return 0 if server.started and cluster.loop.ever_up else 1

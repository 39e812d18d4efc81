"""What runs in the processes of a server: see ``processes``."""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import uvloop

from stepserve.core.config import ServeConfig
from stepserve.core.errors import StepserveError
from stepserve.core.ids import InstanceId
from stepserve.core.instance import InstanceSpec
from stepserve.core.protocols import StepPredictor
from stepserve.families.setup import make_setup
from stepserve.gateway.tokenizer import TextTokenizer

from . import transport_processes
from .deploy import assemble, build_app
from .gateway_port import GatewayPort
from .instance_factory import InstanceFactory, make_engine
from .logs import log_to_stderr
from .messages import Standing
from .operator_port import operator_api, uvicorn_config
from .processes import Inheritance, Line, Served, instance_path
from .recording import Listener
from .remote_frontend import RemoteFrontend
from .server import Server
from .transport import OutputSink
from .transport_processes import ChildProcess
from .transport_remote import RemoteTransport

logger = logging.getLogger(__name__)

TOLD_S = 5.0
"""How long a new gateway takes no connection because it does not know of any instance."""

TAKE_OVER_S = 3.0
"""How long a new scheduler waits for gateways and instances that are there."""


def _begin(config: ServeConfig, log_level: int) -> None:
    """What every child does first. An interrupt is meant for the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log_to_stderr(log_level, config.log_format)


def describe(config: ServeConfig, log_level: int, line: Line) -> None:
    """Tell the parent what is served, or what stands in the way. May measure batches."""
    _begin(config, log_level)
    try:
        engine = make_engine(config)
        TextTokenizer.from_folder(engine.facts.folder)  # or refuses, before anything is measured
        line.send((engine.facts, make_setup(config, engine)))
    except (StepserveError, ModuleNotFoundError) as error:
        line.send(error)


def run_gateway(served: Served, listener: socket.socket) -> None:
    """The life of a gateway's process: until it is told to end, or its parent is gone."""
    _begin(served.config, served.log_level)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_gateway(served, listener))


async def _gateway(served: Served, listener: socket.socket) -> None:
    config, frontend = served.config, RemoteFrontend(served.scheduler_path)
    app = build_app(config, served.facts, frontend, frontend.control_reading)
    signals = {int(signal.SIGTERM): config.drain_delay_s, int(signal.SIGUSR1): 0.0}
    server = Server(uvicorn_config(app, config), frontend, signals, config.drain_s)
    _when_orphaned(lambda: os.kill(os.getpid(), signal.SIGTERM))
    frontend.start()
    try:
        with server.capture_signals():
            with contextlib.suppress(TimeoutError):  # who connects meanwhile waits
                await asyncio.wait_for(frontend.told.wait(), TOLD_S)
            await server.serve(sockets=[listener])
    finally:
        await frontend.stop()


def _when_orphaned(call: Callable[[], None]) -> None:
    """Do something when the parent has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "it is a child"

    def watch() -> None:
        parent.join()
        call()

    threading.Thread(target=watch, name="parent", daemon=True).start()


def run_scheduler(
    served: Served, inherited: Inheritance, line: Line, operators: socket.socket | None
) -> None:
    """The life of the global scheduler's process."""
    _begin(served.config, served.log_level)
    asyncio.run(_Scheduler(served, inherited, line, operators).run())


def run_instance(served: Served, spec: InstanceSpec, incarnation: int) -> None:
    """The life of an instance's process."""
    _begin(served.config, served.log_level)
    transport_processes.run(
        InstanceFactory(served.config, served.setup), spec, incarnation, served.folder
    )


class _Scheduler:
    """The control loop, its port for gateways, and its line to the parent."""

    def __init__(
        self,
        served: Served,
        inherited: Inheritance,
        line: Line,
        operators: socket.socket | None,
    ) -> None:
        self._served, self._inherited, self._line = served, inherited, line
        self._operators = operators
        self._children: dict[tuple[InstanceId, int], ChildProcess] = {}
        self._running = {(spec.id, number) for spec, number in inherited.instances}
        self._lock = threading.Lock()
        self._layout: tuple[InstanceSpec, ...] = ()
        self._stop = asyncio.Event()
        number = inherited.number
        config = served.config if not number else _without_files(served.config, number)
        self._cluster = assemble(config, served.setup, served.facts, self._host)
        self._port = GatewayPort(self._cluster.loop, self._standing)

    def _host(
        self,
        factory: InstanceFactory,
        sink: OutputSink,
        listeners: Sequence[Listener],
        predictor: StepPredictor,
    ) -> RemoteTransport:
        """A ``deploy.HostInstances``."""
        transport = RemoteTransport(self._launch, sink, listeners, predictor, factory.config.hang_s)
        transport.count_from(dict(self._inherited.incarnations))
        return transport

    def _launch(self, spec: InstanceSpec, incarnation: int) -> ChildProcess:
        key = spec.id, incarnation
        path = instance_path(self._served.folder, *key)
        child = ChildProcess(self._say, path, spec, incarnation, key in self._running)
        self._children[key] = child
        return child

    async def run(self) -> None:
        """Take over what is there, or begin; until told to stop, or all others are gone."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        threading.Thread(target=self._hear, args=(loop,), name="parent", daemon=True).start()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._served.scheduler_path)
        await self._port.listen(self._served.scheduler_path)
        cluster = self._cluster
        if self._inherited.number:
            await self._take_over()
        else:
            cluster.start()
        self._port.open()
        ready = asyncio.ensure_future(self._tell_parent())
        async with operator_api(self._served.config, cluster.operator, self._operators):
            await self._stop.wait()
        ready.cancel()
        await cluster.stop()
        await self._port.close()

    async def _take_over(self) -> None:
        inherited, cluster = self._inherited, self._cluster
        transport = cluster.transport
        assert isinstance(transport, RemoteTransport)
        cluster.loop.attach(transport, asyncio.get_running_loop())
        cluster.loop.wait_for_take_over()
        for spec, incarnation in inherited.instances:
            transport.adopt(spec, incarnation)
        until_s = time.monotonic() + TAKE_OVER_S
        while time.monotonic() < until_s:
            there = all(transport.present().values())
            if there and self._port.gateways >= inherited.gateways:
                break
            await asyncio.sleep(0.01)
        present = [one for one in transport.present().values() if one is not None]
        cluster.loop.take_over(inherited.number, inherited.layout, self._port.found, present)
        cluster.frontend.start()

    def _hear(self, loop: asyncio.AbstractEventLoop) -> None:
        """What the parent says: which instances have ended. Without it, gateways are finished."""
        try:
            while True:
                ended = self._children.get(self._line.recv())
                if ended is not None:
                    ended.note_end()
        except (EOFError, OSError):
            loop.call_soon_threadsafe(lambda: loop.create_task(self._outlive()))

    async def _outlive(self) -> None:
        while self._port.gateways:
            await asyncio.sleep(0.1)
        self._stop.set()

    def _standing(self) -> Standing:
        frontend = self._cluster.frontend
        return Standing(
            serves=frontend.ready(),
            healthy=frontend.healthy(),
            running=frontend.running(),
            waiting=frontend.waiting(),
            kv_usage=frontend.kv_usage(),
            reading=self._cluster.control_reading(),
        )

    async def _tell_parent(self) -> None:
        """Say when requests are served, or cannot be, and what the layout is."""
        loop = self._cluster.loop
        while not (self._cluster.frontend.ready() and self._port.gateways):
            if not loop.ever_up and len(loop.lost_ids) >= len(self._served.config.degrees):
                logger.error("no instance could be started")
                self._say("failed")
                return
            await asyncio.sleep(0.02)
        self._port.tell()
        self._say("serving")
        while True:
            if loop.supervisor.layout != self._layout:
                self._layout = loop.supervisor.layout
                self._say("layout", self._layout)
            await asyncio.sleep(0.1)

    def _say(self, *words: object) -> None:
        """Tell the parent, if there is one."""
        with self._lock, contextlib.suppress(OSError):
            self._line.send(words)


def _without_files(config: ServeConfig, number: int) -> ServeConfig:
    """A scheduler that follows another writes logs of its own, beside those."""

    def beside(name: str) -> str:
        path = Path(name)
        first, *rest = path.name.partition(".")
        return str(path.with_name(f"{first}-{number}{''.join(rest)}")) if name else ""

    return replace(config, events=beside(config.events), log_steps=beside(config.log_steps))

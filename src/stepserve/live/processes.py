"""A server of several processes: gateways, a global scheduler, instances, and their parent.

The parent starts the others, starts again what ends, and knows nothing else: each of them may be
killed at any moment. Requests are with the gateways and the state of their answers with the
instances, so that a new scheduler can ask both (``control.recovery``). All are forked from a
template, a process that has imported everything and done nothing, so that one more imports
nothing and shares its memory; weights are shared as pages of their file.

If the parent is killed, gateways finish what they have and end, and the others after them.
"""

import contextlib
import importlib
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeAlias

from stepserve.core.config import ServeConfig
from stepserve.core.errors import StepserveError
from stepserve.core.ids import InstanceId
from stepserve.core.instance import InstanceSpec
from stepserve.core.model import ModelFacts
from stepserve.families.registry import names
from stepserve.families.setup import SchedulerSetup

from .first_layout import announcement, first_specs
from .listening import check_tls, listen, listen_for_operator

logger = logging.getLogger(__name__)

Line: TypeAlias = "Connection[Any, Any]"

RESTARTS, RESTARTS_WITHIN_S = 10, 60.0
"""After more ends of gateways and schedulers than that within so long, the server gives up."""

CHILDREN = "stepserve.live.children"

_processes = multiprocessing.get_context("forkserver")


@dataclass(frozen=True, slots=True)
class Served:
    """What all processes have to know: what is served, how, and where they meet."""

    config: ServeConfig
    facts: ModelFacts
    setup: SchedulerSetup
    folder: Path
    log_level: int

    @property
    def scheduler_path(self) -> str:
        """The socket of the scheduler."""
        return str(self.folder / "scheduler")


def instance_path(folder: Path, instance: InstanceId, incarnation: int) -> str:
    """The socket of an incarnation of an instance."""
    return str(folder / f"{instance}.{incarnation}".replace("/", "-"))


@dataclass(frozen=True, slots=True)
class Inheritance:
    """What a scheduler has to take over: ``number`` counts those before it."""

    number: int = 0
    gateways: int = 0
    layout: tuple[InstanceSpec, ...] = ()
    instances: tuple[tuple[InstanceSpec, int], ...] = ()
    incarnations: tuple[tuple[InstanceId, int], ...] = ()


def _call(name: str, *args: Any) -> None:
    """In a child: what this process has no need to import."""
    with contextlib.suppress(OSError):  # its name where processes are listed, on Linux
        Path("/proc/self/comm").write_text(f"stepserve {name.removeprefix('run_')}"[:15])
    try:
        children = importlib.import_module(CHILDREN)
    except ModuleNotFoundError as error:
        if name != "describe":
            raise
        args[-1].send(error)  # the first child: the parent says what is missing
        return
    getattr(children, name)(*args)


def _start(name: str, *args: Any) -> BaseProcess:
    process = _processes.Process(target=_call, args=(name, *args), name=name)
    process.start()
    return process


class Parent:
    """Starts all processes of a server, and again what ends before it is told to."""

    def __init__(
        self, served: Served, listener: socket.socket, operators: socket.socket | None
    ) -> None:
        self._served, self._listener, self._operators = served, listener, operators
        self._gateways: list[BaseProcess] = []
        self._instances: dict[tuple[InstanceId, int], tuple[InstanceSpec, BaseProcess]] = {}
        self._incarnations: dict[InstanceId, int] = {}
        self._layout = first_specs(served.config)
        self._schedulers = 0
        self._ends_s: deque[float] = deque(maxlen=RESTARTS)
        self._draining = self._failed = False
        self._served_ever = False
        self._waker, waked = socket.socketpair()
        waked.setblocking(False)
        self._waked = waked

    def run(self) -> int:
        """Until told to end; the exit status."""
        signal.set_wakeup_fd(self._waked.fileno())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._drain)
        self._start_scheduler()
        for _ in range(self._served.config.gateways):
            self._start_gateway()
        try:
            while self._gateways and not self._failed:
                self._look()
            self._end_scheduler()
        finally:
            self._kill_all()
        return 0 if self._served_ever and not self._failed else 1

    def _drain(self, number: int, _: object) -> None:
        """Have the gateways end; a second signal ends all at once."""
        self._failed |= self._draining
        self._draining = True
        for gateway in self._gateways:
            assert gateway.pid is not None, "it is started"
            with contextlib.suppress(ProcessLookupError):
                how = signal.SIGTERM if number == signal.SIGTERM else signal.SIGUSR1
                os.kill(gateway.pid, how)

    def _start_gateway(self) -> None:
        self._gateways.append(_start("run_gateway", self._served, self._listener))

    def _start_scheduler(self) -> None:
        instances = tuple((spec, n) for (_, n), (spec, _) in self._instances.items())
        inherited = Inheritance(
            self._schedulers,
            len(self._gateways),
            self._layout,
            instances,
            tuple(self._incarnations.items()),
        )
        self._schedulers += 1
        self._line, theirs = _processes.Pipe()
        self._scheduler = _start("run_scheduler", self._served, inherited, theirs, self._operators)
        theirs.close()

    def _look(self) -> None:
        """Wait for whatever happens next."""
        instances = {one.sentinel: key for key, (_, one) in self._instances.items()}
        gateways = {one.sentinel: one for one in self._gateways}
        scheduler = self._scheduler.sentinel
        ready = wait([self._line, self._waker, scheduler, *instances, *gateways])
        if self._waker in ready:
            self._waker.recv(4096)
        if self._line in ready:
            self._hear()
        for sentinel in ready:
            if sentinel in instances:
                self._note_end(instances[sentinel])
            elif sentinel in gateways:
                self._gateways.remove(gateways[sentinel])
                if not self._draining and self._may_go_on("a gateway", gateways[sentinel]):
                    self._start_gateway()
            elif sentinel == scheduler and self._may_go_on("the scheduler", self._scheduler):
                self._line.close()
                self._start_scheduler()

    def _may_go_on(self, what: str, ended: BaseProcess) -> bool:
        now_s, ends_s = time.monotonic(), self._ends_s
        logger.error("%s ended with %s", what, ended.exitcode)
        if len(ends_s) == RESTARTS and now_s - ends_s[0] < RESTARTS_WITHIN_S:
            logger.error("this went on too often: the server ends")
            self._failed = True
        ends_s.append(now_s)
        return not self._failed

    def _note_end(self, key: tuple[InstanceId, int]) -> None:
        _, process = self._instances.pop(key)
        logger.info("instance %s.%d ended with %s", *key, process.exitcode)
        with contextlib.suppress(OSError):
            self._line.send(key)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(instance_path(self._served.folder, *key))

    def _hear(self) -> None:
        """What the scheduler says."""
        try:
            match self._line.recv():
                case ("start", spec, incarnation):
                    self._incarnations[spec.id] = incarnation
                    process = _start("run_instance", self._served, spec, incarnation)
                    self._instances[spec.id, incarnation] = spec, process
                case ("kill", spec, incarnation):
                    held = self._instances.get((spec.id, incarnation))
                    if held is not None:
                        held[1].kill()
                case ("layout", layout):
                    self._layout = layout
                case ("serving",):
                    self._announce()
                case ("failed",):
                    self._failed = True
        except (EOFError, OSError):
            self._scheduler.join(1.0)  # its end is next

    def _announce(self) -> None:
        if self._served_ever:
            return
        self._served_ever = True
        config, name = self._served.config, self._served.facts.name
        logger.info(announcement(config, name, self._listener.getsockname()[1]))

    def _end_scheduler(self) -> None:
        self._scheduler.terminate()
        until_s = time.monotonic() + self._served.config.hang_s
        while self._scheduler.is_alive() and time.monotonic() < until_s:
            sentinels = [one.sentinel for _, one in self._instances.values()]
            ready = wait([self._scheduler.sentinel, *sentinels], 1.0)
            for key, (_, one) in list(self._instances.items()):
                if one.sentinel in ready:
                    self._note_end(key)

    def _kill_all(self) -> None:
        held = [one for _, one in self._instances.values()]
        for process in [self._scheduler, *self._gateways, *held]:
            process.kill()
            process.join()


def serve_processes(config: ServeConfig) -> int:
    """Serve until told to stop; the exit status."""
    check_tls(config)
    listener, operators = listen(config), listen_for_operator(config)
    folder = Path(tempfile.mkdtemp(prefix="stepserve-"))
    try:
        engine = names("engine").get(config.engine.use, config.engine.use).partition(":")[0]
        _processes.set_forkserver_preload([CHILDREN, engine])
        level = logging.getLogger().level
        line, theirs = _processes.Pipe()
        child = _start("describe", config, level, theirs)
        theirs.close()
        try:
            said = line.recv()
        except EOFError:
            raise StepserveError("the model cannot be described: see above") from None
        child.join()
        if isinstance(said, Exception):
            raise said
        facts, setup = said
        return Parent(Served(config, facts, setup, folder, level), listener, operators).run()
    finally:
        listener.close()
        if operators is not None:
            operators.close()
        shutil.rmtree(folder, ignore_errors=True)

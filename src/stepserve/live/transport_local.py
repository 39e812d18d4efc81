"""Instances as threads of this process: the embedded default, no services needed.

PyTorch releases the interpreter lock inside its kernels, so instances run in parallel. A
thread that raises, that is killed, or that is absurdly long at one thing is a lost instance.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Iterator

from stepserve.core.events import InstanceStopped, InstanceUp
from stepserve.core.ids import InstanceId
from stepserve.core.instance import InstanceSpec

from .instance import Instance
from .messages import Delivery, InstanceOutput
from .transport import BuildInstance, OutputSink

logger = logging.getLogger(__name__)


class _Host(threading.Thread):
    """One incarnation of one instance.

    ``killed`` makes it fall silent, as a crash would. ``retiring``: it was asked to end and
    will announce that; ``stopped``: it did.
    """

    def __init__(
        self, spec: InstanceSpec, incarnation: int, build: BuildInstance, sink: OutputSink
    ) -> None:
        super().__init__(name=f"{spec.id}.{incarnation}", daemon=True)
        self.spec = spec
        self.incarnation = incarnation
        self.inbox: queue.SimpleQueue[Delivery | None] = queue.SimpleQueue()
        self.killed = threading.Event()
        self.retiring = self.stopped = False
        self.busy_since_s: float | None = None
        self._build = build
        self._sink = sink

    def run(self) -> None:
        try:
            with self._busy():
                instance = self._build(self.spec, self.incarnation)
            up = InstanceUp(self.spec)
            self._say(InstanceOutput(self.spec.id, self.incarnation, events=(up,)))
            logger.info("instance %s is up", self.name)
            with contextlib.closing(instance):
                self._serve(instance)
            if self.retiring and not self.killed.is_set():
                self.stopped = True
                gone = InstanceStopped(self.spec)
                self._say(InstanceOutput(self.spec.id, self.incarnation, events=(gone,)))
        except Exception:
            logger.exception("instance %s died", self.name)

    def _serve(self, instance: Instance) -> None:
        """Deliveries first; a batch runs whenever one waits."""
        while not self.killed.is_set():
            try:
                delivery = self.inbox.get(block=not instance.has_batch)
            except queue.Empty:
                with self._busy():
                    output = instance.run_batch()
            else:
                if delivery is None:
                    return
                with self._busy():
                    output = instance.receive(delivery)
            self._say(output)

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        """Marks the time of whatever may hang."""
        self.busy_since_s = time.monotonic()
        yield
        self.busy_since_s = None

    def _say(self, output: InstanceOutput) -> None:
        said = output.steps or output.events or output.peers or output.later
        if said and not self.killed.is_set():
            self._sink(output)


class LocalTransport:
    """A ``Transport`` of threads."""

    def __init__(self, build: BuildInstance, sink: OutputSink, hang_s: float) -> None:
        """``hang_s``: an instance that is busy with one thing for longer than this hangs."""
        self.build = build
        self._sink = sink
        self._hang_s = hang_s
        self._hosts: dict[InstanceId, _Host] = {}
        self._incarnations: dict[InstanceId, int] = {}
        self._closed = False

    def start(self, spec: InstanceSpec) -> None:
        """See ``Transport.start``."""
        if self._closed:
            return
        incarnation = self._incarnations.get(spec.id, -1) + 1
        self._incarnations[spec.id] = incarnation
        host = _Host(spec, incarnation, self.build, self._sink)
        self._hosts[spec.id] = host
        host.start()

    def stop(self, spec: InstanceSpec) -> None:
        """See ``Transport.stop``. A lost instance is found by ``lost``, as ever."""
        host = self._hosts.get(spec.id)
        if host is not None:
            host.retiring = True
            host.inbox.put(None)

    def deliver(self, instance: InstanceId, delivery: Delivery) -> None:
        """See ``Transport.deliver``."""
        host = self._hosts.get(instance)
        if host is not None:
            host.inbox.put(delivery)

    def current(self, output: InstanceOutput) -> bool:
        """Whether the output comes from an incarnation that is still trusted."""
        host = self._hosts.get(output.instance)
        return host is not None and host.incarnation == output.incarnation

    def lost(self) -> tuple[InstanceSpec, ...]:
        """See ``Transport.lost``."""
        now_s = time.monotonic()
        gone = []
        for host in self._hosts.values():
            since_s = host.busy_since_s
            hangs = since_s is not None and now_s - since_s > self._hang_s
            if hangs or not (host.is_alive() or host.stopped):
                gone.append(host.spec)
        for spec in gone:
            self._hosts.pop(spec.id).killed.set()
        return tuple(gone)

    def kill(self, instance: InstanceId) -> None:
        """Make an instance vanish without a word, as a crash would (for drills and tests)."""
        host = self._hosts[instance]
        host.killed.set()
        host.inbox.put(None)

    def close(self) -> None:
        """See ``Transport.close``. An instance that hangs is left behind."""
        self._closed = True
        hosts = list(self._hosts.values())
        for host in hosts:
            host.inbox.put(None)
        for host in hosts:
            host.join(self._hang_s)
        self._hosts.clear()

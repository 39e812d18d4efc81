"""Instances as threads of this process: for tests, and inside a process of an instance.

PyTorch releases the interpreter lock inside its kernels only. Small models spend most of their time
outside, so two instances in one process slow each other down: serve with processes. A thread that
raises, that is killed, or that is absurdly long at one thing is a lost instance.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator

from stepserve.core.events import InstanceStopped, InstanceUp
from stepserve.core.instance import InstanceSpec

from .instance import Instance
from .messages import Delivery, InstanceOutput
from .transport import Hosts, OutputSink

logger = logging.getLogger(__name__)

BuildInstance = Callable[[InstanceSpec, int], Instance]
"""Makes an instance (spec, incarnation); called on the thread that it will live on."""


class InstanceThread(threading.Thread):
    """One incarnation of one instance, as a thread.

    ``killed`` makes it fall silent, as a crash would. ``retiring``: it was asked to end and
    will announce that; ``stopped``: it did.
    """

    def __init__(
        self, spec: InstanceSpec, incarnation: int, build: BuildInstance, sink: OutputSink
    ) -> None:
        super().__init__(name=f"{spec.id}.{incarnation}", daemon=True)
        self.spec = spec
        self.incarnation = incarnation
        self._inbox: queue.SimpleQueue[Delivery | None] = queue.SimpleQueue()
        self._killed = threading.Event()
        self._retiring = self._stopped = False
        self._busy_since_s: float | None = None
        self._build = build
        self._sink = sink

    def run(self) -> None:
        """The thread: build the instance, serve until told to end."""
        try:
            with self._busy():
                instance = self._build(self.spec, self.incarnation)
            up = InstanceUp(self.spec)
            self._say(InstanceOutput(self.spec.id, self.incarnation, events=(up,)))
            logger.info("instance %s is up (start %d)", self.spec.id, self.incarnation + 1)
            with contextlib.closing(instance):
                self._serve(instance)
            if self._retiring and not self._killed.is_set():
                self._stopped = True
                gone = InstanceStopped(self.spec)
                self._say(InstanceOutput(self.spec.id, self.incarnation, events=(gone,)))
        except Exception:
            logger.exception("instance %s died", self.name)

    def _serve(self, instance: Instance) -> None:
        """Deliveries first; a batch runs whenever one waits."""
        while not self._killed.is_set():
            try:
                delivery = self._inbox.get(block=not instance.has_batch)
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
        self._busy_since_s = time.monotonic()
        yield
        self._busy_since_s = None

    def _say(self, output: InstanceOutput) -> None:
        said = output.steps or output.events or output.peers or output.later
        if said and not self._killed.is_set():
            self._sink(output)

    def deliver(self, delivery: Delivery) -> None:
        """See ``Host.deliver``."""
        self._inbox.put(delivery)

    def retire(self, announce: bool) -> None:
        """See ``Host.retire``."""
        self._retiring = announce
        self._inbox.put(None)

    def kill(self) -> None:
        """See ``Host.kill``."""
        self._killed.set()
        self._inbox.put(None)

    def is_lost(self, hang_s: float) -> bool:
        """See ``Host.is_lost``."""
        since_s = self._busy_since_s
        hangs = since_s is not None and time.monotonic() - since_s > hang_s
        return hangs or not (self.is_alive() or self._stopped)


class LocalTransport(Hosts):
    """A ``Transport`` of threads."""

    def __init__(self, build: BuildInstance, sink: OutputSink, hang_s: float) -> None:
        self.build = build
        super().__init__(lambda spec, number: InstanceThread(spec, number, build, sink), hang_s)

"""Instances in processes of their own, each behind one connection.

Who starts and ends the processes is not known here: see ``transport_ray``.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from stepserve.core.events import GlobalEvent, InstanceStopped, InstanceUp, SegmentEnded
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.instance import InstanceSpec
from stepserve.core.protocols import StepPredictor
from stepserve.core.request import Request

from .kv_links import KvAddress
from .messages import Delivery, Present
from .recording import Listener
from .remote import Peers, Retire, Turn
from .transport import Hosts, OutputSink
from .wire import Carrier, Link

logger = logging.getLogger(__name__)

CONNECT_S = 300.0
"""How long a process may take to start and connect, whatever it promises."""


class Process(Protocol):
    """A process with a ``RemoteInstance``, not started yet."""

    def connect(self) -> Carrier:
        """Start it and connect to it. Raises what stands in the way, in bounded time."""
        ...

    def lives(self) -> bool:
        """False once it is known to have ended."""
        ...

    def kill(self) -> None:
        """End it and free what it held; any number of times, from any thread. May wait."""
        ...


Launch = Callable[[InstanceSpec, int], Process]
"""Gives the process of an incarnation (spec, its number)."""


class RemoteHost(threading.Thread):
    """One incarnation of one instance: starts its process, then takes what it says."""

    def __init__(
        self,
        spec: InstanceSpec,
        incarnation: int,
        process: Process,
        take: Callable[["RemoteHost", Any], None],
    ) -> None:
        super().__init__(name=f"{spec.id}.{incarnation}", daemon=True)
        self.spec = spec
        self.incarnation = incarnation
        self._stopped = False
        self._requests: dict[RequestId, Request] = {}
        self._process = process
        self._take = take
        self._link: Link | None = None
        self._given_up = False
        self.present: Present | None = None  # what it said when it was connected to
        self._begun_s = time.monotonic()

    def run(self) -> None:
        """The thread: connect, listen until the connection ends."""
        try:
            carrier = self._process.connect()
            self._link = Link(carrier, lambda item: self._take(self, item), self.name)
            if self._given_up:
                self._link.close()
            self._link.run()
        except Exception:
            if self._given_up:  # which is what it failed on
                logger.debug("instance %s was given up", self.name, exc_info=True)
            else:
                logger.exception("instance %s cannot be reached", self.name)
        finally:
            self._end_process()

    def _end_process(self) -> None:
        try:
            self._process.kill()
        except Exception:
            logger.exception("the process of instance %s may go on", self.name)

    def request(self, named: Request | RequestId) -> Request | None:
        """The request of a learned step; ``None``: only a control loop before this one knew it."""
        if isinstance(named, Request):
            self._requests[named.id] = named
            return named
        return self._requests.get(named)

    def note(self, event: GlobalEvent) -> None:
        """Take notice of what it says of itself."""
        match event:
            case InstanceUp():
                logger.info("instance %s is up (start %d)", self.spec.id, self.incarnation + 1)
            case InstanceStopped():
                self._stopped = True
            case SegmentEnded():
                self._requests.pop(event.segment.request_id, None)

    def send(self, item: object) -> None:
        """Send it something; nothing happens if it is gone, or not there yet."""
        if self._link is not None:
            self._link.send(item)

    def deliver(self, delivery: Delivery) -> None:
        """See ``Host.deliver``."""
        self.send(delivery)

    def retire(self, announce: bool) -> None:
        """See ``Host.retire``. What is still being started ends at once."""
        if self._link is None:
            self.kill()
        self.send(Retire(announce))

    def kill(self) -> None:
        """See ``Host.kill``. What ends the process may wait for a cluster: nobody waits for it."""
        self._given_up = True
        if self._link is not None:
            self._link.close()
        if self.is_alive():  # else it was its last act
            threading.Thread(
                target=self._end_process, name=f"{self.name}.kill", daemon=True
            ).start()

    def is_lost(self, hang_s: float) -> bool:
        """See ``Host.is_lost``. The process itself judges how long it is at one thing.

        If it has ended, its last words may still be on their way.
        """
        silence_s = hang_s if self._process.lives() else 0.0
        if self._link is None:
            broken = time.monotonic() - self._begun_s > CONNECT_S
        else:
            broken = self._link.is_broken(silence_s)
        return not self._stopped and (broken or not self.is_alive())


class RemoteTransport(Hosts):
    """A ``Transport`` of processes."""

    def __init__(
        self,
        launch: Launch,
        sink: OutputSink,
        listeners: Sequence[Listener],
        predictor: StepPredictor,
        hang_s: float,
    ) -> None:
        """``listeners`` hear of, and ``predictor`` learns from, all that instances did."""
        super().__init__(
            lambda spec, number: RemoteHost(spec, number, launch(spec, number), self._take), hang_s
        )
        self._sink = sink
        self._listeners = listeners
        self._predictor = predictor
        self._lock = threading.Lock()
        self._addresses: dict[InstanceId, KvAddress] = {}

    def count_from(self, incarnations: Mapping[InstanceId, int]) -> None:
        """Go on with the numbers that a control loop before this one has given."""
        self._incarnations.update(incarnations)

    def adopt(self, spec: InstanceSpec, incarnation: int) -> None:
        """Host an instance whose process a control loop before this one had started."""
        self._incarnations[spec.id] = incarnation - 1
        self.start(spec)

    def present(self) -> dict[InstanceId, Present | None]:
        """What each said of itself when it was connected to; ``None``: it is not, yet."""
        hosts = self._hosts.items()
        return {name: host.present for name, host in hosts if isinstance(host, RemoteHost)}

    def _take(self, host: RemoteHost, item: Any) -> None:
        """From an instance, on the thread of its host."""
        match item:
            case KvAddress():
                self._introduce(host, item)
            case Present():
                host.present = item
            case Turn(output, handled, learned):
                for call in handled:
                    for listen in self._listeners:
                        listen(call)
                for named, progress, outcome, step in learned:
                    request = host.request(named)
                    if request is not None:
                        self._predictor.learn(request, progress, outcome, step)
                if output is not None:
                    for event in output.events:
                        host.note(event)
                    self._sink(output)

    def _introduce(self, host: RemoteHost, address: KvAddress) -> None:
        """Tell every instance where the new one is, and it where they are."""
        with self._lock:
            self._addresses[host.spec.id] = address
            peers = Peers(dict(self._addresses))
            for other in [host, *self._hosts.values()]:
                assert isinstance(other, RemoteHost)
                other.send(peers)

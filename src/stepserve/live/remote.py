"""An instance in a process of its own: what lives there, beside its executor.

It listens for the one connection of the control loop's process and ends with it; or, where it is
told to, goes on for a while and waits for the next control loop.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepserve.core.events import (
    ChunkLanded,
    HandoverAcknowledged,
    HandoverPrepared,
    InstanceUp,
    SegmentEnded,
)
from stepserve.core.forecast import StepForecast
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.instance import InstanceSpec
from stepserve.core.payload import KvChunk
from stepserve.core.protocols import StepPredictor
from stepserve.core.request import Progress, Request
from stepserve.core.step import Step, StepOutcome

from .connections import Address, Listener
from .instance import Instance
from .instance_factory import InstanceFactory, make_engine
from .kv_links import KvAddress, KvLinks
from .messages import Delivery, InstanceOutput, Present, StepRecord
from .recording import Handled
from .transport_local import InstanceThread
from .wire import LOOK_S, Carrier, Link

logger = logging.getLogger(__name__)

LearnedStep = tuple[Request | RequestId, Progress, StepOutcome, Step]
"""Arguments of ``StepPredictor.learn``. A request is told once until its segment ends."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What an instance says, and what came up since it last did: for listeners and predictor."""

    output: InstanceOutput | None
    handled: Sequence[Handled]
    learned: Sequence[LearnedStep]


@dataclass(frozen=True, slots=True)
class Peers:
    """Where keys and values can be sent to. Known before any of these is heard of otherwise."""

    addresses: Mapping[InstanceId, KvAddress]


@dataclass(frozen=True, slots=True)
class Retire:
    """End after the running batch; ``announce``: and say so."""

    announce: bool


class RemotePredictor:
    """A predictor that learns from the steps of one instance, and hands them on."""

    def __init__(self, predictor: StepPredictor) -> None:
        self._predictor = predictor
        self._learned: list[LearnedStep] = []
        self._told: set[RequestId] = set()

    def remaining_steps(
        self, request: Request, progress: Progress, thresholds: Sequence[float]
    ) -> StepForecast:
        """See ``StepPredictor.remaining_steps``."""
        return self._predictor.remaining_steps(request, progress, thresholds)

    def learn(self, request: Request, progress: Progress, outcome: StepOutcome, step: Step) -> None:
        """See ``StepPredictor.learn``."""
        self._predictor.learn(request, progress, outcome, step)
        named = request.id if request.id in self._told else request
        self._told.add(request.id)
        self._learned.append((named, progress, outcome, step))

    def forget_told(self) -> None:
        """Nobody knows any request: what was learned for somebody who is gone is dropped."""
        self._learned, self._told = [], set()

    def take_learned(self, ended: Sequence[RequestId]) -> list[LearnedStep]:
        """All learned steps since the last time; then segments of some requests ended."""
        learned, self._learned = self._learned, []
        self._told.difference_update(ended)
        return learned


class RemoteInstance:
    """Hosts one incarnation of one instance for a control loop in another process."""

    def __init__(
        self,
        factory: InstanceFactory,
        spec: InstanceSpec,
        incarnation: int,
        node: str = "",
        host: str = "127.0.0.1",
        *,
        outlives: bool = False,
    ) -> None:
        """``node``: what instances that share its memory call this machine.

        ``host``: its address among the nodes. ``outlives``: it is served by ``serve_all``, so
        that a control loop that is gone does not end it.
        """
        self._factory = factory
        self._engine = make_engine(factory.config)
        self._accepting = None if outlives else Listener(host)
        self._keeps, self._retired = outlives, False
        self._predictor = RemotePredictor(factory.predictor(self._engine.facts))
        self._handled: list[Handled] = []
        self._chunk_bytes = _most_bytes(factory, spec)
        self._kv = KvLinks(node, host if self._chunk_bytes else "", self._landed)
        self._offset_s = 0.0  # from this machine's clock to the control loop's
        self._lock = threading.Lock()  # of what follows, which two threads use
        self._link: Link | None = None
        self._up = False
        self._steps: dict[RequestId, list[StepRecord]] = {}  # of segments that are here
        self._unsaid: list[InstanceOutput] = []  # while no control loop is there
        self._host = InstanceThread(spec, incarnation, self._build, self._say)

    @property
    def address(self) -> Address:
        """Where the control loop finds it, unless ``serve_all`` is told."""
        assert self._accepting is not None, "it does not outlive its control loop"
        return self._accepting.address

    def run(self) -> None:
        """Serve the control loop until it ends the connection, or this instance has ended."""
        assert self._accepting is not None, "it does not outlive its control loop"
        carrier, self._offset_s = self._accepting.wait()
        self.serve(carrier)

    def serve(self, carrier: Carrier) -> None:
        """As ``run``, over a connection that is there. Nobody else can connect any more."""
        if self._accepting is not None:
            self._accepting.close()
        try:
            self._serve(carrier)
        finally:
            self._end()

    def serve_all(self, next_carrier: Callable[[], Carrier | None]) -> None:
        """Serve one control loop after another, until one retires this instance or none comes."""
        try:
            while (carrier := next_carrier()) is not None:
                self._serve(carrier)
                if self._retired or not self._host.is_alive():
                    break
        finally:
            self._end()

    def _serve(self, carrier: Carrier) -> None:
        link = Link(carrier, self._take, self._host.name)
        with self._lock:
            link.send(self._kv.address)
            link.send(self._present())
            self._predictor.forget_told()
            for output in self._unsaid:
                link.send(Turn(output, (), ()))
            self._unsaid.clear()
            self._link = link
        if self._host.ident is None:
            self._host.start()
        threading.Thread(target=self._watch, args=(link,), name="watch", daemon=True).start()
        try:
            link.run()
        finally:
            with self._lock:
                self._link = None

    def _present(self) -> Present:
        steps = tuple(step for steps in self._steps.values() for step in steps)
        for output in self._unsaid:
            for event in output.events:
                if isinstance(event, SegmentEnded):
                    self._steps.pop(event.segment.request_id, None)
        return Present(self._host.spec, self._up, steps)

    def _end(self) -> None:
        self._host.kill()
        self._kv.close()

    def _now_s(self) -> float:
        return time.monotonic() + self._offset_s

    def _build(self, spec: InstanceSpec, incarnation: int) -> Instance:
        return self._factory.instance(
            self._engine, spec, incarnation, self._predictor, self._now_s, [self._handled.append]
        )

    def _take(self, item: Any) -> None:
        """From the control loop."""
        match item:
            case Delivery():
                self._host.deliver(item)
            case Peers():
                self._kv.peers = item.addresses
            case Retire():
                self._retired = True
                self._host.retire(item.announce)

    def _landed(self, chunk: KvChunk) -> None:
        event = ChunkLanded(chunk.request_id, chunk.epoch, chunk.start, chunk.stop)
        self._host.deliver(Delivery(event, chunk=chunk))

    def _say(self, output: InstanceOutput | None) -> None:
        """On the instance's thread: chunks go to their peers, all else to the control loop."""
        ended: list[RequestId] = []
        if output is not None:
            peers = tuple(told for told in output.peers if self._tell(*told))
            for event in output.events:
                if isinstance(event, SegmentEnded):  # one that leads on, leads to the next epoch
                    self._kv.forget(event.segment.request_id, event.segment.epoch + 1)
                    ended.append(event.segment.request_id)
            output = dataclasses.replace(output, peers=peers)
        handled = list(self._handled)
        self._handled.clear()
        with self._lock:
            if output is not None and self._keeps:
                self._keep(output, ended)
            if self._link is not None:
                learned = self._predictor.take_learned(ended)
                self._link.send(Turn(output, handled, learned))

    def _keep(self, output: InstanceOutput, ended: Sequence[RequestId]) -> None:
        """Remember what the next control loop will have to hear."""
        self._up |= any(isinstance(event, InstanceUp) for event in output.events)
        for step in output.steps:
            self._steps.setdefault(step.step.request_id, []).append(step)
        if self._link is None:
            self._unsaid.append(dataclasses.replace(output, steps=(), peers=()))
            return
        for request_id in ended:
            self._steps.pop(request_id, None)

    def _tell(self, to: InstanceId, delivery: Delivery) -> bool:
        """Whether the control loop shall pass it on."""
        if delivery.chunk is not None:
            self._kv.push(to, delivery.chunk)
            return False
        match delivery.event:
            case HandoverPrepared(request_id, epoch, _):
                self._kv.prepare(to, request_id, epoch, self._chunk_bytes)
            case HandoverAcknowledged(request_id, epoch):
                self._kv.forget(request_id, epoch)
        return True

    def _watch(self, link: Link) -> None:
        """End the connection when the instance ends, hangs, or cannot hear any more."""
        hang_s = self._factory.config.hang_s
        while self._host.is_alive() and not link.is_broken(hang_s):
            if self._host.is_lost(hang_s):
                logger.error("instance %s hangs", self._host.name)
                break
            self._host.join(LOOK_S)
        else:
            self._say(None)
        link.close()


def _most_bytes(factory: InstanceFactory, spec: InstanceSpec) -> int:
    """The keys and values of a full instance; 0 for a model that hands none over."""
    link = factory.setup.link
    tokens = spec.page_capacity * spec.page_tokens
    return 0 if link is None else int(tokens * link.bytes_per_token)

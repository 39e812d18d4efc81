"""Carries out what local schedulers ask of each other: messages, copies, timers.

A message to a peer takes as long as any other, in order per pair, and arrives even if its
sender is lost meanwhile. A chunk of keys and values takes its way over ``Links``; one that has
not wholly left a lost instance is lost, too. A message or chunk is for the incarnation that was
there when it was sent. A timer is of its instance alone.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

from stepserve.core.actions import LocalAction, PushChunk, StartTimer, Tell
from stepserve.core.events import ChunkLanded, HandedOff, HandoverAcknowledged, LocalEvent
from stepserve.core.ids import InstanceId, RequestId

from .delays import Delays
from .faults import Faults
from .instance import ANSWER, MESSAGE, Instance
from .links import Links
from .record import RequestRecord


class KvCopies(Protocol):
    """Executors, all together, whose requests can move with their keys and values."""

    def export_kv(self, instance: InstanceId, request_id: RequestId, start: int, stop: int) -> None:
        """Positions ``[start, stop)`` are copied from an instance; they must be computed."""
        ...

    def import_kv(self, instance: InstanceId, request_id: RequestId, start: int, stop: int) -> None:
        """A copy of ``[start, stop)`` is written on an instance."""
        ...


class Driver(Protocol):
    """What transfers need of the world they happen in."""

    now_s: float
    instances: dict[InstanceId, Instance]
    records: dict[RequestId, RequestRecord]
    delays: Delays
    faults: Faults

    def at(
        self, when_s: float, priority: int, call: Callable[..., None], a: object, b: object = None
    ) -> None:
        """Have ``call(a, b)`` happen at a time that has not passed."""
        ...

    def tell_local(self, instance: Instance, event: LocalEvent) -> None:
        """Deliver an event, unless the instance is gone."""
        ...


class _Copy(NamedTuple):
    target: Instance
    landed: ChunkLanded


class Transfers:
    """What is under way between the instances of one world.

    ``chunks``, ``tokens``: copied so far; ``vanished``: chunks lost with an instance; ``stalled``:
    hand-overs that never began, because the other side did not say in time that it has room.
    """

    def __init__(
        self,
        executors: KvCopies,
        kv_bytes_per_token: float,
        links: "Links[_Copy] | None" = None,
        damaged: Callable[[], bool] = lambda: False,
    ) -> None:
        """``damaged``: whether the chunk that lands now has the wrong checksum."""
        self.links: Links[_Copy] = links or Links()
        self.kv_bytes_per_token = kv_bytes_per_token
        self.chunks = self.tokens = self.vanished = self.stalled = 0
        self._executors = executors
        self._damaged = damaged
        self._due_s = math.inf  # when the links are looked at next
        self._told_s: dict[tuple[InstanceId, InstanceId], float] = {}
        self._driver: Driver

    def attach(self, driver: Driver) -> None:
        """Belong to a world."""
        self._driver = driver

    @property
    def bytes_moved(self) -> float:
        """Keys and values copied so far."""
        return self.tokens * self.kv_bytes_per_token

    def carry(self, instance: Instance, action: LocalAction) -> None:
        """Do what the local scheduler of ``instance`` asks for."""
        match action:
            case Tell(to, event):
                self._tell(instance, to, event)
            case PushChunk():
                self._push(instance, action)
            case StartTimer(after_s, event):
                driver = self._driver
                driver.at(driver.now_s + after_s, ANSWER, driver.tell_local, instance, event)
            case _:
                raise AssertionError(f"nobody carries out {action}")

    def lost(self, instance: InstanceId) -> None:
        """What is on its way from or to an instance vanishes."""
        self.vanished += self.links.drop(self._driver.now_s, instance)
        self._look()

    def _tell(self, instance: Instance, to: InstanceId, event: LocalEvent) -> None:
        driver = self._driver
        now_s = driver.now_s
        if isinstance(event, HandedOff):
            driver.records[event.request_id].handed_off(now_s, event)
        elif isinstance(event, HandoverAcknowledged):
            driver.records[event.request_id].acknowledged(now_s, event)
        target = driver.instances.get(to)
        if target is None:
            return
        when_s = now_s + driver.delays.message_s
        if driver.faults.messages_vary:
            pair = instance.spec.id, to
            when_s = max(self._told_s.get(pair, 0.0), when_s + driver.faults.held_up_s())
            self._told_s[pair] = when_s
        driver.at(when_s, MESSAGE, driver.tell_local, target, event)

    def _push(self, instance: Instance, push: PushChunk) -> None:
        driver, source = self._driver, instance.spec.id
        to, request_id, epoch, start, stop, _ = push
        self._executors.export_kv(source, request_id, start, stop)
        target = driver.instances.get(to)
        if target is None:
            return
        self.chunks += 1
        self.tokens += stop - start
        copy = _Copy(target, ChunkLanded(request_id, epoch, start, stop))
        size_bytes = (stop - start) * self.kv_bytes_per_token
        self.links.push(driver.now_s, source, to, size_bytes, copy)
        self._look()

    def _look(self) -> None:
        """Be back when the next chunk is through."""
        next_s = self.links.next_s
        if next_s < self._due_s:
            self._due_s = next_s
            self._driver.at(next_s, ANSWER, self._sent, None)

    def _sent(self, _: object, __: object) -> None:
        """Chunks are through, unless the links turned out slower meanwhile."""
        driver = self._driver
        now_s = driver.now_s
        if now_s >= self._due_s:
            self._due_s = math.inf
        for copy in self.links.take(now_s):
            driver.at(now_s + self.links.rtt_s, MESSAGE, self._land, copy)
        self._look()

    def _land(self, copy: _Copy, _: object) -> None:
        target, landed = copy
        if not target.alive:
            return
        if self._damaged():
            request_id, epoch, start, stop = (
                landed.request_id,
                landed.epoch,
                landed.start,
                landed.stop,
            )
            landed = ChunkLanded(request_id, epoch, start, stop, intact=False)
        else:
            self._executors.import_kv(target.spec.id, landed.request_id, landed.start, landed.stop)
        self._driver.tell_local(target, landed)

"""The transport port: how the control loop reaches instances, wherever they live."""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from stepserve.core.ids import InstanceId
from stepserve.core.instance import InstanceSpec

from .messages import Delivery, InstanceOutput

logger = logging.getLogger(__name__)

FREE_S = 2.0
"""At the end, how long all that were killed may take to free what they hold."""

OutputSink = Callable[[InstanceOutput], None]
"""Takes an instance's output; called from any thread."""


class Transport(Protocol):
    """Hosts instances. Messages to one instance arrive in order, or the instance is lost."""

    def start(self, spec: InstanceSpec) -> None:
        """Host an instance; it announces itself with ``InstanceUp`` when it is ready."""
        ...

    def stop(self, spec: InstanceSpec) -> None:
        """Tear down an instance that holds nothing; it announces ``InstanceStopped`` at its end."""
        ...

    def deliver(self, instance: InstanceId, delivery: Delivery) -> None:
        """Send to an instance. Deliveries to a lost instance vanish."""
        ...

    def current(self, output: InstanceOutput) -> bool:
        """Whether the output comes from an incarnation that is still trusted."""
        ...

    def lost(self) -> tuple[InstanceSpec, ...]:
        """Instances that died or hang, each named once; their output is no longer accepted."""
        ...

    def close(self) -> None:
        """Stop every instance after the batch it is running, and start none any more."""
        ...


class Host(Protocol):
    """One incarnation of one instance, as a transport keeps it."""

    spec: InstanceSpec
    incarnation: int

    def start(self) -> None:
        """Begin, without waiting for anything."""
        ...

    def deliver(self, delivery: Delivery) -> None:
        """Send it something; nothing happens if it is gone."""
        ...

    def retire(self, announce: bool) -> None:
        """End after the batch it is running; ``announce``: with ``InstanceStopped``."""
        ...

    def kill(self) -> None:
        """End without a word, as a crash would. Does not wait for the end."""
        ...

    def is_lost(self, hang_s: float) -> bool:
        """Whether it ended otherwise than by retiring, or has made no progress for that long."""
        ...

    def join(self, timeout: float) -> None:
        """Wait for its end, ``timeout`` seconds at most."""
        ...


MakeHost = Callable[[InstanceSpec, int], Host]
"""Makes the host of an incarnation (spec, its number)."""


class Hosts:
    """A ``Transport`` over hosts of any kind: it knows which incarnation is the current one."""

    def __init__(self, make_host: MakeHost, hang_s: float) -> None:
        """``hang_s``: an instance that is busy with one thing for longer than this hangs."""
        self._make_host = make_host
        self._hang_s = hang_s
        self._hosts: dict[InstanceId, Host] = {}
        self._incarnations: dict[InstanceId, int] = {}
        self._closed = False

    def start(self, spec: InstanceSpec) -> None:
        """See ``Transport.start``."""
        if self._closed:
            return
        incarnation = self._incarnations.get(spec.id, -1) + 1
        self._incarnations[spec.id] = incarnation
        self._hosts[spec.id] = host = self._make_host(spec, incarnation)
        host.start()

    def stop(self, spec: InstanceSpec) -> None:
        """See ``Transport.stop``. A lost instance is found by ``lost``, as ever."""
        host = self._hosts.get(spec.id)
        if host is not None:
            host.retire(announce=True)

    def deliver(self, instance: InstanceId, delivery: Delivery) -> None:
        """See ``Transport.deliver``."""
        host = self._hosts.get(instance)
        if host is not None:
            host.deliver(delivery)

    def current(self, output: InstanceOutput) -> bool:
        """Whether the output comes from an incarnation that is still trusted."""
        host = self._hosts.get(output.instance)
        return host is not None and host.incarnation == output.incarnation

    def lost(self) -> tuple[InstanceSpec, ...]:
        """See ``Transport.lost``."""
        gone = tuple(h.spec for h in self._hosts.values() if h.is_lost(self._hang_s))
        for spec in gone:
            _kill(self._hosts.pop(spec.id))
        return gone

    def kill(self, instance: InstanceId) -> None:
        """Make an instance vanish without a word, as a crash would (for drills and tests)."""
        self._hosts[instance].kill()

    def close(self) -> None:
        """See ``Transport.close``. One that hangs is killed, or left behind where it cannot be."""
        self._closed = True
        hosts = list(self._hosts.values())
        for host in hosts:
            host.retire(announce=False)
        _join(hosts, self._hang_s)
        for host in hosts:
            _kill(host)
        _join(hosts, FREE_S)
        self._hosts.clear()


def _join(hosts: Iterable[Host], within_s: float) -> None:
    """Wait for the end of all of them, ``within_s`` in all."""
    until_s = time.monotonic() + within_s
    for host in hosts:
        host.join(max(0.0, until_s - time.monotonic()))


def _kill(host: Host) -> None:
    """Kill a host; whether that succeeds is no concern of those who are told that it is lost."""
    try:
        host.kill()
    except Exception:
        logger.exception("instance %s.%d cannot be killed", host.spec.id, host.incarnation)

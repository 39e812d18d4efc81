"""The transport port: how the control loop reaches instances, wherever they live."""

from collections.abc import Callable
from typing import Protocol

from stepserve.core.ids import InstanceId
from stepserve.core.instance import InstanceSpec

from .instance import Instance
from .messages import Delivery, InstanceOutput

BuildInstance = Callable[[InstanceSpec, int], Instance]
"""Makes an instance (spec, incarnation); called where the instance will live."""

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

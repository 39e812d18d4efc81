"""What can be seen of a cluster from outside its global scheduler."""

from dataclasses import dataclass
from enum import Enum

from stepserve.core.ids import RequestId
from stepserve.core.instance import InstanceSpec


class InstancePhase(Enum):
    """What an instance that is up does, as the global scheduler knows."""

    UP = "up"
    DRAINING = "draining"  # takes nothing new; running requests leave at their next cut
    STOPPING = "stopping"  # holds nothing, and is being torn down


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    """An instance that is up. ``running``: the requests placed there, in order."""

    spec: InstanceSpec
    phase: InstancePhase
    running: tuple[RequestId, ...]
    free_pages: int


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """A snapshot of all that drivers, operators and metrics may know of a global scheduler.

    ``queued``: requests that wait for room. ``caps``: the threshold cap of every unfinished
    request. ``changing``: the layout is being changed; ``forming``: an instance is being formed
    outside of such a change; ``recovering``: a new scheduler still asks what instances hold.
    """

    instances: tuple[InstanceStatus, ...]
    queued: int
    caps: tuple[float, ...]
    changing: bool
    forming: bool
    recovering: bool

    @property
    def running(self) -> int:
        """Requests that are placed on an instance."""
        return sum(len(instance.running) for instance in self.instances)

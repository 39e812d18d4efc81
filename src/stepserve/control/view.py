"""What the books of the global scheduler come to, for whoever looks from outside."""

from stepserve.core.status import ClusterStatus, InstanceStatus

from .ledger import ClaimKind, Ledger
from .reconfigure import Reconfiguration
from .recovery import Recovery


def status_of(
    ledger: Ledger, change: Reconfiguration, queued: int, recovery: Recovery | None
) -> ClusterStatus:
    """A snapshot."""
    return ClusterStatus(
        instances=tuple(
            InstanceStatus(i.spec, i.phase, tuple(i.held(ClaimKind.RUNNING)), i.free_pages)
            for i in ledger.instances.values()
        ),
        queued=queued,
        caps=tuple(state.cap for state in ledger.requests.values()),
        changing=change.under_way,
        forming=change.forming,
        recovering=recovery is not None,
    )

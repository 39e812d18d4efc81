"""What the global scheduler knows: every unfinished request, and what was promised where."""

from dataclasses import dataclass, field, replace

from stepserve.core.forecast import StepForecast
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.instance import ClusterView, InstanceLoad, InstanceReport, InstanceSpec
from stepserve.core.protocols import StepProgram
from stepserve.core.request import FinishReason, Progress, Request
from stepserve.core.segment import Segment

from .pages import PageLedger, pages_for


@dataclass(slots=True)
class Tracked:
    """One unfinished request.

    Without a forecast it waits for one; with a forecast and no segment it waits in the
    queue; with a segment it is resident on exactly that instance.
    """

    request: Request
    progress: Progress
    forecast: StepForecast | None = None
    segment: Segment | None = None
    epoch: int = 0
    cancelled: FinishReason | None = None
    late: bool = False  # its due time passed while it waited


@dataclass(slots=True)
class TrackedInstance:
    """One instance that is up, with reservations made for what was placed there."""

    spec: InstanceSpec
    report: InstanceReport
    pages: PageLedger
    placed: dict[RequestId, int] = field(default_factory=dict)  # full lengths
    resident_tokens: int = 0


class Ledger:
    """Requests, instances, and the reservations that tie them together."""

    def __init__(self, program: StepProgram) -> None:
        self._program = program
        self.requests: dict[RequestId, Tracked] = {}
        self.instances: dict[InstanceId, TrackedInstance] = {}

    def add_instance(self, spec: InstanceSpec, now_s: float) -> None:
        """An instance that holds nothing."""
        assert spec.id not in self.instances, "an instance comes up once before it is lost"
        report = InstanceReport(spec.id, now_s, now_s)
        self.instances[spec.id] = TrackedInstance(spec, report, PageLedger(spec.page_capacity))

    def pages(self, request: Request, spec: InstanceSpec) -> int:
        """KV pages that the request needs on an instance."""
        return pages_for(self._program.kv_tokens(request), spec.page_tokens)

    def assign(self, tracked: Tracked, segment: Segment) -> Segment:
        """Reserve what the segment needs under a new epoch; returns the stamped segment."""
        request, instance = tracked.request, self.instances[segment.instance]
        instance.pages.reserve(request.id, self.pages(request, instance.spec))
        tokens = self._program.full_tokens(request)
        instance.placed[request.id] = tokens
        instance.resident_tokens += tokens
        tracked.epoch += 1
        tracked.segment = replace(segment, epoch=tracked.epoch)
        return tracked.segment

    def unassign(self, tracked: Tracked) -> None:
        """Release what the current segment reserved; its epoch is over."""
        segment = tracked.segment
        assert segment is not None, "a request without a segment holds no reservation"
        tracked.segment = None
        instance = self.instances.get(segment.instance)
        if instance is not None:
            instance.pages.release(segment.request_id)
            instance.resident_tokens -= instance.placed.pop(segment.request_id)

    def view(self, request: Request, now_s: float) -> ClusterView:
        """The instances with room for the request, as policies see them."""
        loads = {
            load.spec.id: load
            for load in self.loads()
            if load.residents < load.spec.max_residents
            and load.free_pages >= self.pages(request, load.spec)
        }
        return ClusterView(now_s, loads)

    def loads(self) -> list[InstanceLoad]:
        """Every instance that is up, in the order they came up."""
        return [
            InstanceLoad(
                spec=instance.spec,
                residents=len(instance.placed),
                resident_tokens=instance.resident_tokens,
                free_pages=instance.pages.free,
                batch_ends_s=instance.report.batch_ends_s,
            )
            for instance in self.instances.values()
        ]

    def can_ever_hold(self, request: Request) -> bool:
        """Whether an empty instance could hold the request (true while none is up)."""
        specs = [instance.spec for instance in self.instances.values()]
        return not specs or any(self.pages(request, s) <= s.page_capacity for s in specs)

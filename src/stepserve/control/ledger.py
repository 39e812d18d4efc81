"""What the global scheduler knows: every unfinished request, and what was promised where."""

import bisect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from stepserve.core.actions import Send
from stepserve.core.events import SegmentReleased
from stepserve.core.forecast import StepForecast
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.instance import ClusterView, InstanceLoad, InstanceSpec, RunningReport, Work
from stepserve.core.protocols import StepProgram
from stepserve.core.request import FinishReason, Progress, Request
from stepserve.core.segment import ReleasePoint, Segment

from .pages import PageLedger, pages_for, segment_tokens

WorkOf = Callable[[Request, Progress, StepForecast, int | None], Work]
"""``AutoregressiveProgram.work``."""


@dataclass(slots=True)
class RequestState:
    """One unfinished request.

    Without a forecast it waits for one; with a forecast and no segment it waits in the queue;
    with a segment it runs on exactly that instance. ``successor`` is where it goes on once its
    instance lets it go at the next cut; room is reserved there, as it is for the ``planned``
    segments, which take over one after another.
    """

    request: Request
    progress: Progress
    forecast: StepForecast | None = None
    segment: Segment | None = None
    planned: tuple[Segment, ...] = ()
    successor: InstanceId | None = None
    cutting: bool = False  # its instance was asked to let it go
    epoch: int = 0  # the latest given to a segment
    losses: int = 0  # placements that ended with the loss of the instance
    cap: float = 1.0
    cancelled: FinishReason | None = None
    late: bool = False  # its deadline is infeasible, and it goes after those in time
    preemptible: bool = False  # late, and leaves its place to them; load control ignores it

    def ask_release(self, at: ReleasePoint, why: str) -> Send:
        """The message that takes the segment back; answered by ``SegmentEnded``."""
        assert self.segment is not None, "only a placed request can be released"
        self.cutting = True
        released = SegmentReleased(self.request.id, self.segment.epoch, at)
        return Send(self.segment.instance, released, why)


@dataclass(slots=True)
class InstanceState:
    """One instance that is up, with reservations made for what was placed there.

    ``departing`` are those of segments that are over as far as the request goes, with their
    epochs: the instance has yet to say that it let them go, and until then its pages are taken.
    """

    spec: InstanceSpec
    batch_ends_s: float  # as predicted when it began; its last report when idle
    pages: PageLedger
    placed: dict[RequestId, int] = field(default_factory=dict)  # full lengths
    expected: dict[RequestId, int] = field(default_factory=dict)  # for successors, or planned
    departing: dict[RequestId, tuple[int, int]] = field(default_factory=dict)
    running_tokens: int = 0
    draining: bool = False
    stopping: bool = False
    load: InstanceLoad | None = None  # as last worked out; None when something changed

    @property
    def rank(self) -> "Rank":
        """Its place among the others: the fewest running tokens first, ties by name."""
        return self.running_tokens, self.spec.id, self


Rank = tuple[int, InstanceId, InstanceState]


class Ledger:
    """Requests, instances, and the reservations that tie them together."""

    def __init__(
        self,
        program: StepProgram,
        running_tokens: int = 0,
        admitted_limit: int = 0,
        work: WorkOf | None = None,
    ) -> None:
        """``running_tokens``, ``admitted_limit``: see ``ControlConfig``; 0 is no limit.

        ``work``, if the program has it, fills ``InstanceLoad.work``.
        """
        self._program = program
        self._work = work
        self._running_tokens = running_tokens
        self._admitted_limit = admitted_limit
        self.requests: dict[RequestId, RequestState] = {}
        self.instances: dict[InstanceId, InstanceState] = {}
        self._ranks: list[Rank] = []  # of all instances, sorted
        self.admitted = 0  # requests that hold a segment

    def add_instance(self, spec: InstanceSpec, now_s: float) -> None:
        """An instance that holds nothing."""
        assert spec.id not in self.instances, "an instance comes up once before it is lost"
        instance = InstanceState(spec, now_s, PageLedger(spec.page_capacity))
        self.instances[spec.id] = instance
        bisect.insort(self._ranks, instance.rank)

    def remove_instance(self, instance: InstanceId) -> tuple[RequestState, ...]:
        """Forget an instance; returns the requests that were placed there, now without a place.

        Those that were to go on there stay where they are.
        """
        gone = self.instances.pop(instance, None)
        if gone is None:
            return ()
        self._ranks.remove(gone.rank)
        for request_id in gone.expected:
            self.requests[request_id].successor = None
        placed = tuple(self.requests[request_id] for request_id in gone.placed)
        for state in placed:
            self._leave(state)
        return placed

    def hear(self, running_requests: Iterable[RunningReport]) -> None:
        """Keep what an instance says of its running requests."""
        for row in running_requests:
            state = self.requests.get(row.request_id)
            if state is not None and state.segment is not None:
                if state.planned:
                    self.promote(state, row.epoch)
                if state.segment.epoch == row.epoch:
                    state.progress, state.forecast = row.progress, row.forecast
                    if self._work is not None:
                        self.instances[state.segment.instance].load = None

    def pages(self, request: Request, spec: InstanceSpec, stop: int | None = None) -> int:
        """KV pages that the request needs on an instance, up to a stop."""
        tokens = segment_tokens(self._program.kv_tokens(request), stop)
        return pages_for(tokens, spec.page_tokens)

    def assign(self, state: RequestState, segment: Segment, *further: Segment) -> None:
        """Reserve what the segments need under new epochs, which they are stamped with."""
        if state.successor == segment.instance:
            instance = self.instances[segment.instance]
            self._release(instance, instance.expected, state.request.id)
        state.successor = None
        rows = (segment, *further)
        epochs = range(state.epoch + 1, state.epoch + 1 + len(rows))
        state.epoch += len(rows)
        self.hold(state, *(replace(s, epoch=e) for s, e in zip(rows, epochs, strict=True)))

    def hold(self, state: RequestState, segment: Segment, *further: Segment) -> None:
        """Reserve what segments need that have their epochs."""
        instance = self.instances[segment.instance]
        self._reserve(instance, instance.placed, state.request, segment.stop)
        self.admitted += 1
        for planned in further:
            instance = self.instances[planned.instance]
            self._reserve(instance, instance.expected, state.request, planned.stop)
        state.segment, state.planned = segment, further

    def hold_departing(self, segment: Segment, request: Request) -> None:
        """Reserve what a segment needs that is nobody's, until its instance lets it go."""
        instance = self.instances[segment.instance]
        self._reserve(instance, instance.placed, request, segment.stop)
        self.depart(segment)

    def promote(self, state: RequestState, epoch: int) -> None:
        """The planned segment of that epoch runs, if there is one; those before it depart."""
        index = next((i for i, s in enumerate(state.planned) if s.epoch == epoch), None)
        if index is None:
            return
        self.admitted += state.segment is None
        for before in (state.segment, *state.planned[:index]):
            if before is not None:
                self.depart(before)
        segment, state.planned = state.planned[index], state.planned[index + 1 :]
        instance = self.instances[segment.instance]
        instance.placed[segment.request_id] = instance.expected.pop(segment.request_id)
        instance.load = None
        state.segment, state.cutting = segment, False

    def depart(self, segment: Segment) -> bool:
        """Keep its reservation until its instance lets it go; ``False`` if that one is lost."""
        instance, request_id = self.instances.get(segment.instance), segment.request_id
        if instance is None:
            return False
        held = instance.placed if request_id in instance.placed else instance.expected
        instance.departing[request_id] = segment.epoch, held.pop(request_id)
        instance.load = None
        return True

    def departed(self, segment: Segment) -> bool:
        """Take back what a departing segment reserved; ``False`` if it was not one."""
        instance, request_id = self.instances.get(segment.instance), segment.request_id
        held = instance and instance.departing.get(request_id)
        if not instance or not held or held[0] != segment.epoch:
            return False
        del instance.departing[request_id]
        instance.pages.release(request_id)
        self._add_tokens(instance, -held[1])
        return True

    def extend(self, state: RequestState, segment: Segment) -> bool:
        """Reserve what a segment needs without its stop; ``False`` if there is no room."""
        request, instance = state.request, self.instances[segment.instance]
        if not instance.pages.resize(request.id, self.pages(request, instance.spec)):
            return False
        held = instance.placed if request.id in instance.placed else instance.expected
        more = self._program.full_tokens(request) - held[request.id]
        held[request.id] += more
        self._add_tokens(instance, more)
        return True

    def expect(self, state: RequestState, instance_id: InstanceId) -> None:
        """Reserve room where a request is to go on."""
        instance = self.instances[instance_id]
        self._reserve(instance, instance.expected, state.request, None)
        state.successor = instance_id

    def forget_successor(self, state: RequestState) -> None:
        """Take back the room reserved where a request was to go on."""
        if state.successor is not None:
            instance = self.instances[state.successor]
            self._release(instance, instance.expected, state.request.id)
            state.successor = None

    def unassign(self, state: RequestState) -> None:
        """Release what the current segment reserved; its epoch is over."""
        segment = state.segment
        assert segment is not None, "a request without a segment holds no reservation"
        instance = self.instances[segment.instance]
        self._release(instance, instance.placed, segment.request_id)
        self._leave(state)

    def _reserve(
        self,
        instance: InstanceState,
        held: dict[RequestId, int],
        request: Request,
        stop: int | None,
    ) -> None:
        """Promise room to a request, under ``placed`` or ``expected``."""
        instance.pages.reserve(request.id, self.pages(request, instance.spec, stop))
        held[request.id] = tokens = segment_tokens(self._program.full_tokens(request), stop)
        self._add_tokens(instance, tokens)

    def _release(
        self, instance: InstanceState, held: dict[RequestId, int], request_id: RequestId
    ) -> None:
        """Take a promise back."""
        instance.pages.release(request_id)
        self._add_tokens(instance, -held.pop(request_id))

    def _add_tokens(self, instance: InstanceState, tokens: int) -> None:
        del self._ranks[bisect.bisect_left(self._ranks, instance.rank)]
        instance.running_tokens += tokens
        instance.load = None
        bisect.insort(self._ranks, instance.rank)

    def _leave(self, state: RequestState) -> None:
        state.segment = None
        state.cutting = False
        self.admitted -= 1

    def view(self, request: Request, now_s: float) -> ClusterView:
        """The instances with room for the request, as policies see them."""
        if self._admitted_limit and self.admitted >= self._admitted_limit:
            return ClusterView(now_s, {})
        return ClusterView(now_s, {load.spec.id: load for load in self.with_room(request)})

    def with_room(self, request: Request) -> Iterator[InstanceLoad]:
        """Instances with room for a request, those with the fewest running tokens first."""
        most, tokens = self._running_tokens, self._program.full_tokens(request)
        kv_tokens = self._program.kv_tokens(request)
        page_tokens = pages = 0
        for running_tokens, _, instance in self._ranks:
            if most and running_tokens and running_tokens + tokens > most:
                return  # nor has any further one
            spec = instance.spec
            if spec.page_tokens != page_tokens:  # the same of all instances, as a rule
                page_tokens = spec.page_tokens
                pages = pages_for(kv_tokens, page_tokens)
            if (
                not instance.draining
                and instance.pages.free >= pages
                and request.id not in instance.departing
            ):
                load = instance.load or self.load(instance)
                if load.running_requests < spec.max_running_requests:
                    yield load

    def loads(self) -> Iterable[InstanceLoad]:
        """Every instance that takes work, in the order they came up."""
        for instance in self.instances.values():
            if not instance.draining:
                yield instance.load or self.load(instance)

    def load(self, instance: InstanceState) -> InstanceLoad:
        """What was promised on an instance; worked out anew only when it changed."""
        if instance.load is None:
            instance.load = InstanceLoad(
                spec=instance.spec,
                running_requests=len(instance.pages),
                running_tokens=instance.running_tokens,
                free_pages=instance.pages.free,
                batch_ends_s=instance.batch_ends_s,
                work=() if self._work is None else tuple(self._works(instance)),
            )
        return instance.load

    def _works(self, instance: InstanceState) -> Iterator[Work]:
        """What is left of each segment placed or planned there."""
        assert self._work is not None, "asked for only if the program tells"
        for request_id in (*instance.placed, *instance.expected):
            state = self.requests[request_id]
            progress, forecast = state.progress, state.forecast
            for segment in (state.segment, *state.planned):
                if segment and forecast and segment.instance == instance.spec.id:
                    if segment is not state.segment:
                        progress = progress._replace(settled=segment.start)
                    yield self._work(state.request, progress, forecast, segment.stop)

    def load_without_leavers(self, instance: InstanceState) -> InstanceLoad:
        """The load once everybody has left who was asked to."""
        load = self.load(instance)
        leaving = [n for r, n in instance.placed.items() if self.requests[r].cutting]
        return load._replace(
            running_requests=load.running_requests - len(leaving),
            running_tokens=load.running_tokens - sum(leaving),
        )

    def can_ever_hold(self, request: Request) -> bool:
        """Whether an empty instance could hold the request (true while none is up)."""
        specs = (instance.spec for instance in self.instances.values())
        return not self.instances or self.fits_one_of(request, specs)

    def fits_one_of(self, request: Request, specs: Iterable[InstanceSpec]) -> bool:
        """Whether an empty instance of one of these kinds could hold the request."""
        return any(self.pages(request, spec) <= spec.page_capacity for spec in specs)

"""What the global scheduler knows: every unfinished request, and what was promised where."""

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum

from stepserve.core.actions import Send
from stepserve.core.errors import CapacityError
from stepserve.core.events import SegmentReleased
from stepserve.core.forecast import StepForecast
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.instance import ClusterView, InstanceLoad, InstanceSpec, RunningReport, Work
from stepserve.core.protocols import StepProgram
from stepserve.core.request import FinishReason, Progress, Request
from stepserve.core.segment import ReleasePoint, Segment
from stepserve.core.status import InstancePhase

from .lifecycle import INSTANCE, REQUEST, InstanceStep, RequestPhase, RequestStep, after
from .pages import pages_for, segment_tokens


@dataclass(slots=True)
class RequestState:
    """One unfinished request.

    With a ``segment`` it runs on exactly that instance. ``planned`` segments take over one after
    another (the second micro-request of DynaServe 3.1). ``migration_target`` is where the request
    goes on once its instance lets it go. Room is reserved for both.
    """

    request: Request
    progress: Progress
    phase: RequestPhase = RequestPhase.UNPLACED
    forecast: StepForecast | None = None
    segment: Segment | None = None
    planned: tuple[Segment, ...] = ()
    migration_target: InstanceId | None = None
    epoch: int = 0  # the latest given to a segment
    losses: int = 0  # placements that ended with the loss of the instance
    cap: float = 1.0
    cancelled: FinishReason | None = None
    infeasible: bool = False  # its deadline cannot be met: it goes after those in time
    preemptible: bool = False  # infeasible, and leaves its place to them; has no demand
    charged: tuple[InstanceSpec, float] | None = None  # machine seconds, on such an instance

    def move(self, step: RequestStep) -> None:
        """Take a step of its life. Raises LifecycleError for one that is not possible now."""
        self.phase = after(REQUEST, self.phase, step, self.request.id)

    def ask_release(self, at: ReleasePoint, why: str) -> Send:
        """The message that takes the segment back; answered by ``SegmentEnded``."""
        self.move(RequestStep.RELEASE)
        assert self.segment is not None, "a request that runs has a segment"
        released = SegmentReleased(self.request.id, self.segment.epoch, at)
        return Send(self.segment.instance, released, why)


class ClaimKind(Enum):
    """What room on an instance is promised for."""

    RUNNING = "running"
    PLANNED = "planned"  # a segment that will take over
    MIGRATION = "migration"  # a request that will be let go elsewhere
    LEAVING = "leaving"  # over as far as its request goes; its instance has yet to say so


@dataclass(frozen=True, slots=True)
class Claim:
    """A request's room on an instance: ``pages``, and one place. ``tokens`` is its full length.

    ``epoch``: of the segment that it is for; 0 of a migration, whose segment has none yet.
    """

    request_id: RequestId
    epoch: int
    pages: int
    tokens: int
    kind: ClaimKind


@dataclass(slots=True)
class InstanceState:
    """One instance that is up, with the claims on it: one for each request at most."""

    spec: InstanceSpec
    batch_ends_s: float  # as predicted when it began; its last report when idle
    free_pages: int
    phase: InstancePhase = InstancePhase.UP
    claims: dict[RequestId, Claim] = field(default_factory=dict)
    running_tokens: int = 0  # of all claims
    load: InstanceLoad | None = None  # as last worked out; None when something changed

    def move(self, step: InstanceStep) -> None:
        """Take a step of its life. Raises LifecycleError for one that is not possible now."""
        self.phase = after(INSTANCE, self.phase, step, self.spec.id)

    @property
    def rank(self) -> "Rank":
        """Its place among the others: the fewest running tokens first, ties by name."""
        return self.running_tokens, self.spec.id, self

    def held(self, *kinds: ClaimKind) -> list[RequestId]:
        """The requests with claims of these kinds: kind by kind, oldest claim first."""
        return [c.request_id for kind in kinds for c in self.claims.values() if c.kind is kind]


Rank = tuple[int, InstanceId, InstanceState]


class Ledger:
    """Requests, instances, and the claims that tie them together."""

    def __init__(
        self,
        program: StepProgram,
        running_tokens: int = 0,
        admitted_limit: int = 0,
        reads_work: bool = False,
    ) -> None:
        """``running_tokens``, ``admitted_limit``: see ``ControlConfig``; 0 is no limit.

        ``reads_work``: fill ``InstanceLoad.work``, for a placement that reads it.
        """
        self._program = program
        self._reads_work = reads_work
        self._running_tokens = running_tokens
        self._admitted_limit = admitted_limit
        self.requests: dict[RequestId, RequestState] = {}
        self.instances: dict[InstanceId, InstanceState] = {}
        self._ranks: list[Rank] = []  # of all instances, sorted
        self.admitted = 0  # requests that hold a segment

    def add_instance(self, spec: InstanceSpec, now_s: float) -> None:
        """An instance that holds nothing."""
        assert spec.id not in self.instances, "an instance comes up once before it is lost"
        instance = InstanceState(spec, now_s, spec.page_capacity)
        self.instances[spec.id] = instance
        bisect.insort(self._ranks, instance.rank)

    def remove_instance(self, instance: InstanceId) -> tuple[RequestState, ...]:
        """Forget an instance; returns the requests that ran there, now without a place.

        Those that were to go on there stay where they are.
        """
        gone = self.instances.pop(instance, None)
        if gone is None:
            return ()
        self._ranks.remove(gone.rank)
        for request_id in gone.held(ClaimKind.MIGRATION):
            self.requests[request_id].migration_target = None
        placed = tuple(self.requests[name] for name in gone.held(ClaimKind.RUNNING))
        for state in placed:
            self._leave(state)
        return placed

    def hear(self, reports: Iterable[RunningReport]) -> None:
        """Keep what an instance says of its running requests."""
        for row in reports:
            state = self.requests.get(row.request_id)
            if state is not None and state.segment is not None:
                if state.planned:
                    self.promote(state, row.epoch)
                if state.segment.epoch == row.epoch:
                    state.progress, state.forecast = row.progress, row.forecast
                    if self._reads_work:
                        self.instances[state.segment.instance].load = None

    def pages(self, request: Request, spec: InstanceSpec, stop: int | None = None) -> int:
        """KV pages that the request needs on an instance, up to a stop."""
        tokens = segment_tokens(self._program.kv_tokens(request), stop)
        return pages_for(tokens, spec.page_tokens)

    def assign(self, state: RequestState, segment: Segment, *further: Segment) -> None:
        """Claim what the segments need under new epochs, which they are stamped with."""
        self.cancel_migration(state)
        rows = (segment, *further)
        epochs = range(state.epoch + 1, state.epoch + 1 + len(rows))
        state.epoch += len(rows)
        self.hold(state, *(replace(s, epoch=e) for s, e in zip(rows, epochs, strict=True)))

    def hold(self, state: RequestState, segment: Segment, *further: Segment) -> None:
        """Claim what segments need that have their epochs."""
        self._claim(segment, state.request, ClaimKind.RUNNING)
        for planned in further:
            self._claim(planned, state.request, ClaimKind.PLANNED)
        self._place(state, RequestStep.PLACE, segment, further)

    def hold_leaving(self, segment: Segment, request: Request) -> None:
        """Claim what a segment needs that is nobody's, until its instance lets it go."""
        self._claim(segment, request, ClaimKind.LEAVING)

    def promote(self, state: RequestState, epoch: int) -> None:
        """The planned segment of that epoch runs, if there is one; those before it leave."""
        index = next((i for i, s in enumerate(state.planned) if s.epoch == epoch), None)
        if index is None:
            return
        for before in (state.segment, *state.planned[:index]):
            if before is not None:
                self.leave(before)
        segment = state.planned[index]
        self._change(self.instances[segment.instance], segment.request_id, ClaimKind.RUNNING)
        self._place(state, RequestStep.ADVANCE, segment, state.planned[index + 1 :])

    def _place(
        self,
        state: RequestState,
        step: RequestStep,
        segment: Segment,
        planned: tuple[Segment, ...],
    ) -> None:
        self.admitted += state.segment is None
        state.segment, state.planned = segment, planned
        state.move(step)

    def leave(self, segment: Segment) -> bool:
        """Keep its claim until its instance lets it go; ``False`` if that one is lost."""
        instance = self.instances.get(segment.instance)
        if instance is None:
            return False
        self._change(instance, segment.request_id, ClaimKind.LEAVING)
        return True

    def _change(self, instance: InstanceState, request_id: RequestId, kind: ClaimKind) -> None:
        """The claim is for something else from now on, and the youngest of its kind."""
        claim = instance.claims.pop(request_id)
        instance.claims[request_id] = replace(claim, kind=kind)
        instance.load = None

    def left(self, segment: Segment) -> bool:
        """Take back the claim of a leaving segment; ``False`` if it was not one."""
        instance = self.instances.get(segment.instance)
        claim = instance and instance.claims.get(segment.request_id)
        if not instance or not claim or claim.kind is not ClaimKind.LEAVING:
            return False
        if claim.epoch != segment.epoch:
            return False
        self._release(instance, segment.request_id)
        return True

    def extend(self, state: RequestState, segment: Segment) -> bool:
        """Claim what a segment needs without its stop; ``False`` if there is no room."""
        request, instance = state.request, self.instances[segment.instance]
        claim, pages = instance.claims[request.id], self.pages(request, instance.spec)
        if pages - claim.pages > instance.free_pages:
            return False
        tokens = self._program.full_tokens(request)
        instance.claims[request.id] = replace(claim, pages=pages, tokens=tokens)
        self._add(instance, pages - claim.pages, tokens - claim.tokens)
        return True

    def reserve_migration(self, state: RequestState, instance_id: InstanceId) -> None:
        """Claim room where a request is to go on."""
        target = Segment(state.request.id, 0, 0, None, instance_id, epoch=0)
        self._claim(target, state.request, ClaimKind.MIGRATION)
        state.migration_target = instance_id

    def cancel_migration(self, state: RequestState) -> None:
        """Take back the room claimed where a request was to go on."""
        if state.migration_target is not None:
            self._release(self.instances[state.migration_target], state.request.id)
            state.migration_target = None

    def unassign(self, state: RequestState) -> None:
        """Release what the current segment claimed; its epoch is over."""
        segment = state.segment
        assert segment is not None, "a request without a segment holds no claim"
        self._release(self.instances[segment.instance], segment.request_id)
        self._leave(state)

    def _claim(self, segment: Segment, request: Request, kind: ClaimKind) -> None:
        """Promise room to a request. Raises CapacityError where there is none."""
        instance, name = self.instances[segment.instance], request.id
        pages = self.pages(request, instance.spec, segment.stop)
        if name in instance.claims or pages > instance.free_pages:
            free = f"{instance.free_pages} free on {segment.instance}"
            raise CapacityError(f"{name} has a claim already, or needs {pages} pages: {free}")
        tokens = segment_tokens(self._program.full_tokens(request), segment.stop)
        instance.claims[name] = Claim(name, segment.epoch, pages, tokens, kind)
        self._add(instance, pages, tokens)

    def _release(self, instance: InstanceState, request_id: RequestId) -> None:
        """Take a promise back."""
        claim = instance.claims.pop(request_id)
        self._add(instance, -claim.pages, -claim.tokens)

    def _add(self, instance: InstanceState, pages: int, tokens: int) -> None:
        del self._ranks[bisect.bisect_left(self._ranks, instance.rank)]
        instance.free_pages -= pages
        instance.running_tokens += tokens
        instance.load = None
        bisect.insort(self._ranks, instance.rank)

    def _leave(self, state: RequestState) -> None:
        state.segment = None
        self.admitted -= 1
        state.move(RequestStep.LOSE_PLACE)

    def view(self, request: Request, now_s: float) -> ClusterView:
        """The instances with room for the request, as policies see them."""
        if self._admitted_limit and self.admitted >= self._admitted_limit:
            return ClusterView(now_s, {})
        return ClusterView(now_s, {load.spec.id: load for load in self.with_room(request)})

    def with_room(self, request: Request) -> Iterator[InstanceLoad]:
        """Instances with room for a request, those with the fewest running tokens first."""
        most, tokens = self._running_tokens, self._program.full_tokens(request)
        up = InstancePhase.UP
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
                instance.phase is up
                and instance.free_pages >= pages
                and request.id not in instance.claims
            ):
                load = instance.load or self.load(instance)
                if load.running_requests < spec.max_running_requests:
                    yield load

    def loads(self) -> Iterable[InstanceLoad]:
        """Every instance that takes work, in the order they came up."""
        for instance in self.instances.values():
            if instance.phase is InstancePhase.UP:
                yield instance.load or self.load(instance)

    def load(self, instance: InstanceState) -> InstanceLoad:
        """What was promised on an instance; worked out anew only when it changed."""
        if instance.load is None:
            instance.load = InstanceLoad(
                spec=instance.spec,
                running_requests=len(instance.claims),
                running_tokens=instance.running_tokens,
                free_pages=instance.free_pages,
                batch_ends_s=instance.batch_ends_s,
                work=tuple(self._works(instance)) if self._reads_work else (),
            )
        return instance.load

    def _works(self, instance: InstanceState) -> Iterator[Work]:
        """What is left of each segment placed or planned there."""
        for request_id in instance.held(ClaimKind.RUNNING, ClaimKind.PLANNED):
            state = self.requests[request_id]
            progress, forecast = state.progress, state.forecast
            for segment in (state.segment, *state.planned):
                if segment and forecast and segment.instance == instance.spec.id:
                    if segment is not state.segment:
                        progress = progress._replace(settled=segment.start)
                    yield self._program.work(state.request, progress, forecast, segment.stop)

    def load_without_leavers(self, instance: InstanceState) -> InstanceLoad:
        """The load once everybody has left who was asked to."""
        load = self.load(instance)
        leaving = [
            instance.claims[name].tokens
            for name in instance.held(ClaimKind.RUNNING)
            if self.requests[name].phase is RequestPhase.LEAVING
        ]
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

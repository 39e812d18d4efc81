"""The ports: what the control plane asks of the parts around it, and the policies' shapes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from stepserve.core.config import ControlConfig
from stepserve.core.forecast import StepForecast
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.instance import ClusterView, InstanceLoad, InstanceSpec, Link, Work
from stepserve.core.payload import KvChunk, Payload, SettledToken
from stepserve.core.request import Progress, Request
from stepserve.core.running import RunningRequest, StepPace
from stepserve.core.segment import ReleasePoint, Segment
from stepserve.core.step import Batch, Mix, Step, StepOutcome

Batches = Sequence[tuple[float, int, int, Mix | None]]
"""Kinds of batches: how many, their tokens, rows and mix."""


class StepProgram(Protocol):
    """The whole difference between model families that the schedulers see.

    ``chunked``: a heavy step may be run in parts (chunked prefill), and each light one is a token.
    """

    chunked: bool

    def start(self, request: Request) -> Progress:
        """Progress of a request that has run no step."""
        ...

    def thresholds(self, request: Request, grid: Sequence[float]) -> tuple[float, ...]:
        """The thresholds that steps of the request may run at, highest first."""
        ...

    def advance(self, request: Request, progress: Progress, outcome: StepOutcome) -> Progress:
        """Progress after one step with that outcome."""
        ...

    def next_step(
        self, request: Request, progress: Progress, has_state: bool, threshold: float | None
    ) -> Step:
        """The step that is due. Without state on the instance it must rebuild it (heavy)."""
        ...

    def resume(self, request: Request, progress: Progress) -> Progress:
        """Progress where no instance holds keys and values of the request any more."""
        ...

    def shorten(self, step: Step, tokens: int) -> Step | None:
        """The same heavy step over its first ``tokens`` only; ``None`` if it cannot be cut."""
        ...

    def mix(self, steps: Sequence[Step]) -> Mix | None:
        """What the batch is made of, where its time depends on more than its tokens."""
        ...

    def fuller_step(self, request: Request, progress: Progress, step: Step) -> Step | None:
        """A better heavy step that may stand in for the due ``step``, if there is one."""
        ...

    def tokens_to_cut(self, request: Request, progress: Progress) -> int:
        """Tokens to settle until the request may go on elsewhere at no extra work; 0: now."""
        ...

    def heavy_left(self, request: Request, progress: Progress, output_tokens: float) -> float:
        """Heavy steps still to come if the output ends at ``output_tokens``.

        An upper bound: no more of them than steps. Infinite if all steps are heavy.
        """
        ...

    def batches_left(
        self,
        request: Request,
        progress: Progress,
        forecast: StepForecast,
        index: int,
        running_requests: int,
    ) -> Batches:
        """What it has to run to its end at the ``index``-th threshold, among others like it."""
        ...

    def light_tokens(self, request: Request) -> int:
        """Tokens that a light step executes (the most, where it varies)."""
        ...

    def heavy_tokens(self, request: Request) -> int:
        """Tokens that a usual heavy step executes (the first may execute more)."""
        ...

    def full_tokens(self, request: Request) -> int:
        """Tokens that the largest step of this request executes: prompt and output canvas."""
        ...

    def work(
        self, request: Request, progress: Progress, forecast: StepForecast, stop: int | None
    ) -> Work:
        """What is left of ``[progress.settled, stop)``, to the expected end if ``stop`` is None."""
        ...

    def kv_tokens(self, request: Request) -> int:
        """Positions whose keys and values the request keeps on an instance between steps."""
        ...


class CostModel(Protocol):
    """Predicts how long a batch takes, and learns from what was measured.

    ``mix`` is ``StepProgram.mix`` of the batch. A model of autoregressive batches that is asked
    without it takes the tokens for one prefill.
    """

    def step_time_s(
        self, tokens: int, rows: int, spec: InstanceSpec, mix: Mix | None = None
    ) -> float:
        """Seconds of a batch that executes ``tokens`` in ``rows`` steps; 0 for no tokens."""
        ...

    def observe(
        self, tokens: int, rows: int, spec: InstanceSpec, seconds: float, mix: Mix | None = None
    ) -> None:
        """Take a measured batch into account. Called only while an event is handled."""
        ...


class SegmentCost(Protocol):
    """Predicts how long an instance is busy with what it holds (DynaServe 3.4)."""

    def seconds(self, held: Sequence[Work], added: Work | None, spec: InstanceSpec) -> float:
        """Seconds until everything is done, with ``added`` if given (T of DynaServe 3.5)."""
        ...

    def tbt_s(self, held: Sequence[Work], added: Work | None, spec: InstanceSpec) -> float:
        """Seconds of one batch of all decodes; 0 if nothing is to be decoded."""
        ...

    def transfer_s(self, tokens: int) -> float:
        """Seconds to copy the keys and values of so many tokens over an idle link."""
        ...


@dataclass(frozen=True, slots=True)
class Parts:
    """All that a policy may be given beside its options: what others are made of.

    ``control`` has the numbers that are everybody's. ``link``: what keys and values are copied
    over; ``segment_cost``: for placements that weigh segments. Both are autoregressive models'.
    """

    program: StepProgram
    cost: CostModel
    control: ControlConfig = field(default_factory=ControlConfig)
    link: Link | None = None
    segment_cost: SegmentCost | None = None

    def margin(self, own: float | None) -> float:
        """A policy's own share of a deadline to plan against, else everybody's."""
        return self.control.margin if own is None else own


class StepPredictor(Protocol):
    """Predicts remaining steps. Owned by the driver; schedulers ask by ``Predict``."""

    def remaining_steps(
        self, request: Request, progress: Progress, thresholds: Sequence[float]
    ) -> StepForecast:
        """Remaining steps at each threshold, for a request at this progress."""
        ...

    def learn(self, request: Request, progress: Progress, outcome: StepOutcome, step: Step) -> None:
        """Take one executed step into account; ``progress`` is from before it."""
        ...


class Placement(NamedTuple):
    """Segments that tile what is left of a request, in order.

    ``predicted_s``: seconds to the end of each, and ``tbt_s`` between tokens, where the policy
    predicts them; ``why``: the choice in short.
    """

    segments: tuple[Segment, ...]
    predicted_s: tuple[float, ...] = ()
    tbt_s: float | None = None
    why: str = ""


class PlacementPolicy(Protocol):
    """Chooses segments and instances.

    A policy with a true class attribute ``reads_work`` finds ``InstanceLoad.work`` filled; what
    nobody reads is not worked out.
    """

    def place(
        self, request: Request, progress: Progress, forecast: StepForecast, view: ClusterView
    ) -> Placement:
        """Segments on instances of the view, which has only those with room, and one at least.

        Epochs are left 0; the global scheduler stamps them.
        """
        ...


class MigrationPolicy(Protocol):
    """Chooses whether and where a running request should go on elsewhere; ``at``: and when."""

    at: ReleasePoint

    def target(
        self, request: Request, source: InstanceLoad, others: Iterator[InstanceLoad]
    ) -> InstanceId | None:
        """A better instance than ``source`` among the others with room, if there is one.

        The others come with the fewest running tokens first, ties by instance id, and are
        looked up as they are asked for: a policy that needs one does not pay for all.
        """
        ...


@dataclass(frozen=True, slots=True)
class Demand:
    """An unfinished request as load control sees it.

    ``done``: share of the output that is settled. ``heavy`` and ``light``: steps it still needs
    at each of ``thresholds`` (highest first), each of ``heavy_tokens`` or ``light_tokens``.
    ``least_s``: seconds below which no end is believed possible (DiLaServe B6, ``possible``).
    """

    request: Request
    done: float
    thresholds: tuple[float, ...]
    heavy: tuple[float, ...]
    light: tuple[float, ...]
    heavy_tokens: int
    light_tokens: int
    least_s: float

    @property
    def can_be_lowered(self) -> bool:
        """Whether a cap means anything to it: it has a deadline, and would rather keep that."""
        return not self.request.slo.pinned

    @property
    def tokens(self) -> tuple[float, ...]:
        """Tokens still to be executed at each threshold (``demand`` of DiLaServe B6)."""
        pairs = zip(self.heavy, self.light, strict=True)
        return tuple(h * self.heavy_tokens + n * self.light_tokens for h, n in pairs)


class CapPolicy(Protocol):
    """Load control: how high each request's threshold may be, given everybody's demand."""

    def caps(
        self, demands: Sequence[Demand], specs: Sequence[InstanceSpec], now_s: float
    ) -> list[float]:
        """One cap per demand, each of the demand's own thresholds."""
        ...


class BatchingPolicy(Protocol):
    """Chooses which running requests step together next, and foretells the pace of their steps."""

    def pace(self, running_requests: Sequence[RunningRequest], spec: InstanceSpec) -> StepPace:
        """Expected seconds of one heavy and one light step, if these running requests stay."""
        ...

    def compose(
        self, candidates: Sequence[tuple[RunningRequest, Step]], spec: InstanceSpec, now_s: float
    ) -> tuple[Step, ...]:
        """The steps to run now: a subset of the candidates, never empty if they are not."""
        ...


class ThresholdPolicy(Protocol):
    """Chooses the confidence threshold of a running request's next step."""

    def pick(self, running: RunningRequest, pace: StepPace, now_s: float) -> float:
        """One of ``running.forecast.thresholds``, none above ``running.cap`` if possible."""
        ...


class RefreshPolicy(Protocol):
    """Chooses where keys and values are computed anew although less was asked."""

    def upgrade(
        self,
        running_requests: Mapping[RequestId, RunningRequest],
        steps: tuple[Step, ...],
        pace: StepPace,
        spec: InstanceSpec,
        now_s: float,
    ) -> tuple[Step, ...]:
        """The steps of the batch, some in place of cheaper ones of the same requests."""
        ...


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What an executor returns: outcomes in the order of the steps, and the token values."""

    outcomes: tuple[StepOutcome, ...]
    settled: Mapping[RequestId, tuple[SettledToken, ...]]
    seconds: float


class Executor(Protocol):
    """Runs steps: a real engine, or predicted outcomes. Not a scheduler."""

    def add(
        self,
        request: Request,
        payload: Payload,
        progress: Progress,
        settled: Mapping[int, int],
    ) -> None:
        """Hold a request. ``settled`` maps output offsets to token ids already final."""
        ...

    def run(self, batch: Batch) -> BatchResult:
        """Run one batch. A row that fails is reported in its outcome; its neighbours go on."""
        ...

    def remove(self, request_id: RequestId) -> None:
        """Drop a request and free its pages. Unknown ids are ignored."""
        ...

    def close(self) -> None:
        """End what it started, such as processes; nothing is run any more."""
        ...


@runtime_checkable
class KvPages(Protocol):
    """An executor whose requests can move with their keys and values."""

    def export_kv(self, request_id: RequestId, epoch: int, start: int, stop: int) -> KvChunk:
        """A copy of positions ``[start, stop)``, which must be computed."""
        ...

    def import_kv(self, chunk: KvChunk) -> bool:
        """Write a chunk into the request's pages; ``False``, and nothing, if it is damaged."""
        ...

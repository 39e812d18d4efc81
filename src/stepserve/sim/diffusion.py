"""Diffusion models in simulation: step times by tokens, steps drawn from published counts,
accuracy by proxy. Or from a recorded run, or (a ``Load`` from outside) a real model in the loop.

Also trains the predictor on the same kind of requests, at fixed thresholds (DiLaServe B5),
with a seed of its own: it never saw the requests it is asked about.
"""

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepserve.core.config import Choice
from stepserve.core.errors import FieldError
from stepserve.core.ids import RequestId
from stepserve.core.instance import InstanceSpec
from stepserve.core.protocols import CostModel, StepPredictor
from stepserve.core.request import (
    SLO,
    CacheMode,
    DiffusionOptions,
    Family,
    OnMiss,
    RefreshScope,
    Request,
    ThresholdBounds,
)
from stepserve.cost.boosted_fit import train
from stepserve.cost.boosted_steps import StepModel
from stepserve.cost.features import training_rows
from stepserve.cost.forecast_parts import ForecastParts
from stepserve.cost.remaining_steps import PUBLISHED, Yields
from stepserve.cost.step_log import StepLog, read_step_logs
from stepserve.cost.step_table import StepProfile, StepProfiles, StepTable
from stepserve.families.assemble import make_planner
from stepserve.families.forecasts import make_forecast
from stepserve.families.programs.diffusion import DiffusionProgram

from .config import RequestOptions, Setting
from .datasets import DATASETS, SimRequest, poisson, published_run
from .executors import Executors, TraceExecutors
from .experiment import Experiment
from .known_steps import KnownSteps
from .outcomes import MEAN_STEPS, THRESHOLDS, RecordedCounts, TraceOutcomes
from .profiles import profiles
from .quality import ACCURACY_KIND, accuracy_proxy
from .record import DiffusionRecord, RequestRecord
from .recording import RECORDED, Recording
from .requests import base_s, draw, slo_classes, targets
from .results import mean, mean_threshold
from .simulation import Point, Row, Simulation, per_instance

KV_TOKENS = 120_000
"""Positions of keys and values beside the weights of one GPU: 80 GB less 16 GB, at 0.5 MB each
(DiLaServe C1)."""

TRAINING_SEED = 1_000_003
TRAINING_REQUESTS = 1_500
NO_END = 1e9
"""Output length of requests that never end by themselves: their limit is what counts."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is served: requests, what steps do to them, how answers are judged.

    ``yields``: what the plain predictor starts from. ``profiles``: step times by tensor-parallel
    degree on the usual hardware. ``accuracy``: mean over whole answers, 0..1, ``None`` without
    any; its kind is ``measured``, ``proxy``, or ``None`` where nothing is known.
    """

    requests: Sequence[Request]
    executors: Executors
    yields: Yields
    profiles: Mapping[int, StepProfile]
    accuracy: Callable[[Sequence[DiffusionRecord]], float | None] = lambda _: None
    accuracy_kind: str | None = None


MakeLoad = Callable[[Experiment, Point], Load]


def _proxy(
    model: str, dataset: str, points_lost: float, records: Sequence[DiffusionRecord]
) -> float | None:
    """Mean accuracy proxy; ``None`` where no accuracy was published.

    The price of a system's refresh options (``points_lost``) is for the refreshes left out.
    """
    try:
        values = [
            accuracy_proxy(
                model, dataset, r.use.losses, points_lost * r.skipped / max(1, r.cheap_openings)
            )
            for r in records
            if r.whole
        ]
    except FieldError:
        return None
    return mean(values)


def make_request(setting: Setting, options: RequestOptions, drawn: SimRequest, slo: SLO) -> Request:
    """A drawn request with the options of a system."""
    return Request(
        id=RequestId(str(drawn.index)),
        family=Family.DIFFUSION,
        model=setting.model,
        prompt_tokens=drawn.prompt_tokens,
        max_output_tokens=drawn.output_tokens,
        arrival_s=drawn.arrival_s,
        slo=slo,
        diffusion=DiffusionOptions(
            thresholds=ThresholdBounds(options.preferred, options.floor),
            block_tokens=setting.block_tokens,
            cache_mode=CacheMode(setting.cache_mode),
            refresh_blocks=options.refresh_blocks,
            refresh_scope=RefreshScope(options.refresh_scope),
        ),
    )


def make_load(experiment: Experiment, point: Point) -> Load:
    """The load of a point: the same requests and truths for every system."""
    if experiment.recording is not None:
        return _recorded_load(experiment, experiment.recording, point)
    setting, workload = experiment.setting, experiment.workload
    system = experiment.systems[point.chosen]
    drawn = draw(experiment, point.rate_per_s, point.seed)
    known = workload.name in DATASETS
    difficulty = published_run(setting.model, workload.name).difficulty if known else 1.0
    slos = targets(experiment, OnMiss(system.request.on_miss))
    chosen = slo_classes(experiment, point.seed, drawn)
    early = workload.early_stop
    ends = {r.index: r.answer_tokens for r in drawn} if early else {}
    return Load(
        requests=[
            make_request(setting, system.request, r, slos[slo_class])
            for r, slo_class in zip(drawn, chosen, strict=True)
        ],
        executors=TraceExecutors(TraceOutcomes(point.seed, difficulty=difficulty), ends.get),
        yields=_yields(difficulty, drawn, early),
        profiles={} if setting.hardware else profiles(_usual(experiment), setting.model),
        accuracy=functools.partial(
            _proxy, setting.model, workload.name, system.accuracy_points_lost
        ),
        accuracy_kind=ACCURACY_KIND,
    )


def _yields(difficulty: float, drawn: Sequence[SimRequest], early_stop: bool) -> Yields:
    per_step = {t: n / difficulty for t, n in PUBLISHED.tokens_per_step.items()}
    answers = [r.answer_tokens for r in drawn if early_stop and r.answer_tokens]
    output = sum(answers) / len(answers) if answers else NO_END
    return Yields(per_step, output, f"{PUBLISHED.source}, difficulty {difficulty}")


def _recorded_load(experiment: Experiment, recording: Recording, point: Point) -> Load:
    """The requests of a recorded run, each with the steps it took there.

    Its steps are known at the thresholds that it was run at. The assumption: at any other they
    differ as the published means do, and they spread evenly over its blocks.
    """
    requests = recording.requests
    ends = [r.output_tokens for r in requests]
    outcomes = _RecordedOutcomes(
        point.seed,
        counts=RecordedCounts((MEAN_STEPS,)),
        block_sigma=0.0,
        difficulties=tuple(r.difficulty for r in requests),
    )
    difficulty = sum(r.difficulty for r in requests) / len(requests)
    per_step = {t: n / difficulty for t, n in PUBLISHED.tokens_per_step.items()}
    return Load(
        requests=recording.requests_at(point.rate_per_s, experiment.slo),
        executors=TraceExecutors(outcomes, ends.__getitem__),
        yields=Yields(per_step, sum(ends) / len(ends), "the recorded run"),
        profiles=recording.profiles,
    )


@dataclass(frozen=True, slots=True)
class _RecordedOutcomes(TraceOutcomes):
    """An outcome model with a difficulty for each request."""

    difficulties: tuple[float, ...] = ()

    def difficulty_of(self, index: int) -> float:
        """See ``TraceOutcomes.difficulty_of``."""
        return self.difficulties[index]


def _usual(experiment: Experiment) -> str:
    """Hardware of the published runs of a model."""
    name = experiment.workload.name
    if name not in DATASETS:
        raise FieldError(
            "setting.hardware", f"nothing was published of {experiment.workload.label!r}"
        )
    return published_run(experiment.setting.model, name).gpu


LEARN_NOTHING = (Choice("oracle"), Choice("boosted", {"healing_rate": 0.0}))


class DiffusionSimulation(Simulation):
    """See ``Simulation``."""

    unused = ("link_bytes_per_s",)

    def __init__(
        self,
        experiment: Experiment,
        point: Point,
        model: StepModel | None = None,
        make: MakeLoad = make_load,
    ) -> None:
        """``model``: the boosted predictor's. ``make``: from outside, for a model in the loop."""
        super().__init__(experiment, point)
        self.load = load = make(experiment, point)
        self.requests, self.executors = load.requests, load.executors
        self.accuracy_kind = load.accuracy_kind
        kv_tokens = self.system.kv_tokens or KV_TOKENS
        hosts = experiment.hosts
        self.specs = tuple(host.spec(self.system, host.degree * kv_tokens) for host in hosts)
        hardware = {host.hardware for host in hosts}
        self._hardware = {host.id: host.hardware for host in hosts}
        self.alike = len(hardware) == 1
        self._tables = {one: self._profiles(one) for one in sorted(hardware)}
        self._known = {one: KnownSteps(tables) for one, tables in self._tables.items()}
        self.truth = per_instance(self.specs, self._true, self.alike)
        self.predictor = self._predictor(model)
        learns = self.system.predictor not in LEARN_NOTHING
        self.learn = (self.predictor.learn,) if learns else ()
        self.planner = make_planner(self.family, self.control)
        if self.planner is not None and not self.alike:
            raise FieldError("setting.instances", "a planner needs instances of one hardware")

    @classmethod
    def check(cls, experiment: Experiment) -> None:
        """See ``Simulation.check``."""
        super().check(experiment)
        setting, name = experiment.setting, experiment.workload.name
        real = name == "bundled"
        if real is not (setting.model == "bundled") and experiment.recording is None:
            raise FieldError("workload.name", "model and workload bundled go together")
        timed = experiment.recording or any(one.e2e_s for one in experiment.slo)
        if not (base_s(experiment) or timed):
            raise FieldError("setting.base_s", "needed: nothing is published of this model")
        for host in experiment.hosts:
            if host.hardware == RECORDED and experiment.recording:
                continue
            if real and not host.hardware:
                if host.degree != 1 or any(
                    system.control.plans for system in experiment.systems.values()
                ):
                    raise FieldError("setting.degree", "the bundled model was profiled at 1 only")
            elif real and not host.hardware.endswith(".json"):
                what = "the bundled model has times of its own, or those of a file NAME.json"
                raise FieldError("setting.hardware", what)
            else:
                try:
                    profiles(host.hardware or _usual(experiment), setting.model, (host.degree,))
                except FieldError as error:
                    raise FieldError("setting.hardware", str(error)) from error

    def _profiles(self, hardware: str) -> Mapping[int, StepProfile]:
        """Raises FieldError for hardware of which nothing is known, at a degree that is needed."""
        if hardware in ("", RECORDED) and self.load.profiles:
            return self.load.profiles
        needed = {spec.tp_degree for spec in self.specs}
        if self.control.plans:
            needed |= set(self.control.tp_degrees)
        return profiles(hardware, self.experiment.setting.model, sorted(needed))

    def _predictor(self, model: StepModel | None) -> StepPredictor:
        truths = self.executors.truths if isinstance(self.executors, TraceExecutors) else None
        parts = ForecastParts(self.load.yields, model, truths=truths, seed=self.point.seed)
        return make_forecast(self.family, self.system.predictor, parts)

    def _true(self, spec: InstanceSpec) -> CostModel:
        return self._known[self._hardware[spec.id]]

    def new_record(self, request: Request, index: int) -> DiffusionRecord:
        """See ``Simulation.new_record``."""
        return DiffusionRecord(request, index)

    def new_cost(self, spec: InstanceSpec) -> CostModel:
        """See ``Simulation.new_cost``."""
        hardware = self._hardware.get(spec.id, next(iter(self._tables)))
        if not self.system.learn_steps:
            return self._known[hardware]
        return StepTable(self._tables[hardware])

    def global_cost(self) -> CostModel:
        """See ``Simulation.global_cost``."""
        return per_instance(self.specs, self.new_cost, self.alike)

    def profile(self) -> StepProfiles:
        """See ``Simulation.profile``. A replay's schedulers learn from measured times."""
        faults, name = self.experiment.setting.faults, self.point.chosen
        if not self.system.learn_steps and (faults.step_cv or faults.slow_instances):
            what = f"{name!r} does not learn step times, which vary: no replay"
            raise FieldError("--events", what)
        return StepProfiles(next(iter(self._tables.values())))

    def accuracy(self, records: Sequence[RequestRecord]) -> float | None:
        """See ``Simulation.accuracy``."""
        return self.load.accuracy([r for r in records if isinstance(r, DiffusionRecord)])

    def quality(self, records: Sequence[RequestRecord]) -> Row:
        """See ``Simulation.quality``."""
        own = [r for r in records if isinstance(r, DiffusionRecord)]
        done = [r for r in own if r.whole]
        cheap = sum(r.cheap_openings for r in done)
        return {
            "threshold_mean": mean_threshold(own),
            "refreshes": sum(r.refreshes for r in done) / len(done) if done else None,
            "skipped_share": sum(r.skipped for r in done) / cheap if cheap else None,
        }


@functools.cache
def train_predictor(
    setting: Setting, dataset: str, early_stop: bool, requests: int = TRAINING_REQUESTS
) -> StepModel:
    """The boosted predictor of a setting's workload, trained on simulated step logs."""
    known = dataset in DATASETS
    difficulty = published_run(setting.model, dataset).difficulty if known else 1.0
    outcomes = TraceOutcomes(TRAINING_SEED, difficulty=difficulty)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.csv.gz"
        log = StepLog(path)
        for r in poisson(dataset if known else "gsm8k", 1.0, requests, TRAINING_SEED):
            ends_at = r.answer_tokens if early_stop else None
            threshold = THRESHOLDS[r.index % len(THRESHOLDS)]
            request = make_request(setting, RequestOptions(), r, SLO())
            _log(log, outcomes, request, r.index, ends_at, threshold)
        log.close()
        return train(training_rows(read_step_logs([path])))


def _log(
    log: StepLog,
    outcomes: TraceOutcomes,
    request: Request,
    index: int,
    ends_at: int | None,
    threshold: float,
) -> None:
    """Run a request alone at a fixed threshold, and note its steps."""
    program = DiffusionProgram()
    truth, progress = outcomes.start(request, index, ends_at), program.start(request)
    while progress.finished is None:
        step = program.next_step(request, progress, progress.steps > 0, threshold)
        outcome = outcomes.step(truth, step)
        log.note(request, progress, outcome, step)
        progress = program.advance(request, progress, outcome)

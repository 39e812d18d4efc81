"""Autoregressive models in simulation: batch times by what batches are made of, outputs of known
length, and keys and values that move over links.

Times are the fit to A100 operators, or those of a file that ``stepserve profile`` wrote, or of a
recorded run. What local schedulers believe is learned from batches of a warm-up, or measured.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stepserve.core.errors import FieldError
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.instance import InstanceSpec, Link
from stepserve.core.protocols import CostModel
from stepserve.core.request import Family, Request
from stepserve.core.step import Mix
from stepserve.cost.batch_profile import BatchProfile
from stepserve.cost.batch_table import BatchTable
from stepserve.cost.boosted_steps import StepModel
from stepserve.cost.forecast_parts import ForecastParts
from stepserve.cost.roofline import roofline_on_a100
from stepserve.families.forecasts import make_forecast

from .a100 import A100Truth, ModelShape, known_models, model_shape
from .ar_executors import ArExecutors
from .ar_record import ArRecord
from .experiment import Experiment
from .faults import Faults
from .known_lengths import KnownLengths
from .known_steps import Truth
from .links import Links
from .outside import is_outside, outside
from .record import RequestRecord
from .recording import RECORDED
from .requests import draw, slo_classes, targets
from .results import Row, mean, percentile_or_none
from .simulation import Point, Simulation, per_instance
from .transfers import Transfers
from .world import World

WARM_UP = 1_000_003
"""Added to a seed for the times of warm-up batches."""

KV_TOKENS = 65_536
"""Positions of keys and values beside a model that nothing is known of, as ``serve`` has them."""

CHUNK_TOKENS, DECODES = 512, 32
"""A usual batch, by which the first rate of a search is estimated."""

FIRST_SHARE = 0.6
"""Of the rate at which all instances would be busy with usual batches."""

WARM_UP_MIXES = tuple(
    Mix(prefill, prefill * prefill // 2, decodes, decodes * context)
    for prefill, decodes, context in itertools.product(
        (0, 128, 256, 512, 1024, 2048), (0, 8, 32, 64, 128), (512, 2048)
    )
    if prefill or decodes
)
"""What an instance runs before it serves, so many times (DynaServe 3.2)."""

WARM_UP_ROUNDS = 3
SPLITS = ("solo", "below", "at", "above")


class MeasuredTruth(Truth):
    """The mean seconds of measured batches are true. Learns nothing."""

    def __init__(self, profile: BatchProfile, degree: int) -> None:
        self._table = profile.cost_model((degree,))

    def step_time_s(
        self, tokens: int, rows: int, spec: InstanceSpec, mix: Mix | None = None
    ) -> float:
        """See ``CostModel.step_time_s``."""
        return self._table.mean_s(mix or Mix(tokens, tokens * (tokens + 1) // 2), spec)


class CountedTruth(Truth):
    """A truth that counts the operations of each batch that is run once, by instance."""

    def __init__(self, truth: CostModel, shape: ModelShape) -> None:
        self._step_time_s, self._flops = truth.step_time_s, shape.flops
        self.flops: dict[InstanceId, float] = defaultdict(float)

    def step_time_s(
        self, tokens: int, rows: int, spec: InstanceSpec, mix: Mix | None = None
    ) -> float:
        """See ``CostModel.step_time_s``."""
        assert mix is not None, "an autoregressive batch says what it is made of"
        self.flops[spec.id] += self._flops(mix)
        return self._step_time_s(tokens, rows, spec, mix)


@dataclass(frozen=True, slots=True)
class Hardware:
    """How long batches take on hardware at a degree, and what a scheduler begins with."""

    truth: CostModel
    profile: BatchProfile


def hardware(experiment: Experiment, name: str, degree: int, seed: int) -> Hardware:
    """That of a name. Raises FieldError for one, or a degree, of which nothing is known."""
    model, recording = experiment.setting.model, experiment.recording
    if name == RECORDED and recording is not None and recording.batches is not None:
        return Hardware(MeasuredTruth(recording.batches, degree), recording.batches)
    if name.endswith(".json"):
        path = Path(name)
        file = path if degree == 1 else path.with_name(f"{path.stem}_tp{degree}.json")
        if not file.is_file():
            what = f"no file {file} says how fast batches are at TP degree {degree}"
            raise FieldError("setting.hardware", what)
        profile = BatchProfile.load(file, "setting.hardware")
        return Hardware(MeasuredTruth(profile, degree), profile)
    if is_outside("hardware", name):
        profile = outside("hardware", name, "setting.hardware").profile(model, degree)
        return Hardware(MeasuredTruth(profile, degree), profile)
    try:
        truth = A100Truth(model, name or "a100")
    except FieldError as error:
        field = "setting.model" if error.field == "model" else "setting.hardware"
        raise FieldError(field, error.message) from error
    if degree != truth.shape.tp:
        what = f"times of {model} on A100 are known at degree {truth.shape.tp} only"
        raise FieldError("setting.instances.degree", what)
    return Hardware(truth, _warmed(experiment, truth, seed))


def _warmed(experiment: Experiment, truth: A100Truth, seed: int) -> BatchProfile:
    """The model's roofline, and the batches of a warm-up."""
    model, degree = experiment.setting.model, truth.shape.tp
    spec = InstanceSpec(InstanceId("warm-up"), degree, 1, 1, 1)
    noise = Faults(experiment.setting.faults, WARM_UP + seed).noise
    steps = []
    for mix in WARM_UP_MIXES * WARM_UP_ROUNDS:
        tokens, rows = mix.prefill_tokens + mix.decodes, mix.decodes + (mix.prefill_tokens > 0)
        steps.append((mix, noise() * truth.step_time_s(tokens, rows, spec, mix)))
    return BatchProfile(roofline_on_a100(model, degree), tuple(steps), "simulated warm-up")


class AutoregressiveSimulation(Simulation):
    """See ``Simulation``."""

    unused = ("request", "learn_steps", "accuracy_points_lost")

    def __init__(
        self, experiment: Experiment, point: Point, model: StepModel | None = None
    ) -> None:
        super().__init__(experiment, point)
        setting, system, hosts = experiment.setting, self.system, experiment.hosts
        kinds = {(host.hardware, host.degree) for host in hosts}
        self.control = replace(self.control, tp_degrees=tuple(sorted({d for _, d in kinds})))
        self.alike = len(kinds) == 1
        by_kind = {kind: hardware(experiment, *kind, point.seed) for kind in sorted(kinds)}
        self._hardware = {host.id: by_kind[host.hardware, host.degree] for host in hosts}
        known = setting.model in known_models()
        self._shape = model_shape(setting.model) if known else None
        self.specs = tuple(
            host.spec(system, system.kv_tokens * host.degree or self._kv_tokens) for host in hosts
        )
        truth = per_instance(self.specs, lambda spec: self._of(spec).truth, self.alike)
        self.truth = CountedTruth(truth, self._shape) if self._shape else truth
        self.tables: list[BatchTable] = []  # of the local schedulers
        self._known = per_instance(self.specs, self._fresh_table, self.alike)
        self.requests, lengths = self._requests()
        executors = ArExecutors(lengths.__getitem__)
        self.executors = executors
        self.gaps = [n - 1 for n in lengths]
        parts = ForecastParts(truths=executors.truths, seed=point.seed)
        self.predictor = make_forecast(self.family, system.predictor, parts)
        learns = not isinstance(self.predictor, KnownLengths)
        self.learn = (self.predictor.learn,) if learns else ()
        kv_bytes = self._of(self.specs[0]).profile.line.kv_bytes_per_token
        links = setting.links
        bytes_per_s = system.link_bytes_per_s or links.bytes_per_s
        self.link = Link(kv_bytes, bytes_per_s, links.rtt_s)
        self.transfers = Transfers(executors, kv_bytes, Links(bytes_per_s, links.rtt_s))

    @classmethod
    def check(cls, experiment: Experiment) -> None:
        """See ``Simulation.check``."""
        super().check(experiment)
        for host in experiment.hosts:
            hardware(experiment, host.hardware, host.degree, 0)

    def _of(self, spec: InstanceSpec) -> Hardware:
        return self._hardware[spec.id]

    @property
    def _kv_tokens(self) -> int:
        return self._shape.kv_tokens if self._shape else KV_TOKENS

    def _requests(self) -> tuple[list[Request], list[int]]:
        """What arrives, and how long each output gets."""
        experiment, point, recording = self.experiment, self.point, self.experiment.recording
        if recording is not None:
            requests = recording.requests_at(point.rate_per_s, experiment.slo)
            return requests, [r.output_tokens for r in recording.requests]
        drawn = draw(experiment, point.rate_per_s, point.seed)
        slos, chosen = targets(experiment), slo_classes(experiment, point.seed, drawn)
        slack = experiment.workload.slack_tokens
        return [
            Request(
                id=RequestId(str(r.index)),
                family=Family.AUTOREGRESSIVE,
                model=experiment.setting.model,
                prompt_tokens=r.prompt_tokens,
                max_output_tokens=r.output_tokens + slack,
                arrival_s=r.arrival_s,
                slo=slos[slo_class],
            )
            for r, slo_class in zip(drawn, chosen, strict=True)
        ], [r.output_tokens for r in drawn]

    def _fresh_table(self, spec: InstanceSpec) -> BatchTable:
        return self._of(spec).profile.cost_model((spec.tp_degree,))

    def new_record(self, request: Request, index: int) -> ArRecord:
        """See ``Simulation.new_record``."""
        return ArRecord(request, index)

    def new_cost(self, spec: InstanceSpec) -> CostModel:
        """See ``Simulation.new_cost``."""
        self.tables.append(self._fresh_table(spec))
        return self.tables[-1]

    def global_cost(self) -> CostModel:
        """See ``Simulation.global_cost``."""
        return self._known

    def profile(self) -> BatchProfile:
        """See ``Simulation.profile``."""
        return self._of(self.specs[0]).profile

    def machines(self, world: World, records: Sequence[RequestRecord]) -> Row:
        """What only this family has of instances, links and predictions.

        ``mfu``: useful operations / (peak of the TP group x time from the start to the last
        answer). ``splits``: shares of the requests placed, by where they were cut relative to the
        end of the prompt. ``segment_error``: |predicted - measured| / measured of the seconds of
        first and second segments, and of the time between tokens, against the mean of each
        answer. ``profile_error``: that of the batch times of the local scheduler that is worst
        at it, of its latest 4,096 batches, so in short runs those of the warm-up too; ``covered``:
        the share that took no longer than planned.
        """
        own = [r for r in records if isinstance(r, ArRecord)]
        end_s = max(r.answered_s for r in own)
        errors = [table.accuracy() for table in self.tables]
        assert world.transfers is not None
        exposed_s = [h.exposed_s for r in own for h in r.handovers if h.exposed_s is not None]
        gaps_s = [gap_s for r in own for gap_s in r.handover_gaps_s()]
        cuts = Counter(_cut(r) for r in own if r.segments)
        told = [r.predicted_and_measured_s() for r in own]
        return {
            "mfu": [self._mfu(name, end_s) for name in sorted(world.instances)],
            "kv_bytes_moved": world.transfers.bytes_moved,
            "exposed_transfer_mean_s": mean(exposed_s),
            "exposed_transfer_p99_s": percentile_or_none(exposed_s, 99.0),
            "handoff_gap_p99_s": percentile_or_none(gaps_s, 99.0),
            "splits": {name: cuts[name] / max(1, cuts.total()) for name in SPLITS},
            "profile_error": {
                "median": max(e.median for e in errors),
                "p95": max(e.p95 for e in errors),
                "covered": min(e.covered for e in errors),
            },
            "segment_error": {
                "t1": _error([_off(*pairs[0]) for pairs in told if pairs]),
                "t2": _error([_off(*pairs[1]) for pairs in told if len(pairs) > 1]),
                "tbt": _error(_tbt_errors(own)),
            },
            "stalled_handovers": world.transfers.stalled,
        }

    def _mfu(self, name: InstanceId, end_s: float) -> float | None:
        """Of an instance on A100; nothing is known of other hardware's peak."""
        if not (isinstance(self.truth, CountedTruth) and self._shape):
            return None
        if not isinstance(self._hardware[name].truth, A100Truth):
            return None
        return self._shape.mfu(self.truth.flops[name], end_s)

    def quality(self, records: Sequence[RequestRecord]) -> Row:
        """See ``Simulation.quality``: nothing is known of answers but their length."""
        return {}


def first_rate_per_s(experiment: Experiment, seed: int) -> float:
    """Where a search for capacity may begin: a share of what usual batches would take.

    A request alone costs its prompt in chunks, and its share of batches of ``DECODES``.
    """
    name = next(iter(experiment.systems))
    found = AutoregressiveSimulation(experiment, Point(name, name, 1.0, seed))
    requests, lengths = found._requests()
    prompt = sum(r.prompt_tokens for r in requests) / len(requests)
    output = sum(lengths) / len(lengths)
    chunk = Mix(CHUNK_TOKENS, CHUNK_TOKENS * int(prompt + CHUNK_TOKENS) // 2)
    decodes = Mix(decodes=DECODES, decode_context=DECODES * int(prompt + output / 2.0))
    rate = 0.0
    for spec in found.specs:
        chunk_s = found.truth.step_time_s(CHUNK_TOKENS, 1, spec, chunk)
        decodes_s = found.truth.step_time_s(DECODES, DECODES, spec, decodes)
        rate += 1.0 / (chunk_s * prompt / CHUNK_TOKENS + decodes_s * output / DECODES)
    return FIRST_SHARE * rate


def _cut(record: ArRecord) -> str:
    """Where the first plan cut a request."""
    stop = min(record.segments, key=lambda s: (s.at_s, s.start)).stop
    if stop is None:
        return "solo"
    beyond = stop - record.request.prompt_tokens
    return "below" if beyond < 0 else "above" if beyond else "at"


def _off(predicted: float, measured: float) -> float:
    return abs(predicted - measured) / measured


def _tbt_errors(records: Sequence[ArRecord]) -> list[float]:
    errors = []
    for record in records:
        times_s, told_s = record.times_s, [s.predicted_tbt_s for s in record.segments]
        if len(times_s) > 1 and told_s and told_s[0] is not None:
            errors.append(_off(told_s[0], (times_s[-1] - times_s[0]) / (len(times_s) - 1)))
    return errors


def _error(errors: Sequence[float]) -> Row:
    return {"median": percentile_or_none(errors, 50.0), "p95": percentile_or_none(errors, 95.0)}

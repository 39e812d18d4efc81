"""Trace-driven loads: published lengths and arrivals, modelled outcomes, accuracy by proxy.

Also trains the predictor on the same kind of requests, at fixed thresholds (DiLaServe B5),
with a seed of its own: it never saw the requests it is asked about.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stepserve.control.programs.diffusion import DiffusionProgram
from stepserve.core.errors import FieldError
from stepserve.core.request import Request
from stepserve.cost.boosted_fit import train
from stepserve.cost.boosted_steps import StepModel
from stepserve.cost.features import training_rows
from stepserve.cost.remaining_steps import PUBLISHED, Yields
from stepserve.cost.step_log import StepLog, read_step_logs

from .cluster import Profiles, make_request, profiles, slo_classes
from .config import Setting, System
from .datasets import SimRequest, poisson, published_run, two_hours
from .executors import TraceExecutors
from .outcomes import THRESHOLDS, TraceOutcomes
from .quality import ACCURACY_KIND, accuracy_proxy
from .record import DiffusionRecord
from .results import finished
from .run import Point

TRAINING_SEED = 1_000_003
TRAINING_REQUESTS = 1_500
NO_END = 1e9
"""Output length of requests that never end by themselves: their limit is what counts."""


@dataclass(frozen=True, slots=True)
class TracedLoad:
    """A ``Load`` whose steps are drawn from the outcome model."""

    requests: Sequence[Request]
    rows: TraceExecutors
    yields: Yields
    profiles: Profiles
    model: str
    dataset: str
    points_lost: float
    accuracy_kind: str = ACCURACY_KIND

    def accuracy(self, records: Sequence[DiffusionRecord]) -> float | None:
        """Mean proxy over whole answers; ``None`` where no accuracy was published."""
        done = [r for r in records if finished(r)]
        if not done:
            return None
        try:
            values = [
                accuracy_proxy(self.model, self.dataset, r.use.losses, self._points_lost(r))
                for r in done
            ]
        except FieldError:
            return None
        return sum(values) / len(values)

    def _points_lost(self, record: DiffusionRecord) -> float:
        """The price of the system's refresh options, for the refreshes left out (a proxy)."""
        return self.points_lost * record.skipped / max(1, record.cheap_openings)


def make_load(setting: Setting, system: System, point: Point) -> TracedLoad:
    """The load of a point: the same requests and truths for every system."""
    rate_per_s = point.rate_per_gpu_per_s * setting.gpus
    if setting.arrivals == "burstgpt":
        drawn = two_hours(setting.dataset, rate_per_s, point.seed, setting.window_s)
    else:
        cv = 0.0 if setting.arrivals == "constant" else 1.0
        requests = setting.requests_at(point.rate_per_gpu_per_s)
        drawn = poisson(setting.dataset, rate_per_s, requests, point.seed, cv)
    run = published_run(setting.model, setting.dataset)
    e2e_s = (setting.base_s or run.base_s) * point.slo_multiple
    ends = {r.index: r.answer_tokens for r in drawn} if setting.early_stop else {}
    outcomes = TraceOutcomes(point.seed, difficulty=run.difficulty)
    classes = slo_classes(setting, point.seed, len(drawn))
    return TracedLoad(
        requests=[
            make_request(setting, system, r, e2e_s, slo_class)
            for r, slo_class in zip(drawn, classes, strict=True)
        ],
        rows=TraceExecutors(outcomes, ends.get),
        yields=_yields(setting, run.difficulty, drawn),
        profiles=profiles(setting, system),
        model=setting.model,
        dataset=setting.dataset,
        points_lost=system.accuracy_points_lost,
    )


def _yields(setting: Setting, difficulty: float, drawn: Sequence[SimRequest]) -> Yields:
    per_step = {t: n / difficulty for t, n in PUBLISHED.tokens_per_step.items()}
    answers = [r.answer_tokens for r in drawn if setting.early_stop and r.answer_tokens]
    output = sum(answers) / len(answers) if answers else NO_END
    return Yields(per_step, output, f"{PUBLISHED.source}, difficulty {difficulty}")


def train_predictor(setting: Setting, requests: int = TRAINING_REQUESTS) -> StepModel:
    """The boosted predictor of a setting's workload, trained on simulated step logs."""
    run = published_run(setting.model, setting.dataset)
    drawn = poisson(setting.dataset, 1.0, requests, TRAINING_SEED)
    outcomes = TraceOutcomes(TRAINING_SEED, difficulty=run.difficulty)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.csv.gz"
        log = StepLog(path)
        for r in drawn:
            ends_at = r.answer_tokens if setting.early_stop else None
            threshold = THRESHOLDS[r.index % len(THRESHOLDS)]
            _log(
                log, outcomes, make_request(setting, System(), r, None), r.index, ends_at, threshold
            )
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

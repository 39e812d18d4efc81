"""The bundled model in the loop: time is simulated, every step is really computed.

Dataset and model ``bundled`` of ``stepserve simulate``. Step times are the profile measured
with the model (TP degree 1 only); tokens, and with them accuracy, are the engine's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer

from stepserve.core.errors import FieldError
from stepserve.core.payload import Payload
from stepserve.core.request import Request
from stepserve.cost.boosted_steps import StepModel
from stepserve.cost.remaining_steps import Yields
from stepserve.cost.step_table import StepProfile
from stepserve.engine.bundled.evaluate import BUNDLED_MODEL, held_out_problems
from stepserve.engine.bundled.tasks import Problem, correct
from stepserve.engine.bundled.vocabulary import EOS, prompt_ids
from stepserve.engine.diffusion_executor import DiffusionExecutor
from stepserve.engine.loader import load_model
from stepserve.sim.cluster import Profiles, make_request, slo_classes
from stepserve.sim.config import Setting, System
from stepserve.sim.datasets import SimRequest
from stepserve.sim.executors import EngineExecutors
from stepserve.sim.record import DiffusionRecord
from stepserve.sim.results import finished
from stepserve.sim.run import Point
from stepserve.sim.workload import RateCurve, renewal


@dataclass(frozen=True, slots=True)
class BundledLoad:
    """A ``Load`` of held-out problems, answered by the bundled model."""

    requests: Sequence[Request]
    rows: EngineExecutors
    yields: Yields
    profiles: Profiles
    problems: Sequence[Problem]
    tokenizer: Tokenizer
    accuracy_kind: str = "measured"

    def accuracy(self, records: Sequence[DiffusionRecord]) -> float | None:
        """Right answers / whole answers."""
        done = [r for r in records if finished(r)]
        return sum(map(self._correct, done)) / len(done) if done else None

    def _correct(self, record: DiffusionRecord) -> bool:
        assert record.progress is not None, "a whole answer left an instance"
        tokens = self.rows.settled[record.request.id]
        written = [tokens[offset] for offset in range(record.progress.emitted)]
        text = self.tokenizer.decode([token for token in written if token != EOS])
        return correct(self.problems[record.index], text.strip())


def make_load(setting: Setting, system: System, point: Point) -> BundledLoad:
    """The load of a point: the same problems and arrivals for every system.

    Raises FieldError unless ``base_s`` is given (nothing is published for this model) and all
    instances are of degree 1.
    """
    if not setting.base_s:
        raise FieldError("base_s", "needed: the bundled model has no published latency")
    if setting.tp_degree != 1 or system.control.plans:
        raise FieldError("tp_degree", "the bundled model was profiled at degree 1 only")
    torch.set_num_threads(1)
    loaded = load_model(BUNDLED_MODEL)
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    problems = held_out_problems(setting.requests_at(point.rate_per_gpu_per_s), point.seed)
    cv = 0.0 if setting.arrivals == "constant" else 1.0
    curve = RateCurve.constant(point.rate_per_gpu_per_s * setting.gpus)
    arrivals = renewal(curve, cv, np.random.default_rng(point.seed), requests=len(problems))
    classes = slo_classes(setting, point.seed, len(problems))
    requests, payloads = [], {}
    for index, (problem, arrival) in enumerate(zip(problems, arrivals, strict=True)):
        payload = Payload(tuple(prompt_ids(tokenizer, problem.prompt)))
        limit = loaded.default_max_tokens
        drawn = SimRequest(index, arrival.at_s, len(payload.prompt_ids), limit)
        e2e_s = setting.base_s * point.slo_multiple
        request = make_request(setting, system, drawn, e2e_s, classes[index])
        requests.append(request)
        payloads[request.id] = payload
    return BundledLoad(
        requests,
        EngineExecutors(lambda _: DiffusionExecutor(loaded, threads=1), payloads),
        Yields.load(BUNDLED_MODEL / "yields.json"),
        {1: StepProfile.load(BUNDLED_MODEL / "step_profile.json")},
        problems,
        tokenizer,
    )


def trained_predictor() -> StepModel:
    """The predictor that ships with the model."""
    return StepModel.load(BUNDLED_MODEL / "step_predictor.txt")

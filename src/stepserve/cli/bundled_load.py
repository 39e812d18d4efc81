"""The bundled model in the loop: time is simulated, every step is really computed.

Workload and model ``bundled`` of ``stepserve simulate``. Step times are the profile measured with
the model (TP degree 1 only), or those of ``setting.hardware`` if that is a file; tokens, and with
them accuracy, are the engine's own.
"""

import numpy as np
import torch
from tokenizers import Tokenizer

from stepserve.core.errors import FieldError
from stepserve.core.payload import Payload
from stepserve.core.request import OnMiss
from stepserve.cost.boosted_steps import StepModel
from stepserve.cost.remaining_steps import Yields
from stepserve.cost.step_table import StepProfile
from stepserve.engine.bundled.evaluate import BUNDLED_MODEL, held_out_problems
from stepserve.engine.bundled.tasks import correct
from stepserve.engine.bundled.vocabulary import EOS, prompt_ids
from stepserve.engine.diffusion_executor import DiffusionExecutor
from stepserve.engine.loader import load_model
from stepserve.sim.datasets import SimRequest
from stepserve.sim.diffusion import Load, make_request
from stepserve.sim.executors import EngineExecutors
from stepserve.sim.experiment import Experiment
from stepserve.sim.record import DiffusionRecord
from stepserve.sim.requests import slo_classes, targets
from stepserve.sim.results import mean
from stepserve.sim.simulation import Point
from stepserve.sim.workload import RateCurve, renewal


def make_load(experiment: Experiment, point: Point) -> Load:
    """The load of a point: the same problems and arrivals for every system.

    Raises FieldError for arrivals other than drawn ones.
    """
    setting, workload = experiment.setting, experiment.workload
    options = experiment.systems[point.chosen].request
    cvs = {"poisson": 1.0, "constant": 0.0, "gamma": workload.cv}
    if workload.arrivals not in cvs:
        raise FieldError("workload.arrivals", f"of bundled problems: {', '.join(cvs)}")
    torch.set_num_threads(1)
    loaded = load_model(BUNDLED_MODEL)
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    problems = held_out_problems(workload.requests_at(point.rate_per_s), point.seed)
    curve, rng = RateCurve.constant(point.rate_per_s), np.random.default_rng(point.seed)
    arrivals = renewal(curve, cvs[workload.arrivals], rng, requests=len(problems))
    prompts = [tuple(prompt_ids(tokenizer, problem.prompt)) for problem in problems]
    limit = loaded.default_max_tokens
    drawn = [
        SimRequest(index, arrival.at_s, len(prompt), limit)
        for index, (prompt, arrival) in enumerate(zip(prompts, arrivals, strict=True))
    ]
    slos = targets(experiment, OnMiss(options.on_miss))
    classes = slo_classes(experiment, point.seed, drawn)
    requests = [
        make_request(setting, options, one, slos[slo_class])
        for one, slo_class in zip(drawn, classes, strict=True)
    ]
    payloads = {r.id: Payload(prompt) for r, prompt in zip(requests, prompts, strict=True)}
    executors = EngineExecutors(lambda _: DiffusionExecutor(loaded, threads=1), payloads)

    def right(record: DiffusionRecord) -> bool:
        assert record.progress is not None, "a whole answer left an instance"
        tokens = executors.settled[record.request.id]
        written = [tokens[offset] for offset in range(record.progress.emitted)]
        text = tokenizer.decode([token for token in written if token != EOS])
        return correct(problems[record.index], text.strip())

    return Load(
        requests,
        executors,
        Yields.load(BUNDLED_MODEL / "yields.json"),
        {1: StepProfile.load(BUNDLED_MODEL / "step_profile.json")},
        lambda records: mean([float(right(r)) for r in records if r.whole]),
        "measured",
    )


def trained_predictor() -> StepModel:
    """The predictor that ships with the model."""
    return StepModel.load(BUNDLED_MODEL / "step_predictor.txt")

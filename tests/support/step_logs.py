"""Synthetic step logs: requests of a known difficulty that their confidences tell of.

DiLaServe C5: difficulty is lognormal with mean 1, steps per block follow the published
tokens per step (DiLaServe B3), and masked positions are less confident the harder a request is.
"""

import math
import random

from stepserve.core.ids import RequestId
from stepserve.core.request import (
    Confidence,
    DiffusionOptions,
    Family,
    FinishReason,
    Progress,
    Request,
)
from stepserve.core.step import Step, StepKind, StepOutcome
from stepserve.cost.step_log import StepLog

YIELD = {0.9: 3.26, 0.8: 4.20, 0.7: 5.25, 0.6: 6.37, 0.5: 7.33}
BLOCK = 32


def make_request(name, limit, block=BLOCK, **options):
    return Request(
        RequestId(name),
        Family.DIFFUSION,
        "toy",
        50,
        limit,
        0.0,
        diffusion=DiffusionOptions(block_tokens=block, **options),
    )


def make_step(request, threshold):
    return Step(request.id, StepKind.CACHED, BLOCK, 50 + request.max_output_tokens, threshold)


def summary(rng, limit, unmasked, difficulty):
    """Five numbers over 8 positions: settled ones are sure, masked ones as DiLaServe C5 says."""
    progress = unmasked / limit
    mean = min(0.95, max(0.05, 0.45 + 0.25 * progress - 0.5 * math.log(difficulty)))
    values = sorted(
        rng.betavariate(19, 1) if i < 8 * progress else rng.betavariate(9 * mean, 9 * (1 - mean))
        for i in range(8)
    )
    return Confidence(values[0], values[2], values[4], sum(values) / 8, values[6])


def run_request(rng, request, threshold, length=None, pace=1.0):
    """(progress before, outcome) of every step; ``length``: where it ends by itself.

    ``pace``: how many times the steps that its confidences promise it really takes.
    """
    limit = request.max_output_tokens
    end = min(limit, length or limit)
    difficulty = rng.lognormvariate(-(0.3**2) / 2, 0.3)
    progress = Progress(settled=request.prompt_tokens)
    for start in range(0, end, BLOCK):
        tokens = min(BLOCK, end - start)
        wanted = tokens * difficulty * pace / YIELD[threshold] * rng.lognormvariate(0, 0.15)
        steps = min(tokens, max(1, round(wanted)))
        cuts = sorted(rng.sample(range(1, tokens), steps - 1))
        for low, high in zip([0, *cuts], [*cuts, tokens], strict=True):
            unmasked = start + high
            natural = FinishReason.STOP if end < limit else FinishReason.LENGTH
            outcome = StepOutcome(
                request.id,
                high - low,
                unmasked,
                natural if unmasked == end else None,
                summary(rng, limit, unmasked, difficulty),
                forced=min(1, high - low),
            )
            yield progress, outcome
            progress = Progress(
                request.prompt_tokens + unmasked,
                unmasked,
                progress.steps + 1,
                outcome.finished,
                outcome.confidence,
            )


def write_log(path, seed, requests, limits=(64, 128, 256), lengths=None, pace=1.0):
    """A log of so many requests per threshold; ``lengths``: natural ends are drawn from it."""
    rng = random.Random(seed)
    log = StepLog(path)
    for index in range(requests):
        for threshold in YIELD:
            request = make_request(f"{threshold}/{index}", rng.choice(limits))
            length = rng.choice(lengths) if lengths else None
            for progress, outcome in run_request(rng, request, threshold, length, pace):
                log.note(request, progress, outcome, make_step(request, threshold))
    log.close()
    return path

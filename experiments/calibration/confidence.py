"""How well a boosted predictor learns the simulated outcomes, against the published errors.

    python experiments/calibration/confidence.py     # prints, writes results/confidence.json

The spreads of ``TraceOutcomes`` were chosen by hand with this script: ``block_sigma`` for the
error with progress alone, ``haze_sigma`` for the error with confidence (DiLaServe B5).
"""

import json
import tempfile
from pathlib import Path

import numpy as np

from stepserve.core.ids import RequestId
from stepserve.core.request import Family, Progress, Request
from stepserve.core.step import Step, StepKind
from stepserve.cost.boosted_fit import PUBLISHED_BY_FEATURES, PUBLISHED_BY_REFRESH, study
from stepserve.cost.features import training_rows
from stepserve.cost.step_log import StepLog, read_step_logs
from stepserve.sim.datasets import poisson
from stepserve.sim.outcomes import THRESHOLDS, TraceOutcomes

REQUESTS = 2000


def log_requests(path: Path, dataset: str, outcomes: TraceOutcomes) -> None:
    """Run every request alone at one threshold, the five in turn, and log its steps."""
    log = StepLog(path)
    for r in poisson(dataset, 1.0, REQUESTS, 0):
        request = Request(
            RequestId(f"r{r.index}"), Family.DIFFUSION, "", r.prompt_tokens, r.output_tokens, 0.0
        )
        truth = outcomes.start(request, r.index)
        step = Step(request.id, StepKind.CACHED, 32, 32, THRESHOLDS[r.index % 5])
        progress = Progress(settled=r.prompt_tokens)
        while progress.finished is None:
            outcome = outcomes.step(truth, step)
            log.note(request, progress, outcome, step)
            progress = Progress(
                progress.settled + outcome.settled,
                outcome.emitted,
                progress.steps + 1,
                outcome.finished,
                outcome.confidence or progress.confidence,
            )
    log.close()


def main() -> None:
    """Log, train on four requests of five, test on the fifth."""
    result: dict[str, object] = {"published": [PUBLISHED_BY_FEATURES, _named(PUBLISHED_BY_REFRESH)]}
    for dataset in ("gsm8k", "sharegpt"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "steps.csv.gz"
            log_requests(path, dataset, TraceOutcomes(seed=0))
            rows = training_rows(read_step_logs([path]))
        tested = np.isin(rows.rows.request, np.random.default_rng(0).permutation(REQUESTS)[::5])
        _, errors = study(rows.part(~tested), rows.part(tested), 0)
        result[dataset] = [errors.by_features, _named(errors.by_refresh)]
        print(dataset, result[dataset])
    target = Path(__file__).parent / "results/confidence.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=1) + "\n")


def _named(by_refresh: dict[int | None, float]) -> dict[str, float]:
    return {str(k or "one-shot"): round(v, 4) for k, v in by_refresh.items()}


if __name__ == "__main__":
    main()

"""Logs every step of the bundled model at fixed thresholds: training data for the predictor."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from stepserve.core.ids import RequestId
from stepserve.core.payload import Payload
from stepserve.core.protocols import BatchResult, Executor
from stepserve.core.request import SLO, DiffusionOptions, Family, Progress, Request
from stepserve.core.step import Batch
from stepserve.cost.step_log import StepLog
from stepserve.engine.bundled.evaluate import BATCH_ROWS, BUNDLED_MODEL, held_out_problems
from stepserve.engine.bundled.vocabulary import prompt_ids
from stepserve.engine.diffusion_executor import DiffusionExecutor
from stepserve.engine.diffusion_offline import denoise
from stepserve.engine.loader import load_model
from stepserve.families.programs.diffusion import DiffusionProgram


class LoggingExecutor:
    """An ``Executor`` around another one; it notes every step in a step log."""

    def __init__(self, executor: Executor, log: StepLog) -> None:
        self._executor = executor
        self._log = log
        self._program = DiffusionProgram()
        self._held: dict[RequestId, tuple[Request, Progress]] = {}

    def add(
        self,
        request: Request,
        payload: Payload,
        progress: Progress,
        settled: Mapping[int, int],
    ) -> None:
        """See ``Executor.add``."""
        self._executor.add(request, payload, progress, settled)
        self._held[request.id] = (request, progress)

    def run(self, batch: Batch) -> BatchResult:
        """See ``Executor.run``."""
        result = self._executor.run(batch)
        for step, outcome in zip(batch.steps, result.outcomes, strict=True):
            request, progress = self._held[step.request_id]
            self._log.note(request, progress, outcome, step)
            self._held[request.id] = (request, self._program.advance(request, progress, outcome))
        return result

    def remove(self, request_id: RequestId) -> None:
        """See ``Executor.remove``."""
        self._executor.remove(request_id)
        self._held.pop(request_id, None)

    def close(self) -> None:
        """See ``Executor.close``."""
        self._executor.close()


def log_bundled(
    out: Path, problems: int, thresholds: Sequence[float], limits: Sequence[int], seed: int
) -> int:
    """Decode ``problems`` held-out problems at each threshold, on one CPU thread; returns how many.

    Every request is another problem, and the output limits take turns: a predictor is tested
    on problems it has not seen, and learns what the limit says.
    """
    torch.set_num_threads(1)
    loaded = load_model(BUNDLED_MODEL)
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    options = DiffusionOptions(block_tokens=loaded.default_block_length)
    todo: list[tuple[Request, Payload]] = []
    level: dict[RequestId, float] = {}
    for index, problem in enumerate(held_out_problems(problems * len(thresholds), seed)):
        ids = tuple(prompt_ids(tokenizer, problem.prompt))
        name = RequestId(str(index))
        limit = limits[index // len(thresholds) % len(limits)]
        request = Request(name, Family.DIFFUSION, loaded.name, len(ids), limit, 0.0, SLO(), options)
        todo.append((request, Payload(ids)))
        level[name] = thresholds[index % len(thresholds)]
    log = StepLog(out)
    executor = LoggingExecutor(DiffusionExecutor(loaded, threads=1), log)
    try:
        for first in range(0, len(todo), BATCH_ROWS):
            denoise(
                executor, todo[first : first + BATCH_ROWS], lambda request, _: level[request.id]
            )
    finally:
        log.close()
    return len(todo)

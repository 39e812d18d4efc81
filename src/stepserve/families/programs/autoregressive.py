"""The step program of autoregressive models (Llama, Qwen2, ...).

Source: DynaServe 3.1. There are no phases: a request catches up with its known tokens, the
prompt and what was sampled. ``Progress.settled`` counts inputs whose keys and values are where
the request is, and the step that reaches the last known token samples the next. Neither a
hand-over nor a loss is a case of its own: what is outstanding tells what is due.
"""

from collections.abc import Sequence

from stepserve.core.forecast import StepForecast
from stepserve.core.instance import Work
from stepserve.core.protocols import Batches
from stepserve.core.request import Progress, Request
from stepserve.core.step import Mix, Step, StepKind, StepOutcome

_PREFILL, _DECODE = StepKind.PREFILL, StepKind.DECODE


class AutoregressiveProgram:
    """Heavy steps prefill known tokens, in chunks if need be; light steps decode one each."""

    chunked = True

    def __init__(self, chunk_tokens: int) -> None:
        """``chunk_tokens``: most that one heavy step is expected to execute."""
        self._chunk_tokens = chunk_tokens

    def start(self, request: Request) -> Progress:
        """Nothing is executed."""
        return Progress()

    def thresholds(self, request: Request, grid: Sequence[float]) -> tuple[float, ...]:
        """One, without a meaning: forecasts have a number of steps for each."""
        return (1.0,)

    def advance(self, request: Request, progress: Progress, outcome: StepOutcome) -> Progress:
        """Progress after one chunk or decoded token."""
        settled = progress.settled + outcome.settled
        return Progress(settled, outcome.emitted, progress.steps + 1, outcome.finished)

    def next_step(
        self, request: Request, progress: Progress, has_state: bool, threshold: float | None
    ) -> Step:
        """All that is outstanding; a decode if that is one sampled token."""
        known = request.prompt_tokens + progress.emitted
        outstanding = known - progress.settled
        kind = _DECODE if outstanding == 1 and progress.emitted else _PREFILL
        return Step(request.id, kind, outstanding, known)

    def resume(self, request: Request, progress: Progress) -> Progress:
        """What was emitted stays; its keys and values are computed anew."""
        return progress._replace(settled=0)

    def shorten(self, step: Step, tokens: int) -> Step | None:
        """A prefill over its first tokens, at least one."""
        if not step.kind.heavy or tokens < 1:
            return None
        query_tokens = min(tokens, step.query_tokens)
        context_tokens = step.context_tokens - step.query_tokens + query_tokens
        return step._replace(query_tokens=query_tokens, context_tokens=context_tokens)

    def mix(self, steps: Sequence[Step]) -> Mix:
        """What the batch is made of."""
        return Mix.of(steps)

    def fuller_step(self, request: Request, progress: Progress, step: Step) -> Step | None:
        """None: every step is exact."""
        return None

    def tokens_to_cut(self, request: Request, progress: Progress) -> int:
        """0: keys and values are moved or computed anew, after any token alike."""
        return 0

    def heavy_left(self, request: Request, progress: Progress, output_tokens: float) -> float:
        """Chunks of what is to be prefilled."""
        step = self.next_step(request, progress, True, None)
        return float(-(-step.query_tokens // self._chunk_tokens)) if step.kind.heavy else 0.0

    def batches_left(
        self,
        request: Request,
        progress: Progress,
        forecast: StepForecast,
        index: int,
        running_requests: int,
    ) -> Batches:
        """Decodes, which alone are forecast, and chunks of the prompt beside those of others."""
        chunk, halfway = self.heavy_tokens(request), round(forecast.output_tokens / 2.0)
        context = running_requests * (request.prompt_tokens + halfway)
        decode = Mix(decodes=running_requests, decode_context=context)
        fill = decode._replace(prefill_tokens=chunk, prefill_pairs=chunk * (chunk + 1) // 2)
        heavy = self.heavy_left(request, progress, forecast.output_tokens)
        return (
            (forecast.remaining(index, progress.steps), running_requests, running_requests, decode),
            (heavy, chunk + running_requests, running_requests + 1, fill),
        )

    def light_tokens(self, request: Request) -> int:
        """A decode executes the latest token alone."""
        return 1

    def heavy_tokens(self, request: Request) -> int:
        """The prompt, or a chunk of it."""
        return min(request.prompt_tokens, self._chunk_tokens)

    def full_tokens(self, request: Request) -> int:
        """Prompt and output limit."""
        return request.prompt_tokens + request.max_output_tokens

    def kv_tokens(self, request: Request) -> int:
        """Prompt and output limit: pages are reserved once and never taken back.

        Deviation from DynaServe 3.7, which reserves by the predicted length: nothing has to be
        preempted.
        """
        return request.prompt_tokens + request.max_output_tokens

    def work(
        self, request: Request, progress: Progress, forecast: StepForecast, stop: int | None
    ) -> Work:
        """See ``StepProgram.work``.

        A later segment's is asked for by setting ``settled`` to its start. An output longer than
        foreseen is expected to go on for a tenth of it, and 32 tokens at least (DynaServe 3.6).
        """
        settled, emitted = progress.settled, progress.emitted
        known = request.prompt_tokens + emitted
        left = forecast.output_tokens - emitted
        if left <= 0.0:
            left = max(32.0, 0.1 * emitted)
        # The last token is never executed.
        end = min(known + left, self.full_tokens(request)) - 1.0
        prefill = max(0, known - settled)
        if prefill == 1 and emitted:
            prefill = 0  # a decode
        if stop is not None:
            end = min(end, float(stop))
            prefill = min(prefill, max(0, stop - settled))
        return Work(prefill, settled, max(0.0, end - settled - prefill))

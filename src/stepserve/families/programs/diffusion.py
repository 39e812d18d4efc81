"""The step program of masked diffusion models (LLaDA, Dream, SDAR, ...).

Source: DiLaServe B6 (recompute steps left), DiLaServe C8 (cache modes); the geometry of a step is
in ``core/denoising``, which offline runs share. Block-causal models (``CacheMode.BLOCK``) recompute
once, at the start, and may move on after any block: elsewhere they recompute what is finished.
"""

import math
from collections.abc import Sequence

from stepserve.core.denoising import canvas_tokens, due_step, lead_tokens
from stepserve.core.forecast import StepForecast
from stepserve.core.instance import Work
from stepserve.core.protocols import Batches
from stepserve.core.request import CacheMode, Progress, RefreshScope, Request
from stepserve.core.step import Mix, Step, StepKind, StepOutcome


class DiffusionProgram:
    """Heavy steps recompute the whole sequence, light steps denoise with cached KV."""

    chunked = False

    def start(self, request: Request) -> Progress:
        """The prompt is settled at once."""
        return Progress(settled=request.prompt_tokens)

    def thresholds(self, request: Request, grid: Sequence[float]) -> tuple[float, ...]:
        """The request's preferred threshold and floor, and what the grid has between them."""
        bounds = request.diffusion.thresholds
        between = {t for t in grid if bounds.floor < t < bounds.preferred}
        return tuple(sorted(between | {bounds.preferred, bounds.floor}, reverse=True))

    def advance(self, request: Request, progress: Progress, outcome: StepOutcome) -> Progress:
        """Progress after one denoising step."""
        return Progress(
            progress.settled + outcome.settled,
            outcome.emitted,
            progress.steps + 1,
            outcome.finished,
            outcome.confidence or progress.confidence,
        )

    def next_step(
        self, request: Request, progress: Progress, has_state: bool, threshold: float | None
    ) -> Step:
        """Recompute without a cache, without state, or where a block's refresh is due."""
        return due_step(request, progress.settled - request.prompt_tokens, has_state, threshold)

    def resume(self, request: Request, progress: Progress) -> Progress:
        """Settled tokens are all that is needed: the next step rebuilds the rest."""
        return progress

    def shorten(self, step: Step, tokens: int) -> Step | None:
        """Attention is bidirectional: a step over a part would compute something else."""
        return None

    def mix(self, steps: Sequence[Step]) -> Mix | None:
        """The time of a batch depends on its tokens (DiLaServe B2)."""
        return None

    def fuller_step(self, request: Request, progress: Progress, step: Step) -> Step | None:
        """The whole sequence, where a block opens with less (DiLaServe E3)."""
        options = request.diffusion
        inside = (progress.settled - request.prompt_tokens) % options.block_tokens
        if inside or options.cache_mode.exact or step.query_tokens == step.context_tokens:
            return None
        return step._replace(kind=StepKind.RECOMPUTE, query_tokens=step.context_tokens)

    def tokens_to_cut(self, request: Request, progress: Progress) -> int:
        """To the next recompute step; 0 without a cache (DiLaServe A2.5, DiLaServe C8).

        Of a block-causal model, to the end of the block.
        """
        options = request.diffusion
        if options.cache_mode is CacheMode.NONE:
            return 0
        if options.cache_mode is CacheMode.BLOCK:
            return -progress.settled % options.block_tokens
        refresh_tokens = options.refresh_blocks * options.block_tokens
        return (request.prompt_tokens - progress.settled) % refresh_tokens

    def heavy_left(self, request: Request, progress: Progress, output_tokens: float) -> float:
        """Refreshes not yet begun (``rec_left`` of DiLaServe B6); every step without a cache.

        Deviation: blocks are counted up to the expected output, not to the limit, because a
        request ends at its end-of-text token (DiLaServe E5).
        """
        options = request.diffusion
        if options.cache_mode is CacheMode.NONE:
            return math.inf
        if options.cache_mode is CacheMode.BLOCK:
            return float(progress.settled == request.prompt_tokens)
        begun = -((request.prompt_tokens - progress.settled) // options.block_tokens)
        blocks = math.ceil(output_tokens / options.block_tokens)
        refreshes = -(-blocks // options.refresh_blocks) - -(-begun // options.refresh_blocks)
        return float(max(0, refreshes))

    def batches_left(
        self,
        request: Request,
        progress: Progress,
        forecast: StepForecast,
        index: int,
        running_requests: int,
    ) -> Batches:
        """Steps of the mean of its heavy and light tokens."""
        steps = forecast.remaining(index, progress.steps)
        heavy = self.heavy_left(request, progress, forecast.output_tokens)
        share = min(1.0, heavy / steps)
        mean_tokens = share * self.heavy_tokens(request)
        mean_tokens += (1.0 - share) * self.light_tokens(request)
        return ((steps, round(mean_tokens * running_requests), running_requests, None),)

    def light_tokens(self, request: Request) -> int:
        """The block; the whole canvas, at most, in prefix mode. Openings may execute two."""
        if request.diffusion.cache_mode in (CacheMode.DUAL, CacheMode.BLOCK):
            return request.diffusion.block_tokens
        if request.diffusion.cache_mode is CacheMode.PREFIX:
            return canvas_tokens(request)
        return self.full_tokens(request)

    def heavy_tokens(self, request: Request) -> int:
        """What a refresh executes: everything, or the canvas alone once the prompt has KV.

        Of a block-causal model, what its first step does.
        """
        options = request.diffusion
        if options.refresh_scope is RefreshScope.OUTPUT:
            return canvas_tokens(request)
        if options.cache_mode is CacheMode.BLOCK:
            return request.prompt_tokens - lead_tokens(request) + options.block_tokens
        return self.full_tokens(request)

    def full_tokens(self, request: Request) -> int:
        """Prompt plus canvas; the canvas is the output limit in whole blocks."""
        return request.prompt_tokens + canvas_tokens(request)

    def work(
        self, request: Request, progress: Progress, forecast: StepForecast, stop: int | None
    ) -> Work:
        """Tokens of the recompute steps and number of the cached steps at the highest threshold."""
        steps = forecast.remaining(0, progress.steps)
        heavy = min(steps, self.heavy_left(request, progress, forecast.output_tokens))
        return Work(round(heavy * self.heavy_tokens(request)), progress.settled, steps - heavy)

    def kv_tokens(self, request: Request) -> int:
        """Every position with a cache, none without."""
        if request.diffusion.cache_mode is CacheMode.NONE:
            return 0
        return self.full_tokens(request)

"""Which tokens a denoising step executes: the geometry shared by schedulers and offline runs.

Source: dilaserve.md B4 (executed tokens) and C8 (cache modes).
"""

from stepserve.core.request import CacheMode, Request
from stepserve.core.step import Step, StepKind


def canvas_tokens(request: Request) -> int:
    """Output positions that are executed: the output limit in whole blocks."""
    block = request.diffusion.block_tokens
    return -(-request.max_output_tokens // block) * block


def due_step(request: Request, settled: int, has_state: bool, threshold: float | None) -> Step:
    """The step that is due once ``settled`` output tokens are settled.

    Blocks are denoised in order, every step settles at least one position and none beyond its
    block, so the count alone tells the block and whether it was begun. A recompute step
    executes everything: without a cache, without keys and values on the instance, or at the
    start of every ``refresh_blocks``-th block. A cached step executes the block (dual mode) or
    all from the block on (prefix mode).
    """
    options, canvas = request.diffusion, canvas_tokens(request)
    full = request.prompt_tokens + canvas
    block, inside = divmod(settled, options.block_tokens)
    refresh_due = inside == 0 and block % options.refresh_blocks == 0
    if options.cache_mode is CacheMode.NONE or not has_state or refresh_due:
        return Step(request.id, StepKind.RECOMPUTE, full, full, threshold)
    dual = options.cache_mode is CacheMode.DUAL
    query = options.block_tokens if dual else canvas - block * options.block_tokens
    return Step(request.id, StepKind.CACHED, query, full, threshold)

"""Which tokens a denoising step executes: the geometry shared by schedulers and offline runs.

Source: dilaserve.md B4 (executed tokens), C8 (cache modes), Part E 3 (what a refresh executes).
"""

from stepserve.core.request import CacheMode, RefreshScope, Request
from stepserve.core.step import Step, StepKind


def canvas_tokens(request: Request) -> int:
    """Output positions that are executed: the output limit in whole blocks."""
    block = request.diffusion.block_tokens
    return -(-request.max_output_tokens // block) * block


def due_step(request: Request, settled: int, has_state: bool, threshold: float | None) -> Step:
    """The step that is due once ``settled`` output tokens are settled.

    Blocks are denoised in order, every step settles at least one position and none beyond its
    block, so the count alone tells the block and whether it was begun. A recompute step is due
    without a cache, without keys and values on the instance, or at the start of every
    ``refresh_blocks``-th block; it executes the last ``query_tokens`` positions: everything, or
    the canvas alone when the scope is the output and the prompt has keys and values. A cached
    step executes the block (dual mode) or all from the block on (prefix mode).

    Where a block's refresh is skipped, the cached step that opens it executes the block before
    it, too (ours): the tokens that finished that block were masks when its keys and values were
    last computed. dKV-Cache delays caching for the same reason.
    """
    options, canvas = request.diffusion, canvas_tokens(request)
    full = request.prompt_tokens + canvas
    block, inside = divmod(settled, options.block_tokens)
    refresh_due = inside == 0 and block % options.refresh_blocks == 0
    if options.cache_mode is CacheMode.NONE or not has_state or refresh_due:
        output_only = has_state and options.refresh_scope is RefreshScope.OUTPUT
        return Step(
            request.id, StepKind.RECOMPUTE, canvas if output_only else full, full, threshold
        )
    dual = options.cache_mode is CacheMode.DUAL
    query = options.block_tokens if dual else canvas - block * options.block_tokens
    if inside == 0:
        query += options.block_tokens
    return Step(request.id, StepKind.CACHED, query, full, threshold)

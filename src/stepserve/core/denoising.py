"""Which tokens a denoising step executes: the geometry shared by schedulers and offline runs.

Source: DiLaServe B4 (executed tokens), DiLaServe C8 (cache modes), DiLaServe E3 (what a refresh
executes).
"""

from stepserve.core.request import CacheMode, RefreshScope, Request
from stepserve.core.step import Step, StepKind

# Asked at every step of every request: a name of the module is read in half the time.
_NONE, _DUAL, _BLOCK = CacheMode.NONE, CacheMode.DUAL, CacheMode.BLOCK
_RECOMPUTE, _CACHED = StepKind.RECOMPUTE, StepKind.CACHED


def lead_tokens(request: Request) -> int:
    """Prompt tokens in the block that the output begins in.

    Block-causal models count blocks from position 0 (JetAstra/SDAR, NVlabs/Fast-dLLM,
    inclusionAI/dInfer); for the others a block is only the order in which to denoise.
    """
    options = request.diffusion
    return request.prompt_tokens % options.block_tokens if options.cache_mode is _BLOCK else 0


def canvas_tokens(request: Request) -> int:
    """Output positions that are executed: the output limit in whole blocks."""
    block, lead = request.diffusion.block_tokens, lead_tokens(request)
    return -(-(lead + request.max_output_tokens) // block) * block - lead


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

    Of a block-causal model nothing behind the current block is ever looked at, and what lies
    before it is final: a recompute step is due without keys and values alone, and executes all
    up to the end of the block. The step that opens a block executes the finished one, too.
    """
    options = request.diffusion
    block_tokens, cache_mode = options.block_tokens, options.cache_mode
    if cache_mode is _BLOCK:
        block, inside = divmod(request.prompt_tokens + settled, block_tokens)
        context = (block + 1) * block_tokens
        if not has_state:
            return Step(request.id, _RECOMPUTE, context, context, threshold)
        query = block_tokens if inside else 2 * block_tokens
        return Step(request.id, _CACHED, query, context, threshold)
    canvas = -(-request.max_output_tokens // block_tokens) * block_tokens  # canvas_tokens
    full = request.prompt_tokens + canvas
    block, inside = divmod(settled, block_tokens)
    refresh_due = inside == 0 and block % options.refresh_blocks == 0
    if refresh_due or not has_state or cache_mode is _NONE:
        output_only = has_state and options.refresh_scope is RefreshScope.OUTPUT
        return Step(request.id, _RECOMPUTE, canvas if output_only else full, full, threshold)
    query = block_tokens if cache_mode is _DUAL else canvas - block * block_tokens
    if inside == 0:
        query += block_tokens
    return Step(request.id, _CACHED, query, full, threshold)

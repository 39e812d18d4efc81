"""What a request of a class costs: its steps of each kind, and the tokens that they execute.

Heavy steps recompute all keys and values, one per block; light steps reuse them. Without a
cache all steps are heavy (DiLaServe B4, DiLaServe C8), of a block-causal model the first alone.
"""

import bisect
import math

from stepserve.core.plan import PlanProblem, WorkloadClass
from stepserve.core.request import CacheMode


def block_count(problem: PlanProblem, c: WorkloadClass) -> int:
    """Blocks of the output, each opened by one recompute step."""
    return math.ceil(c.output_tokens / problem.block_tokens)


def light_tokens(problem: PlanProblem, c: WorkloadClass) -> float:
    """Tokens that a cached step executes; in prefix mode the mean of a shrinking suffix."""
    block = float(problem.block_tokens)
    return max(block, c.output_tokens / 2) if problem.cache_mode is CacheMode.PREFIX else block


def heavy_steps(problem: PlanProblem, c: WorkloadClass) -> float:
    """Recompute steps of a request that has a cache."""
    return 1.0 if problem.cache_mode is CacheMode.BLOCK else float(block_count(problem, c))


def yields(problem: PlanProblem, c: WorkloadClass) -> tuple[float, ...]:
    """Tokens that a step settles at each threshold: at most what a block has."""
    limit = c.output_tokens / block_count(problem, c)
    return tuple(min(tokens, limit) for tokens in problem.tokens_per_step)


def step_counts(problem: PlanProblem, c: WorkloadClass, tokens: float) -> tuple[float, float]:
    """(heavy, light) steps of a request whose steps settle this many tokens."""
    steps = c.output_tokens / tokens
    if problem.cache_mode is CacheMode.NONE:
        return steps, 0.0
    heavy = heavy_steps(problem, c)
    return heavy, max(0.0, steps - heavy)


def step_s(table: tuple[tuple[int, float], ...], tokens: float) -> float:
    """Seconds at the next profiled size (DiLaServe B2: profiles are jagged, never smoothed).

    Infinite beyond the table.
    """
    index = bisect.bisect_left(table, (tokens,))
    return table[index][1] if index < len(table) else math.inf

"""Stage 1 of the planner: how many instances of each TP degree (DiLaServe B8, DiLaServe C7).

In steady state every request of class k runs ``heavy`` (recompute) and ``light`` (cached) steps.
The program chooses at which threshold each step runs, on which degree, and how large the
batches of each kind are on each degree. Batch size is the trade: a large batch uses a GPU well
and makes every step of it slow. Objectives, one after another: highest mean threshold; most
slack; fewest instances.

Linear by DiLaServe C7: a column ``work`` counts the steps of one class run in one size of batch on
one degree, and is zero unless that size was chosen. Deviations from the published program:

- Constraint 8 counts one *recompute* per block. The artifact fixes the number of *cached* steps
  instead, which makes nearly all steps expensive; ``StepSplit.AS_PUBLISHED`` does the same.
- Nodes of the same size share their columns (instances per way to split a node), which leaves
  the optimum and removes the symmetry of identical nodes.
- The SLO is a hard row. ``late=True`` turns the order round for an SLO that nothing can meet:
  least lateness, then threshold (the newer artifact lets slack go negative below threshold).
- Blocks are rounded up; a batch holds at least one whole step of either kind; a step settles at
  most the block. Cached steps in prefix mode execute half the output (DiLaServe B8).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from stepserve.core.plan import BATCH_SIZES, PlanProblem
from stepserve.core.request import CacheMode

from .highs_ilp import UNBOUNDED, Expression, Model, value
from .layouts import partitions
from .steps import heavy_steps, light_tokens, step_s, yields

_TOLERANCE = 1e-6


class StepSplit(StrEnum):
    """Which kind of step there is exactly one of per block."""

    CORRECTED = "corrected"  # recompute steps: what the cache really does
    AS_PUBLISHED = "as_published"  # cached steps: the artifact's constraint 8


@dataclass(frozen=True, slots=True)
class Capacity:
    """A layout and what it can do. ``latency_s``: mean latency of each class.

    ``use`` is the share of all instance-seconds that the planned load takes.
    """

    instances: Counter[int]
    mean_threshold: float
    slack: float
    latency_s: tuple[float, ...]
    use: float


@dataclass(frozen=True, slots=True)
class _Kind:
    """Heavy or light steps: per class, tokens executed, most steps, and exact steps if fixed."""

    tokens: tuple[float, ...]
    most: tuple[float, ...]
    exact: tuple[float, ...] | None


@dataclass(frozen=True, slots=True)
class CapacityIlp:
    """``gap`` and ``time_limit_s`` hold for each of the three solves (DiLaServe B1: 1 %, 20 s)."""

    split: StepSplit = StepSplit.CORRECTED
    batch_tokens: tuple[int, ...] = BATCH_SIZES
    gap: float = 0.01
    time_limit_s: float = 20.0

    def solve(
        self,
        problem: PlanProblem,
        instances: Mapping[int, int] | None = None,
        *,
        late: bool = False,
    ) -> Capacity | None:
        """The best layout, or the best use of the given one; ``None`` if it cannot be done.

        ``late``: allow latency beyond the SLO. Raises SolverTimeoutError.
        """
        return _Program(self, problem, instances, late).solve()


class _Program:
    """The columns and rows of one problem."""

    def __init__(
        self,
        config: CapacityIlp,
        problem: PlanProblem,
        instances: Mapping[int, int] | None,
        late: bool,
    ) -> None:
        self._problem = problem
        self._late = late
        self._model = Model(config.gap, config.time_limit_s)
        total_per_s = sum(c.rate_per_s for c in problem.classes)
        self._shares = [c.rate_per_s / total_per_s for c in problem.classes]
        self._threshold: dict[int, float] = {}  # mean threshold
        self._latency: list[dict[int, float]] = [{} for _ in problem.classes]
        self._load: dict[int, dict[int, float]] = {g: {} for g in problem.tp_degrees}
        self._instances = self._add_layout(instances)
        settled: list[dict[int, float]] = [{} for _ in problem.classes]
        for kind in _kinds(problem, config.split):
            steps = self._add_thresholds(kind, settled)
            for degree in problem.tp_degrees:
                self._add_work(kind, steps, degree, config.batch_tokens)
            for terms in steps:
                self._model.row(terms, 0.0, 0.0)  # steps at thresholds = steps on degrees
        for k, c in enumerate(problem.classes):
            self._model.row(settled[k], c.output_tokens, c.output_tokens)
            self._model.row(self._latency[k], upper=UNBOUNDED if late else c.slo_s)
        for degree, column in self._instances.items():
            self._model.row({**self._load[degree], column: -1.0}, upper=0.0)

    def _add_layout(self, given: Mapping[int, int] | None) -> dict[int, int]:
        """A column per degree: its instances, given or made of whole nodes."""
        problem, model = self._problem, self._model
        if given is not None:
            fixed = {g: float(given.get(g, 0)) for g in problem.tp_degrees}
            return {g: model.column(count, count) for g, count in fixed.items()}
        columns = {g: model.column() for g in problem.tp_degrees}
        sums: dict[int, dict[int, float]] = {g: {columns[g]: -1.0} for g in problem.tp_degrees}
        for gpus, nodes in sorted(Counter(problem.gpus_per_node).items()):
            split: dict[int, float] = {}
            for partition in partitions(gpus, problem.tp_degrees):
                column = model.column(whole=True)
                split[column] = 1.0
                for degree, count in Counter(partition).items():
                    sums[degree][column] = count
            model.row(split, nodes, nodes)
        for terms in sums.values():
            model.row(terms, 0.0, 0.0)
        return columns

    def _add_thresholds(
        self, kind: _Kind, settled: list[dict[int, float]]
    ) -> list[dict[int, float]]:
        """Columns for the steps of each class at each threshold; their sums, one per class."""
        problem = self._problem
        sums: list[dict[int, float]] = []
        for k, c in enumerate(problem.classes):
            terms: dict[int, float] = {}
            for threshold, tokens in zip(problem.thresholds, yields(problem, c), strict=True):
                column = self._model.column()
                terms[column] = 1.0
                settled[k][column] = tokens
                self._threshold[column] = self._shares[k] * threshold * tokens / c.output_tokens
            if kind.exact is not None:
                self._model.row(terms, kind.exact[k], kind.exact[k])
            sums.append(terms)
        return sums

    def _add_work(
        self, kind: _Kind, steps: list[dict[int, float]], degree: int, sizes: tuple[int, ...]
    ) -> None:
        """Columns for the steps run on one degree, in each size of batch; one size is chosen."""
        problem, model = self._problem, self._model
        gpus = sum(problem.gpus_per_node)
        chosen: dict[int, float] = {}
        for size, seconds in batches(problem.step_s[degree], sizes, max(kind.tokens)):
            choice = model.column(0.0, 1.0, whole=True)
            chosen[choice] = 1.0
            load: dict[int, float] = {choice: -float(gpus // degree)}
            for k, c in enumerate(problem.classes):
                work = model.column()
                model.row({work: 1.0, choice: -kind.most[k]}, upper=0.0)
                steps[k][work] = -1.0
                self._latency[k][work] = seconds
                load[work] = c.rate_per_s * kind.tokens[k] * seconds / size
                self._load[degree][work] = load[work]
            model.row(load, upper=0.0)  # implied by the row above; makes the relaxation tight
        model.row(chosen, 1.0, 1.0)

    def solve(self) -> Capacity | None:
        """Three objectives, each held while the next is improved."""
        problem = self._problem
        slack: dict[int, float] = {}  # less its constant
        for share, c, terms in zip(self._shares, problem.classes, self._latency, strict=True):
            slack.update({column: -share * s / c.slo_s for column, s in terms.items()})
        fewest = dict.fromkeys(self._instances.values(), -1.0)
        order: list[Expression] = [self._threshold, slack, fewest]
        if self._late:
            order = [slack, self._threshold, fewest]
        values: list[float] | None = None
        for objective in order:
            values = self._model.maximise(objective)
            if values is None:
                return None
            best = value(objective, values)
            self._model.row(objective, lower=best - _TOLERANCE * max(1.0, abs(best)))
        assert values is not None
        instances = {g: round(values[column]) for g, column in self._instances.items()}
        load = sum(value(terms, values) for terms in self._load.values())
        return Capacity(
            instances=Counter({g: n for g, n in instances.items() if n}),
            mean_threshold=value(self._threshold, values),
            slack=1.0 + value(slack, values),
            latency_s=tuple(value(terms, values) for terms in self._latency),
            use=load / sum(instances.values()),
        )


def _kinds(problem: PlanProblem, split: StepSplit) -> tuple[_Kind, ...]:
    """The kinds of step there are: without a cache only heavy ones."""
    blocks = tuple(heavy_steps(problem, c) for c in problem.classes)
    full = tuple(float(c.full_tokens) for c in problem.classes)
    most = tuple(c.output_tokens / min(yields(problem, c)) for c in problem.classes)
    if problem.cache_mode is CacheMode.NONE:
        return (_Kind(full, most, None),)
    others = tuple(m - b for m, b in zip(most, blocks, strict=True))
    light = tuple(light_tokens(problem, c) for c in problem.classes)
    if split is StepSplit.CORRECTED:
        return (_Kind(full, blocks, blocks), _Kind(light, others, None))
    return (_Kind(full, others, None), _Kind(light, blocks, blocks))


def batches(
    table: tuple[tuple[int, float], ...], sizes: tuple[int, ...], least: float
) -> list[tuple[int, float]]:
    """(tokens, seconds) of the batches to choose from: at least one step, at most profiled.

    Without those that are no faster than a larger one: nobody would choose them.
    """
    largest = table[-1][0]
    found: list[tuple[int, float]] = []
    for size in sorted({size for size in sizes if least <= size < largest} | {largest}):
        seconds = step_s(table, size)
        found = [(n, s) for n, s in found if s < seconds]
        found.append((size, seconds))
    return found

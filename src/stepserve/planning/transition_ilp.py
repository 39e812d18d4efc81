"""Stage 2 of the planner: which GPUs, so that most instances stay (DiLaServe B8).

The published program places every GPU in a slot. Here a column says how a node is split, which
also fixes how many of its instances can stay, whatever GPUs they are on; the free GPUs then
form the new ones. The optimum is the same, and the program has no symmetry within a node.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from stepserve.core.plan import PlanProblem, Slot

from .highs_ilp import Model
from .layouts import arrange, kept, partitions


@dataclass(frozen=True, slots=True)
class TransitionIlp:
    """Solved to optimality: it is small. ``time_limit_s`` as in stage 1."""

    time_limit_s: float = 20.0

    def slots(self, problem: PlanProblem, instances: Mapping[int, int]) -> tuple[Slot, ...]:
        """The layout with these instances that keeps most of ``problem.present``.

        Of equally good ones, that with the large instances on the first nodes. Raises
        SolverTimeoutError, and ValueError if the nodes cannot be split so.
        """
        nodes = len(problem.gpus_per_node)
        tie = 1.0 / (1.0 + nodes * sum(problem.gpus_per_node))  # all ties together: below one
        model = Model(0.0, self.time_limit_s)
        objective: dict[int, float] = {}
        totals: dict[int, dict[int, float]] = {degree: {} for degree in problem.tp_degrees}
        splits = [partitions(gpus, problem.tp_degrees) for gpus in problem.gpus_per_node]
        choices = []
        for node, options in enumerate(splits):
            columns = [model.column(0.0, 1.0, whole=True) for _ in options]
            model.row(dict.fromkeys(columns, 1.0), 1.0, 1.0)
            choices.append(columns)
            for column, partition in zip(columns, options, strict=True):
                stay = kept(problem.present, node, partition)
                objective[column] = stay - tie * (nodes - 1 - node) * len(partition)
                for degree in partition:
                    totals[degree][column] = totals[degree].get(column, 0.0) + 1.0
        for degree, terms in totals.items():
            model.row(terms, instances.get(degree, 0), instances.get(degree, 0))
        values = model.maximise(objective)
        if values is None:
            raise ValueError(f"no split of the nodes has instances {dict(instances)}")
        chosen = [
            next(p for column, p in zip(columns, options, strict=True) if values[column] > 0.5)
            for columns, options in zip(choices, splits, strict=True)
        ]
        return arrange(problem, chosen)

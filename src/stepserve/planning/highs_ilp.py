"""A mixed-integer linear program, solved by HiGHS: one thread, fixed seed, same answer."""

from collections.abc import Mapping
from typing import Any

import highspy
import numpy as np

from stepserve.core.errors import StepserveError

Expression = Mapping[int, float]
"""A sum of columns, each with its coefficient."""

UNBOUNDED = highspy.kHighsInf


class SolverTimeoutError(StepserveError):
    """The time limit passed before any solution was found; nothing is known of feasibility."""


class Model:
    """Columns and rows are added one by one; every ``maximise`` continues from the last.

    ``gap`` is the relative distance to the proven bound at which a solution is good enough.
    """

    def __init__(self, gap: float, time_limit_s: float) -> None:
        # Not ``highspy.Highs``: its callbacks print a banner on stdout.
        self._highs: Any = highspy._core._Highs()
        options: dict[str, Any] = {
            "output_flag": False,
            "threads": 1,
            "random_seed": 0,
            "mip_rel_gap": gap,
            "time_limit": time_limit_s,
        }
        for name, value in options.items():
            self._highs.setOptionValue(name, value)
        self._columns = 0

    def column(self, lower: float = 0.0, upper: float = UNBOUNDED, *, whole: bool = False) -> int:
        """A new variable; its index."""
        self._highs.addVar(lower, upper)
        if whole:
            self._highs.changeColIntegrality(self._columns, highspy.HighsVarType.kInteger)
        self._columns += 1
        return self._columns - 1

    def row(self, terms: Expression, lower: float = -UNBOUNDED, upper: float = UNBOUNDED) -> None:
        """A new constraint: ``lower <= terms <= upper``."""
        columns = np.fromiter(terms.keys(), np.int32, len(terms))
        values = np.fromiter(terms.values(), np.float64, len(terms))
        self._highs.addRow(lower, upper, len(terms), columns, values)

    def maximise(self, terms: Expression) -> list[float] | None:
        """The best values found, or ``None`` if there are none. Raises SolverTimeoutError."""
        costs = np.zeros(self._columns)
        costs[list(terms)] = list(terms.values())
        indices = np.arange(self._columns, dtype=np.int32)
        self._highs.changeColsCost(self._columns, indices, costs)
        self._highs.changeObjectiveSense(highspy.ObjSense.kMaximize)
        self._highs.run()
        status = self._highs.getModelStatus()
        if self._highs.getInfo().primal_solution_status == highspy.kSolutionStatusFeasible:
            return list(self._highs.getSolution().col_value)
        if status == highspy.HighsModelStatus.kTimeLimit:
            raise SolverTimeoutError("the solver's time limit passed without a solution")
        known = highspy.HighsModelStatus
        if status not in (known.kInfeasible, known.kUnboundedOrInfeasible):  # never unbounded
            raise StepserveError(f"the solver stopped: {self._highs.modelStatusToString(status)}")
        return None


def value(terms: Expression, values: list[float]) -> float:
    """The expression at these column values."""
    return sum(factor * values[column] for column, factor in terms.items())

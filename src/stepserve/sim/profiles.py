"""What a step takes on the published hardware: step tables, and the host time beside them.

Source: DiLaServe B2 (profiles), DiLaServe D1 (the coherent set), DiLaServe D5 (host overhead),
DiLaServe D9 (round up, do not smooth). Deviations, each named in the profile's ``source``:

- Dream-7B was measured at TP1 only; TP2 and TP4 are its TP1 times divided by LLaDA-8B's
  speed-ups at the same size.
- ``GH200-graphs`` (the GH200 with CUDA graphs) is derived from a few published points.
- Without the data folder the published extract is used, linear between its rows, on the
  profiles' own grid of 32 tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from stepserve.core.bounds import Bounded, FiniteNotNegative
from stepserve.core.errors import FieldError
from stepserve.cost.step_table import StepProfile
from stepserve.sim.data import data_file, facts, rows_of
from stepserve.sim.outside import is_outside, outside

GRID_TOKENS = 32
MAX_TOKENS = 8192
MODELS = {"llada-8b": "LLaDA-8B-Instruct", "dream-7b": "Dream-v0-Instruct-7B"}
"""Our names of the models, and those of the published files."""

Points = dict[int, float]


def step_profile(gpu: str, model: str, tp: int) -> StepProfile:
    """The step table of ``gpu`` (H100, GH200, GH200-graphs), ``model`` and TP degree (1, 2, 4).

    Raises FieldError naming the part for which nothing was published.
    """
    if model not in MODELS:
        raise FieldError("model", f"no profile of {model!r}; known: {', '.join(MODELS)}")
    if tp not in (1, 2, 4):
        raise FieldError("tp", f"no profile at TP degree {tp}; known: 1, 2, 4")
    if gpu not in ("H100", "GH200", "GH200-graphs") or (model, gpu[:2]) == ("dream-7b", "GH"):
        raise FieldError("gpu", f"no profile of {model} on {gpu!r}")
    if model == "dream-7b" and tp > 1:
        return _scaled_dream(tp)
    if gpu == "GH200-graphs":
        return _with_graphs(tp)
    points, source = _points(gpu, model, tp)
    return _profile(points, source)


def profiles(
    hardware: str, model: str, degrees: Sequence[int] = (1, 2, 4)
) -> dict[int, StepProfile]:
    """The step tables of hardware by TP degree; host overhead included.

    Those of published hardware are all there are; of a file (``NAME.json``) the ``degrees`` needed.
    Raises FieldError for hardware, or a degree of it, of which nothing is known.
    """
    if hardware.endswith(".json"):
        return {degree: measured_profile(Path(hardware), degree) for degree in degrees}
    if is_outside("hardware", hardware):
        part = outside("hardware", hardware, "setting.hardware")
        return {degree: part.profile(model, degree) for degree in degrees}
    overhead = host_overhead(hardware)
    return {
        degree: replace(
            step_profile(hardware, model, degree),
            host_s=overhead.base_s,
            host_row_s=overhead.per_row_s,
        )
        for degree in sorted({1, 2, 4, *degrees})
    }


def measured_profile(path: Path, tp: int) -> StepProfile:
    """The table of a file, which `stepserve profile` or ``benchmarks/gpu`` wrote, at a TP degree.

    That of degree 2, 3, ... is beside that of degree 1: ``NAME_tp2.json``. Its seconds are those of
    whole steps, so there is no host overhead to add. Raises FieldError for a missing file.
    """
    file = path if tp == 1 else path.with_name(f"{path.stem}_tp{tp}.json")
    if not file.is_file():
        raise FieldError(
            "setting.hardware", f"no file {file} says how fast steps are at TP degree {tp}"
        )
    return StepProfile.load(file)


def _profile(points: Points, source: str) -> StepProfile:
    return StepProfile(tuple(points), tuple(points.values()), source)


def _points(gpu: str, model: str, tp: int) -> tuple[Points, str]:
    """Seconds by tokens, on the grid, and where they come from."""
    path = data_file("dlm/step_latency.csv")
    name = f"{MODELS[model]} on {gpu}, TP{tp}, without CUDA graphs"
    if path is not None:
        wanted = (gpu, MODELS[model], str(tp), "false", "default")
        keys = ("gpu", "model", "tp", "cuda_graph", "cache_variant")
        with rows_of(path) as table:
            rows = [r for r in table if tuple(r[k] for k in keys) == wanted]
            points = {int(r["tokens"]): float(r["seconds"]) for r in rows}
        return dict(sorted(points.items())), f"published profile, all points: {name}"
    shipped = facts("profiles")
    table = shipped["tables"][f"{gpu}/{model}/{tp}"]
    sizes, milliseconds = zip(*table, strict=True)
    grid = range(GRID_TOKENS, MAX_TOKENS + 1, GRID_TOKENS)
    seconds = np.interp(grid, sizes, milliseconds) / 1e3
    points = {size: float(s) for size, s in zip(grid, seconds, strict=True)}
    return points, f"published extract, linear between {len(table)} rows: {name}"


def _scaled_dream(tp: int) -> StepProfile:
    own, source = _points("H100", "dream-7b", 1)
    one, _ = _points("H100", "llada-8b", 1)
    many, _ = _points("H100", "llada-8b", tp)
    points = {size: seconds * many[size] / one[size] for size, seconds in own.items()}
    return _profile(points, f"{source}; scaled by LLaDA-8B's speed-up at TP{tp} (not measured)")


def _with_graphs(tp: int) -> StepProfile:
    points, source = _points("GH200", "llada-8b", tp)
    derived = facts("profiles")["gh200_graphs"]
    floor_s = derived["floor_ms"][str(tp)] / 1e3
    per_token_s = derived["us_per_token"][str(tp)] / 1e6
    graphs = {n: min(s, max(floor_s, per_token_s * n)) for n, s in points.items()}
    return _profile(graphs, f"{source}; CUDA graphs {derived['source']}")


@dataclass(frozen=True, slots=True)
class HostOverhead(Bounded, path="overhead"):
    """Seconds a step takes beside its profile: ``base_s`` plus ``per_row_s`` per further row.

    ``base_s`` makes the unloaded latency the published one (DiLaServe D5); ``per_row_s`` is
    what grows with the batch (scheduling, sampling and bookkeeping per request), fitted to the
    load at which the published baseline breaks (experiments/calibration).
    """

    base_s: FiniteNotNegative = 0.0
    per_row_s: FiniteNotNegative = 0.0

    def seconds(self, rows: int) -> float:
        """Host seconds of a step of so many requests; 0 for none."""
        return self.base_s + self.per_row_s * (rows - 1) if rows > 0 else 0.0


def host_overhead(gpu: str) -> HostOverhead:
    """The calibrated overhead of a GPU's published runs."""
    known = facts("overheads")["overheads"]
    if gpu not in known:
        raise FieldError("gpu", f"no calibrated overhead of {gpu!r}; known: {', '.join(known)}")
    return HostOverhead(**known[gpu])

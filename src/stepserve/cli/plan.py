"""``stepserve plan``: which tensor-parallel layout should a cluster have for this load?"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepserve.cli.options import check_numbers, check_output, option, write_json
from stepserve.control.plan_demand import HEADROOM
from stepserve.core.bounds import AT_LEAST_0, AT_LEAST_1
from stepserve.core.config import ControlConfig
from stepserve.core.errors import FieldError
from stepserve.core.plan import PlanProblem, Slot, WorkloadClass
from stepserve.core.request import CacheMode
from stepserve.files import read_toml

TOKENS_PER_STEP = (3.02, 3.89, 4.77, 5.65, 6.58)
"""LLaDA-8B at 0.9 .. 0.5 with the dual cache: the published planner's own (DiLaServe B3)."""

PUBLISHED = "H100/llada-8b"
NAMED_DEGREES = (1, 2, 4)
_NUMBERS = {
    "nodes": AT_LEAST_1,
    "gpus": AT_LEAST_1,
    "headroom": AT_LEAST_1,
    "overhead_ms": AT_LEAST_0,
}
TOLERANCE_S = 1e-6
"""The solver's; a latency within it of the SLO is in time."""
_EXAMPLES = """\
examples:
  stepserve plan --rate 8 --prompt-tokens 1062 --output-tokens 256 --slo-s 9.5 --nodes 4 --gpus 4
  stepserve plan --workload classes.toml --nodes 2 --profile 1=tp1.json --profile 2=tp2.json

classes.toml has one table per kind of request:
  [[class]]
  prompt_tokens = 1062
  output_tokens = 256
  slo_s = 9.5
  rate_per_s = 8.0
"""


@dataclasses.dataclass(frozen=True, slots=True)
class LayoutEstimate:
    """What stage 1 plans for a layout. ``None`` for the rest if it cannot carry the load.

    Planned, not measured: mean latencies of a steady state, without queueing.
    """

    slots: tuple[Slot, ...]
    mean_threshold: float | None = None
    slack: float | None = None
    use: float | None = None
    latency_s: tuple[float, ...] | None = None

    def met(self, classes: Sequence[WorkloadClass]) -> float:
        """Share of requests whose class has its planned mean latency within the SLO."""
        if self.latency_s is None:
            return 0.0
        pairs = zip(classes, self.latency_s, strict=True)
        met = sum(c.rate_per_s for c, latency_s in pairs if latency_s <= c.slo_s + TOLERANCE_S)
        return met / sum(c.rate_per_s for c in classes)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "plan",
        help="find the tensor-parallel layout for a load, and what it is worth",
        description="Plan how many instances of which TP degree a cluster should run.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    load = parser.add_argument_group("load")
    load.add_argument("--workload", type=Path, metavar="FILE", help="several classes, as TOML")
    load.add_argument("--rate", type=float, help="requests per second")
    load.add_argument("--prompt-tokens", type=int, help="mean prompt length")
    load.add_argument("--output-tokens", type=int, help="mean output length")
    load.add_argument("--slo-s", type=float, help="end-to-end deadline in seconds")
    load.add_argument(
        "--headroom", type=float, default=HEADROOM, help="planned over stated rate (default 1.5)"
    )
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--nodes", type=int, default=1, help="number of nodes (default 1)")
    cluster.add_argument("--gpus", type=int, default=4, help="GPUs of each node (default 4)")
    cluster.add_argument("--tp", type=int, nargs="+", metavar="DEGREE", help="allowed TP degrees")
    cluster.add_argument(
        "--profile",
        action="append",
        metavar="NAME|DEGREE=FILE",
        help=f"'published' ({PUBLISHED}), another GPU/MODEL of the published profiles, or one "
        "step-time table per TP degree as `stepserve profile` writes it",
    )
    cluster.add_argument(
        "--overhead-ms",
        type=float,
        help="host time of a step beside its profile (default: calibrated for a named profile)",
    )
    model = parser.add_argument_group("model")
    model.add_argument("--cache", choices=list(CacheMode), default=CacheMode.DUAL)
    model.add_argument("--block-tokens", type=int, default=32)
    model.add_argument("--thresholds", type=float, nargs="+", default=ControlConfig().thresholds)
    model.add_argument(
        "--tokens-per-step",
        type=float,
        nargs="+",
        help="tokens that a step settles at each threshold (default: LLaDA-8B)",
    )
    parser.add_argument(
        "--planner",
        choices=["two_stage", "as_published", "greedy"],
        default="two_stage",
        help="as_published: with the artifact's own count of cached steps",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Plan, compare with the smallest instances everywhere, print; 1 if no layout is enough.

    Raises FieldError.
    """
    from stepserve.planning.capacity_ilp import CapacityIlp, StepSplit
    from stepserve.planning.greedy import GreedyPlanner
    from stepserve.planning.layouts import arrange, counts, partitions
    from stepserve.planning.two_stage import TwoStagePlanner

    check_output("--json", args.json)
    published = args.planner == "as_published"
    stage = CapacityIlp(StepSplit.AS_PUBLISHED if published else StepSplit.CORRECTED)
    planner = GreedyPlanner() if args.planner == "greedy" else TwoStagePlanner(capacity=stage)
    problem, source = _problem(args)

    def estimate(slots: tuple[Slot, ...]) -> LayoutEstimate:
        instances = counts(slots)
        found = stage.solve(problem, instances) or stage.solve(problem, instances, late=True)
        if found is None:
            return LayoutEstimate(slots)
        values = found.mean_threshold, found.slack, found.use, found.latency_s
        return LayoutEstimate(slots, *values)

    splits = [partitions(gpus, problem.tp_degrees) for gpus in problem.gpus_per_node]
    smallest = arrange(problem, [max(options, key=len) for options in splits])
    plan = planner.target(dataclasses.replace(problem, present=smallest))
    optimum = TwoStagePlanner(capacity=stage).target(problem)
    estimates = {"recommended": estimate(plan.slots), "smallest": estimate(smallest)}
    estimates["optimum"] = estimate(optimum.slots)
    print(_text(problem, source, plan.why, estimates))
    write_json("--json", args.json, _as_json(problem, source, plan.why, estimates))
    if unmet := _unmet(problem, estimates["optimum"]):
        print(unmet)
    return 1 if unmet else 0


def _problem(args: argparse.Namespace) -> tuple[PlanProblem, str]:
    """The problem that the options state, and where its step times are from."""
    check_numbers(args, _NUMBERS)
    yields = args.tokens_per_step
    if yields is None:
        if tuple(args.thresholds) != ControlConfig().thresholds:
            raise FieldError("--tokens-per-step", "needed for thresholds of your own")
        yields = TOKENS_PER_STEP
    tables, source = _profiles(args)
    try:
        return PlanProblem(
            gpus_per_node=(args.gpus,) * args.nodes,
            tp_degrees=tuple(sorted(tables)),
            classes=_classes(args),
            thresholds=tuple(args.thresholds),
            tokens_per_step=tuple(yields),
            step_s=tables,
            block_tokens=args.block_tokens,
            cache_mode=CacheMode(args.cache),
        ), source
    except FieldError as error:
        options = {"tp_degrees": "--tp", "thresholds": "--thresholds"}
        options |= {"tokens_per_step": "--tokens-per-step", "block_tokens": "--block-tokens"}
        name = options.get(error.field, error.field)
        if error.field.startswith("step_s"):
            name = "--profile"
        raise FieldError(name, error.message) from error


def _classes(args: argparse.Namespace) -> tuple[WorkloadClass, ...]:
    """The workload, with headroom."""
    names = ("prompt_tokens", "output_tokens", "slo_s", "rate")
    if args.workload is None:
        for name in names:
            if getattr(args, name) is None:
                raise FieldError(option(name), "needed, unless --workload names a file")
        rows = [{name: getattr(args, name) for name in names}]
        rows[0]["rate_per_s"] = rows[0].pop("rate")
        return (_class(rows[0], "--", args.headroom),)
    given = [name for name in names if getattr(args, name) is not None]
    if given:
        raise FieldError(option(given[0]), "is in the file of --workload")
    table = read_toml(args.workload, "--workload")
    classes = table.get("class")
    if not isinstance(classes, list) or not classes:
        raise FieldError("--workload", f"{args.workload} has no [[class]] table")
    return tuple(
        _class(row, f"--workload: class[{i}].", args.headroom) for i, row in enumerate(classes)
    )


def _class(row: Mapping[str, Any], prefix: str, headroom: float) -> WorkloadClass:
    """One class. Raises FieldError with the name that the user gave it."""
    wanted = {"prompt_tokens": int, "output_tokens": int, "slo_s": float, "rate_per_s": float}
    if not isinstance(row, Mapping):
        raise FieldError(prefix.removesuffix("."), "must be a table, written [[class]]")
    for name in row:
        if name not in wanted:
            raise FieldError(f"{prefix}{name}", f"unknown key; known: {', '.join(wanted)}")
    for name, kind in wanted.items():
        allowed = int if kind is int else (int, float)
        if not isinstance(row.get(name), allowed) or isinstance(row[name], bool):
            raise FieldError(f"{prefix}{name}", f"needed, as {kind.__name__}")
    values = {**row, "rate_per_s": headroom * row["rate_per_s"]}
    try:
        return WorkloadClass(**values)
    except FieldError as error:
        name = error.field
        if prefix == "--":
            raise FieldError(option(name.removesuffix("_per_s")), error.message) from error
        raise FieldError(f"{prefix}{name}", error.message) from error


Tables = dict[int, tuple[tuple[int, float], ...]]


def _profiles(args: argparse.Namespace) -> tuple[Tables, str]:
    """Step times by TP degree, host overhead included."""
    from stepserve.cost.step_table import StepProfile
    from stepserve.sim.profiles import step_profile

    given = args.profile or ["published"]
    overhead_s = 0.0
    found: dict[int, StepProfile] = {}
    if len(given) == 1 and "=" not in given[0]:
        name = PUBLISHED if given[0] == "published" else given[0]
        gpu, _, model = name.partition("/")
        try:
            found = {tp: step_profile(gpu, model, tp) for tp in args.tp or NAMED_DEGREES}
        except FieldError as error:
            raise FieldError(
                "--tp" if error.field == "tp" else "--profile", error.message
            ) from error
        overhead_s = _calibrated_s(gpu)
    else:
        files = dict(_degree_file(text) for text in given)
        for tp in args.tp or sorted(files):
            if tp not in files:
                raise FieldError("--profile", f"no table for TP degree {tp}: add {tp}=FILE")
            found[tp] = _load(files[tp])
    if args.overhead_ms is not None:
        overhead_s = args.overhead_ms / 1e3
    tables = {
        tp: tuple((n, s + overhead_s) for n, s in zip(p.sizes, p.seconds, strict=True))
        for tp, p in found.items()
    }
    lines = [f"TP {tp}: {profile.source}" for tp, profile in found.items()]
    return tables, "\n".join([*lines, f"host overhead: {1e3 * overhead_s:.1f} ms per step"])


def _calibrated_s(gpu: str) -> float:
    from stepserve.sim.profiles import host_overhead

    try:
        return host_overhead(gpu).seconds(1)
    except FieldError:
        return 0.0  # none was calibrated; the report states the number


def _degree_file(text: str) -> tuple[int, Path]:
    degree, _, name = text.partition("=")
    if not degree.isdecimal() or not name:
        message = f"{text!r} is neither one name nor DEGREE=FILE, for example 2=tp2.json"
        raise FieldError("--profile", message)
    return int(degree), Path(name)


def _load(path: Path) -> Any:
    from stepserve.cost.step_table import StepProfile

    try:
        return StepProfile.load(path)
    except FieldError as error:
        raise FieldError("--profile", error.message) from error


def _text(
    problem: PlanProblem, source: str, why: str, estimates: Mapping[str, LayoutEstimate]
) -> str:
    rate = sum(c.rate_per_s for c in problem.classes)
    slots = estimates["recommended"].slots
    lines = [source, f"planned load: {rate:.2f} requests/s, headroom included", ""]
    lines += [f"recommended: {_counts(slots)}  ({why})", *_nodes(slots), ""]
    names = ["mean confidence threshold", "slack, share of the SLO", "capacity used"]
    names.append("requests within the SLO")
    for c in problem.classes:
        lengths = f"{c.prompt_tokens} + {c.output_tokens} tokens"
        names.append(f"latency of {lengths} (SLO {c.slo_s:g} s)")
    columns = [["planned", *names]]
    for name, estimate in {_counts(o.slots): o for o in estimates.values()}.items():
        columns.append([name, *_cells(problem, estimate)])
    widths = [max(map(len, column)) for column in columns]
    for first, *others in zip(*columns, strict=True):
        cells = (f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        lines.append("   ".join([f"{first:{widths[0]}}", *cells]))
    optimum = _counts(estimates["optimum"].slots)
    if optimum != _counts(slots):
        lines.append(f"Best numbers, whatever a change costs: {optimum}.")
    lines.append("Planned means of a steady state: queueing and spread come on top.")
    return "\n".join(lines)


def _unmet(problem: PlanProblem, best: LayoutEstimate) -> str | None:
    """A sentence if even the best layout found misses an SLO, or cannot carry the load."""
    if best.latency_s is None:
        return "The load cannot be carried: no layout of these GPUs has the capacity."
    late = [
        f"{c.prompt_tokens} + {c.output_tokens} tokens take {latency_s:.3g} s, not {c.slo_s:g} s"
        for c, latency_s in zip(problem.classes, best.latency_s, strict=True)
        if latency_s > c.slo_s + TOLERANCE_S
    ]
    told = "The SLO cannot be met, with no layout of these GPUs: at the best one found, "
    return f"{told}{'; '.join(late)}." if late else None


def _cells(problem: PlanProblem, estimate: LayoutEstimate) -> list[str]:
    if estimate.latency_s is None:
        return ["overloaded"] * (4 + len(problem.classes))
    return [
        f"{estimate.mean_threshold:.3f}",
        f"{estimate.slack:.3f}",
        f"{estimate.use:.0%}",
        f"{estimate.met(problem.classes):.0%}",
        *(f"{latency_s:.2f} s" for latency_s in estimate.latency_s),
    ]


def _counts(slots: Sequence[Slot]) -> str:
    degrees = [slot.tp_degree for slot in slots]
    parts = sorted(set(degrees), reverse=True)
    return " + ".join(f"{degrees.count(degree)} x TP{degree}" for degree in parts)


def _nodes(slots: Sequence[Slot]) -> list[str]:
    """GPUs of each instance, one line a node; like nodes that follow each other share one."""
    texts = [
        "  ".join(f"TP{s.tp_degree} on {','.join(map(str, s.gpus))}" for s in slots if s.node == n)
        for n in range(max(slot.node for slot in slots) + 1)
    ]
    lines, first = [], 0
    for node, text in enumerate(texts):
        if node + 1 == len(texts) or texts[node + 1] != text:
            name = f"node {node}" if first == node else f"nodes {first}-{node}"
            lines.append(f"  {name}: {text}")
            first = node + 1
    return lines


def _as_json(
    problem: PlanProblem, source: str, why: str, estimates: Mapping[str, LayoutEstimate]
) -> dict[str, Any]:
    def of(estimate: LayoutEstimate) -> dict[str, Any]:
        return {
            "slots": [{"node": s.node, "gpus": list(s.gpus)} for s in estimate.slots],
            "overloaded": estimate.use is None,
            "mean_threshold": estimate.mean_threshold,
            "slack": estimate.slack,
            "use": estimate.use,
            "latency_s": estimate.latency_s,
            "within_slo": estimate.met(problem.classes),
        }

    return {
        "step_times": source.splitlines(),
        "planned_rate_per_s": [c.rate_per_s for c in problem.classes],
        "why": why,
        **{name: of(estimate) for name, estimate in estimates.items()},
    }

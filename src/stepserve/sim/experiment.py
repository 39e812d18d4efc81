"""Reads experiments from TOML, strictly: docs/simulator.md, "Experiment files".

A file is a table. ``[quick]``, ``--set`` and ``[sweep]`` lay values over it by dotted keys before
anything is understood, so any key can be changed, and any key can be swept. ``[figure]`` is of
``experiments/lib/figures.py`` alone.
"""

import itertools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from stepserve.core.errors import FieldError, check_known, nearest
from stepserve.core.request import Family
from stepserve.files import read_toml
from stepserve.tables import as_table, from_table

from .a100 import known_models
from .config import (
    ALL,
    NONE,
    CapacitySearch,
    InstanceGroup,
    Setting,
    SLOClass,
    System,
    Workload,
)
from .datasets import DATASETS
from .hosts import Host, hosts
from .lengths import TOKEN_WORKLOADS
from .outside import is_outside
from .recording import Recording
from .systems import FRESH, SYSTEMS, candidates

T = TypeVar("T")
Table = dict[str, Any]

ROWS: Mapping[str, Any] = {
    "system": {"name", "base", "best_of", *(f.name for f in fields(System))},
    "slo": {f.name for f in fields(SLOClass)},
    "instances": {f.name for f in fields(InstanceGroup)},
}
"""Keys of the tables in an array of that name. Any other word in its place is a ``name``."""

DIFFUSION_MODELS = ("llada-8b", "dream-7b", "bundled")


@dataclass(frozen=True, slots=True)
class Experiment:
    """What is served on what, and the systems to compare, in order.

    ``compared`` has the candidates of each name: itself alone, if there is nothing to tune;
    ``systems`` has all candidates. ``swept``: the values that this one of a sweep has.
    """

    family: Family
    setting: Setting
    workload: Workload
    slo: tuple[SLOClass, ...]
    capacity: CapacitySearch
    compared: Mapping[str, tuple[str, ...]]
    systems: Mapping[str, System]
    seeds: tuple[int, ...] = (0,)
    swept: Mapping[str, Any] = field(default_factory=dict)
    recording: Recording | None = None

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The instances at the start."""
        return hosts(self.setting)

    @property
    def gpus(self) -> int:
        """GPUs of the cluster."""
        return sum(self.setting.nodes) or sum(host.degree for host in self.hosts)

    @property
    def rates_per_s(self) -> tuple[float, ...]:
        """The given rates; 0 for that of the recording."""
        workload = self.workload
        given = (*workload.rates_per_s, *(r * self.gpus for r in workload.rates_per_gpu_per_s))
        as_recorded = workload.arrivals == "recorded" and self.capacity.search == NONE
        return given or ((0.0,) if as_recorded else ())

    def as_table(self) -> Table:
        """The resolved configuration as TOML values, to be kept beside results."""
        tuned = [
            {"name": name, "best_of": list(choice)}
            for name, choice in self.compared.items()
            if choice != (name,)
        ]
        own = [{"name": name, **as_table(system)} for name, system in self.systems.items()]
        return {
            "seeds": list(self.seeds),
            "setting": as_table(self.setting),
            "workload": as_table(self.workload),
            "slo": [as_table(one) for one in self.slo],
            "capacity": as_table(self.capacity),
            "systems": list(self.compared),
            "system": [*own, *tuned],
        }


def read_table(
    path: Path, *, quick: bool = False, changes: Sequence[str] = (), partial: bool = False
) -> Table:
    """An experiment's table, with ``[quick]`` and changes (``KEY=VALUE``) laid over it.

    A ``partial`` one needs no setting. Raises FieldError if there is none.
    """
    table = read_toml(path, "config")
    if "setting" not in table and not partial:
        raise FieldError("setting", f"{path} has none: see docs/simulator.md, Experiment files")
    return changed(table, quick=quick, changes=changes)


def changed(table: Table, *, quick: bool = False, changes: Sequence[str] = ()) -> Table:
    """A table with its ``[quick]`` and with changes (``KEY=VALUE``) laid over it."""
    quickly = table.get("quick", {})
    table = {key: value for key, value in table.items() if key not in ("quick", "figure")}
    for key, value in _leaves(quickly, "quick") if quick else ():
        table = put(table, key, value)
    for change in changes:
        key, _, text = change.partition("=")
        table = put(table, key.strip(), _value(text.strip()))
    return table


def _value(text: str) -> Any:
    """A TOML value; what is none is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def read_experiments(table: Table, recording: Recording | None = None) -> list[Experiment]:
    """The experiment of each combination of swept values; one without a sweep.

    Raises FieldError naming the dotted key at fault.
    """
    rest = {key: value for key, value in table.items() if key != "sweep"}
    sweep = dict(_leaves(table.get("sweep", {}), "sweep"))
    for key, values in sweep.items():
        if not isinstance(values, list) or not values:
            raise FieldError(f"sweep.{key}", "needs a list of values")
    found = []
    for values in itertools.product(*sweep.values()):
        swept = dict(zip(sweep, values, strict=True))
        one = rest
        for key, value in swept.items():
            one = put(one, key, value)
        found.append(replace(read_experiment(one, recording), swept=swept))
    return found


def _leaves(table: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Values of the table of that ``name`` by dotted key."""
    if not isinstance(table, dict):
        raise FieldError(name, "must be a table")
    for key, value in table.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", leaf) for inner, leaf in _leaves(value, key))
        else:
            yield key, value


def put(table: Table, key: str, value: Any) -> Table:
    """A copy of a table with the value of a dotted key changed.

    Of an array of tables, a number means that table, a key of its tables means all of them, and
    any other word the one of that ``name``, which is added if there is none.
    """
    result: Table = _put(table, key.split("."), value, key, "")
    return result


def _put(node: Any, parts: list[str], value: Any, key: str, within: str) -> Any:
    if not parts:
        return value
    head, rest = parts[0], parts[1:]
    if within in ROWS:
        rows = _rows(node, within)
        if head.isdecimal() and int(head) < len(rows):
            chosen, rest = [int(head)], rest
        elif head in ROWS[within]:
            rows = rows or [{}]
            chosen, rest = list(range(len(rows))), parts
        elif head.isdecimal() or not (rest or isinstance(value, dict)):
            known = ", ".join(sorted(ROWS[within]))
            raise FieldError(key, f"neither one of {len(rows)} tables nor a key of them: {known}")
        else:
            if all(row.get("name") != head for row in rows):
                rows.append({"name": head})
            chosen = [i for i, row in enumerate(rows) if row.get("name") == head]
        return [_put(r, rest, value, key, "") if i in chosen else r for i, r in enumerate(rows)]
    if node is not None and not isinstance(node, dict):
        raise FieldError(key, f"{head} is not in a table")
    return {**(node or {}), head: _put((node or {}).get(head), rest, value, key, head)}


def _rows(node: Any, name: str) -> list[Any]:
    """An array of tables; a number of instances counts for one."""
    if name == "instances" and isinstance(node, int):
        return [{"count": node}]
    if not isinstance(node, list | None):
        raise FieldError(name, "must be an array of tables")
    return list(node or ())


def read_experiment(table: Mapping[str, Any], recording: Recording | None = None) -> Experiment:
    """The experiment of a table without a sweep."""
    parts = {"seeds", "setting", "workload", "slo", "capacity", "system", "systems"}
    for key in table:
        if key not in parts:
            known = ", ".join(sorted(parts))
            raise FieldError(key, f"unknown key{nearest(key, parts)}; known: {known}")
    setting = _setting(table.get("setting", {}))
    family = _family(setting)
    setting = replace(setting, family=family.value)
    workload = _workload(table.get("workload", {}))
    slo = tuple(_slo(_rows(table.get("slo"), "slo"), numbered=recording is None))
    compared, systems = _systems(table, family, len(hosts(setting)))
    capacity = from_table(CapacitySearch, table.get("capacity", {}), "capacity")
    check_known(capacity.search, (ALL, NONE, *compared), "capacity.search")
    if workload.rates_of_capacity and capacity.search == NONE:
        raise FieldError("workload.rates_of_capacity", "needs a capacity to be searched")
    if len({one.name for one in slo}) < len(slo):
        raise FieldError("slo.name", "is given twice")
    experiment = Experiment(
        family,
        setting,
        workload,
        slo or (() if recording else (SLOClass("class0"),)),
        capacity,
        compared,
        systems,
        _seeds(table.get("seeds", [0])),
        recording=recording,
    )
    if not (experiment.rates_per_s or capacity.search != NONE):
        raise FieldError("workload.rates_per_s", "at which rates? or search a capacity")
    return experiment


def _setting(table: Mapping[str, Any]) -> Setting:
    if isinstance(table, Mapping) and "instances" in table:
        table = {**table, "instances": _rows(table["instances"], "instances")}
    return from_table(Setting, table, "setting")


def _workload(table: Mapping[str, Any]) -> Workload:
    workload = from_table(Workload, table, "workload")
    if workload.name and not is_outside("workload", workload.name):
        check_known(workload.name, (*DATASETS, *TOKEN_WORKLOADS, "bundled"), "workload.name")
    return workload


def _slo(rows: Sequence[Any], numbered: bool) -> Iterator[SLOClass]:
    """A class of each table; those without a name are ``numbered``, if they need one."""
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise FieldError(f"slo.{i}", "must be a table")
        start = {"name": f"class{i}"} if numbered else {}
        yield from_table(SLOClass, {**start, **row}, f"slo.{i}")


def _seeds(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(v) is not int or v < 0 for v in values):
        raise FieldError("seeds", "needs a list of whole numbers that are not negative")
    return tuple(values)


def _family(setting: Setting) -> Family:
    known = dict.fromkeys(DIFFUSION_MODELS, Family.DIFFUSION)
    known |= dict.fromkeys(known_models(), Family.AUTOREGRESSIVE)
    if setting.family:
        check_known(setting.family, Family, "setting.family")
    family = Family(setting.family) if setting.family else known.get(setting.model)
    if family is None or known.get(setting.model, family) is not family:
        what = f"needed for {setting.model!r}, and must be its own; known: {', '.join(known)}"
        raise FieldError("setting.family", what)
    return family


def _systems(
    table: Mapping[str, Any], family: Family, instances: int
) -> tuple[dict[str, tuple[str, ...]], dict[str, System]]:
    """What each name is to be chosen from, and all systems needed.

    Compared are the ``systems`` named, by default all that have a table.
    """
    systems, choices, listed = dict(SYSTEMS[family]), {}, []
    for row in _rows(table.get("system"), "system"):
        if not isinstance(row, Mapping) or not isinstance(row.get("name"), str):
            raise FieldError("system.name", "needed, in each table")
        rest = dict(row)
        name, base, best = (rest.pop(key, None) for key in ("name", "base", "best_of"))
        if base is not None:
            check_known(base, systems, f"system.{name}.base")
        listed.append(name)
        if best is not None:
            choices[name] = _names(best, f"system.{name}.best_of")
        elif rest or base:
            start = systems.get(base or name, FRESH[family])
            systems[name] = from_table(System, rest, f"system.{name}", start)
    names = _names(table.get("systems", listed), "systems")
    compared = {
        name: choices.get(name) or candidates(family, name, instances) or (name,) for name in names
    }
    used = [one for choice in compared.values() for one in choice]
    for name in used:
        check_known(name, systems, "systems")
    return compared, {name: systems[name] for name in used}


def _names(value: Any, field: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise FieldError(field, "needs a list of names of systems, or tables [[system]]")
    return tuple(value)

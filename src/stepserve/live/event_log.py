"""The event log: every event and every decision of a run, enough to replay it bit for bit.

A text file of JSON lines, gzipped if its name ends in ``.gz``. The first line is the header: a
``SchedulerSetup``, that is policies by name and the times they began with. Each further line is
one call of ``handle``: whose (nobody's name: the global scheduler's; a local scheduler's first
line has its spec), when, the event, the actions. A log cut off by a killed process is readable
up to its last whole line.

A log that has grown to its size goes on in a new file of its name; what was written before is
``NAME.1`` then, and what was that ``NAME.2``, as far as they are kept. So is what an earlier run
has written. Headers say of which run a file is, and which part: whoever reads a file reads the
parts of its run before it, too.
"""

import gzip
import itertools
import json
import logging
import re
import threading
import uuid
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from stepserve.core.actions import Action
from stepserve.core.errors import FieldError
from stepserve.core.events import Event
from stepserve.core.ids import InstanceId
from stepserve.core.instance import InstanceSpec
from stepserve.families.setup import SchedulerSetup

from .codec import codec
from .recording import Handled

logger = logging.getLogger(__name__)

FORMAT = "stepserve event log 4"

_NUMBERED = re.compile(r"(.+)\.([0-9]+)")
"""The name of an older file."""

Scheduler = tuple[InstanceId | None, int]
"""Instance and incarnation of a local scheduler; no instance: a global one."""


@dataclass(frozen=True, slots=True)
class _Head:
    format: str
    setup: SchedulerSetup
    run: str = ""
    part: int = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """One call of ``handle``. ``spec`` comes with the first of a local scheduler."""

    event: Event
    actions: tuple[Action, ...]
    at_s: float
    instance: InstanceId | None = None
    incarnation: int = 0
    spec: InstanceSpec | None = None

    @property
    def scheduler(self) -> Scheduler:
        """Whose call it was."""
        return self.instance, self.incarnation


class EventLog:
    """A listener that writes; nothing is kept in memory but what the file buffers."""

    def __init__(
        self, path: Path, setup: SchedulerSetup, part_bytes: int = 0, keep: int = 0
    ) -> None:
        """``part_bytes``: size of a file, uncompressed; 0: any. ``keep``: so many older ones stay.

        Without any kept, what an earlier run wrote is overwritten. Raises FieldError (``events``)
        if the file cannot be written.
        """
        self._path, self._setup = path, setup
        self._part_bytes, self._keep = part_bytes, keep
        self._run, self._part = uuid.uuid4().hex if keep else "", 0
        self._lock = threading.Lock()
        try:
            self._begin()
        except OSError as error:
            raise FieldError("events", f"{path} cannot be written: {error}") from error

    def _begin(self) -> None:
        """A new file; older ones move on by one."""
        older = [self._path, *(_older(self._path, n) for n in range(1, self._keep + 1))]
        for old, new in reversed([*itertools.pairwise(older)]):
            if old.exists():
                old.replace(new)
        self._file = _open(self._path, "wt")
        self._bytes, self._part = 0, self._part + 1
        self._introduced: set[Scheduler] = set()
        self._write(codec(_Head).encode(_Head(FORMAT, self._setup, self._run, self._part)))

    def note(self, handled: Handled) -> None:
        """Write one call of ``handle``, from any thread; nothing after ``close``."""
        spec = handled.spec
        name = (spec.id if spec else None), handled.incarnation
        with self._lock:
            if self._file.closed:
                return
            new = name not in self._introduced
            self._introduced.add(name)
            entry = Entry(
                handled.event, handled.actions, handled.now_s, *name, spec if new else None
            )
            self._write(codec(Entry).encode(entry))
            if 0 < self._part_bytes <= self._bytes:
                self._go_on()

    def _go_on(self) -> None:
        """In a new file, if there can be one; else in this one."""
        part, bytes_, introduced = self._part, self._bytes, self._introduced
        try:
            self._file.close()
            self._begin()
        except OSError as error:
            logger.warning("the event log goes on in the same file: %s", error)
            self._file = _open(self._path, "at")
            self._part, self._bytes, self._introduced = part, bytes_, introduced
            self._part_bytes = 0

    def close(self) -> None:
        """Write what is buffered and end the file."""
        with self._lock:
            self._file.close()

    def _write(self, table: Any) -> None:
        line = json.dumps(table, separators=(",", ":")) + "\n"
        self._file.write(line)
        self._bytes += len(line)  # ASCII


def read_events(path: Path, *, whole: bool = False) -> tuple[SchedulerSetup, Iterator[Entry]]:
    """What the schedulers of a log were made of, and its entries as they are read.

    Raises FieldError (``events``) for a file that is no event log, naming the line; of a ``whole``
    log also if the beginning of the run is not there any more.
    """
    head, _ = _begun(path)
    paths = [path]
    part = head.part
    while part > 1 and head.run:
        before = _next_older(paths[-1])
        if not before.is_file():
            break
        older, _ = _begun(before)
        if (older.run, older.part) != (head.run, part - 1):
            break
        paths.append(before)
        part = older.part
    if whole and part > 1:
        what = f"{path} is part {head.part} of a run; parts 1 to {part - 1} are not there any more"
        raise FieldError("events", what)
    return head.setup, itertools.chain.from_iterable(map(_entries, reversed(paths)))


def _begun(path: Path) -> tuple[_Head, Iterator[str]]:
    """The header of a file, and the lines after it."""
    lines = _lines(path)
    first = next(lines, "")
    if not first.startswith(f'{{"format":"{FORMAT}",'):
        raise FieldError("events", f"{path} is not a {FORMAT!r}")
    return _decoded(_Head, path, 1, first), lines


def _entries(path: Path) -> Iterator[Entry]:
    _, lines = _begun(path)
    return (_decoded(Entry, path, n, line) for n, line in enumerate(lines, 2))


def _older(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _next_older(path: Path) -> Path:
    """The file that was written before this one: ``run.jsonl``, ``run.jsonl.1``, ..."""
    found = _NUMBERED.fullmatch(path.name)
    if found is None:
        return _older(path, 1)
    return _older(path.with_name(found[1]), int(found[2]) + 1)


def _decoded(cls: Any, path: Path, number: int, line: str) -> Any:
    try:
        return codec(cls).decode(json.loads(line))
    except (ValueError, KeyError, TypeError, AttributeError, FieldError) as error:
        what = f"{path}, line {number} cannot be read: {error!r}"
        raise FieldError("events", what) from error


def _lines(path: Path) -> Iterator[str]:
    """Whole lines; what a killed process left of the last one is dropped."""
    try:
        with _open(path, "rt") as file:
            for line in file:
                if line.endswith("\n"):
                    yield line
    except EOFError:  # gzip: the end is missing
        return
    except (OSError, UnicodeDecodeError, zlib.error) as error:
        raise FieldError("events", f"{path} cannot be read: {error}") from error


def _open(path: Path, mode: str) -> TextIO:
    found = _NUMBERED.fullmatch(path.name)
    if (found[1] if found else path.name).endswith(".gz"):
        return gzip.open(path, mode, compresslevel=4, encoding="utf-8")  # type: ignore[return-value]
    return path.open(mode, encoding="utf-8")  # type: ignore[return-value]

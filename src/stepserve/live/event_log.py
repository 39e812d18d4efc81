"""The event log: every event and every decision of a run, enough to replay it bit for bit.

A text file of JSON lines, gzipped if its name ends in ``.gz``. The first line is the header: a
``SchedulerSetup``, that is policies by name and the times they began with. Each further line is
one call of ``handle``: whose (nobody's name: the global scheduler's; a local scheduler's first
line has its spec), when, the event, the actions. A log cut off by a killed process is readable
up to its last whole line.
"""

import gzip
import json
import threading
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

FORMAT = "stepserve event log 4"

Scheduler = tuple[InstanceId | None, int]
"""Instance and incarnation of a local scheduler; no instance: a global one."""


@dataclass(frozen=True, slots=True)
class _Head:
    format: str
    setup: SchedulerSetup


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

    def __init__(self, path: Path, setup: SchedulerSetup) -> None:
        """Raises FieldError (``events``) if the file cannot be written."""
        try:
            self._file = _open(path, "wt")
        except OSError as error:
            raise FieldError("events", f"{path} cannot be written: {error}") from error
        self._lock = threading.Lock()
        self._introduced: set[Scheduler] = set()
        self._write(codec(_Head).encode(_Head(FORMAT, setup)))

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

    def close(self) -> None:
        """Write what is buffered and end the file."""
        with self._lock:
            self._file.close()

    def _write(self, table: Any) -> None:
        self._file.write(json.dumps(table, separators=(",", ":")) + "\n")


def read_events(path: Path) -> tuple[SchedulerSetup, Iterator[Entry]]:
    """What the schedulers of a log were made of, and its entries as they are read.

    Raises FieldError (``events``) for a file that is no event log, naming the line.
    """
    lines = _lines(path)
    first = next(lines, "")
    if not first.startswith(f'{{"format":"{FORMAT}",'):
        raise FieldError("events", f"{path} is not a {FORMAT!r}")
    head = _decoded(_Head, path, 1, first)
    return head.setup, (_decoded(Entry, path, n, line) for n, line in enumerate(lines, 2))


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
    if path.suffix == ".gz":
        return gzip.open(path, mode, compresslevel=4, encoding="utf-8")  # type: ignore[return-value]
    return path.open(mode, encoding="utf-8")  # type: ignore[return-value]

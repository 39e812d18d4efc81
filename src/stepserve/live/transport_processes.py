"""Instances in processes of this machine, which the server's parent process starts and ends.

They are its children, not those of the control loop: they outlive that, and are adopted by the
next. An instance listens on a socket in a folder that only its user can open.
"""

import logging
import multiprocessing
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path

from stepserve.core.errors import StepserveError
from stepserve.core.instance import InstanceSpec

from .instance_factory import InstanceFactory
from .processes import instance_path
from .remote import RemoteInstance
from .wire import Carrier

logger = logging.getLogger(__name__)

LOOK_S = 0.02
"""How often a new process is looked for at its socket."""

ORPHANED_S = 20.0
"""How long an instance waits for the next control loop."""


class ChildProcess:
    """A ``Process`` that the parent starts; or one that it has started, to be adopted."""

    def __init__(
        self, ask: Callable[[str, InstanceSpec, int], None], path: str, spec: InstanceSpec,
        incarnation: int, runs: bool,
    ) -> None:  # fmt: skip
        """``ask``: tells the parent to ``start`` or ``kill`` an incarnation of an instance."""
        self._ask, self._path = ask, path
        self._spec, self._incarnation = spec, incarnation
        self._runs = runs
        self._ended = threading.Event()

    def connect(self) -> Carrier:
        """See ``Process.connect``."""
        if not self._runs:
            self._ask("start", self._spec, self._incarnation)
        while not self._ended.is_set():
            try:
                return Client(self._path, "AF_UNIX")
            except OSError:  # it has not got so far
                self._ended.wait(LOOK_S)
        raise StepserveError(f"the process of instance {self._spec.id} ended before it was up")

    def note_end(self) -> None:
        """The parent says that it has ended."""
        self._ended.set()

    def lives(self) -> bool:
        """See ``Process.lives``."""
        return not self._ended.is_set()

    def kill(self) -> None:
        """See ``Process.kill``."""
        if not self._ended.is_set():
            self._ended.set()
            self._ask("kill", self._spec, self._incarnation)


class _Accepting:
    """Who connects to an instance's socket, one after another."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(path)
        self._socket.listen()

    def next(self) -> Carrier | None:
        """The next; ``None`` if nobody comes for so long, or the parent is gone, too."""
        parent = multiprocessing.parent_process()
        assert parent is not None, "instances are children"
        if self._socket not in wait([self._socket, parent.sentinel], ORPHANED_S):
            return None
        return Connection(self._socket.accept()[0].detach())


def run(factory: InstanceFactory, spec: InstanceSpec, incarnation: int, folder: Path) -> None:
    """The life of an instance's process."""
    accepting = _Accepting(instance_path(folder, spec.id, incarnation))
    instance = RemoteInstance(factory, spec, incarnation, "local", "", outlives=True)
    instance.serve_all(accepting.next)

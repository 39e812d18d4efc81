"""An executor over a tensor-parallel group: rank 0 in this process, a worker process per other.

Every rank has the same executor over its share of the model and of the keys and values. What
rank 0 is told it does itself and passes on, so all hold the same requests in the same pages; what
it refuses nobody else hears of. Within a batch the ranks meet in the collectives of
``parallel`` and ``vocabulary``.

Workers are forked from a server process that has imported torch and nothing else, so that another
degree is formed in a fraction of a second; the weights come from the page cache. A worker ends
with rank 0's process, and when it is closed.
"""

import contextlib
import datetime
import functools
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed
from torch import Tensor

from stepserve.core.ids import RequestId
from stepserve.core.payload import KvChunk, Payload
from stepserve.core.protocols import BatchResult
from stepserve.core.request import Progress, Request
from stepserve.core.step import Batch
from stepserve.engine.ar_executor import AutoregressiveExecutor
from stepserve.engine.diffusion_executor import DiffusionExecutor
from stepserve.engine.kv_pages import checksums
from stepserve.engine.loader import load_model
from stepserve.engine.models.transformer import ModelConfig
from stepserve.engine.parallel import Group, ProcessGroup, Share, WorkerLostError

START_S = 120.0
"""Longest that workers may take to begin, with the first import of torch."""

Line: TypeAlias = "Connection[Any, Any]"

c10d: Any = torch.distributed  # its type hints lack what groups beside the default one need

_processes = multiprocessing.get_context("forkserver")

_FOLDERS = "stepserve-tp-"


@dataclass(frozen=True, slots=True)
class Setup:
    """What every rank is made of; rank r runs on ``devices[r]`` with ``threads`` CPU threads.

    A rank that is not heard of for ``timeout_s`` within a batch is lost.
    """

    folder: str
    devices: tuple[str, ...]
    dtype: torch.dtype = torch.float32
    page_tokens: int = 16
    page_capacity: int = 4096
    threads: int | None = None
    timeout_s: float = 60.0

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return len(self.devices)


def prepare() -> None:
    """Begin to start the process that workers are forked from; does not wait for that."""
    _folder(os.getpid())
    _processes.set_forkserver_preload([__name__])
    forkserver.ensure_running()


@functools.cache
def _folder(pid: int) -> str:
    """Where files of this process's groups are, the socket of ``forkserver`` among them."""
    remove_folders_left()
    folder = tempfile.mkdtemp(prefix=f"{_FOLDERS}{pid}-")
    multiprocessing.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]
    util.Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=-100)
    return folder


def remove_folders_left() -> None:
    """Remove those of processes of this machine that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDERS}[0-9]*-*"):
        pid = folder.name.removeprefix(_FOLDERS).partition("-")[0]
        if not lives(pid):
            shutil.rmtree(folder, ignore_errors=True)


def lives(pid: str) -> bool:
    """Whether a process has not ended, waited for or not."""
    try:
        return bool(Path("/proc", pid, "cmdline").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return False


def _join(setup: Setup, rank: int, meeting: str, lines: Sequence[Line]) -> ProcessGroup:
    """Meet the other ranks by way of the file ``meeting``."""
    if setup.threads is not None:
        torch.set_num_threads(setup.threads)
    store = c10d.FileStore(meeting, setup.size)
    limit, device = datetime.timedelta(seconds=setup.timeout_s), torch.device(setup.devices[rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = limit
        pg = c10d.ProcessGroupNCCL(store, rank, setup.size, options)
    else:
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = limit
        pg = c10d.ProcessGroupGloo(store, rank, setup.size, options)
    group = ProcessGroup(rank, setup.size, pg, lines)
    group.all_reduce(torch.zeros(1, device=device))  # now, so that nobody needs the file later
    return group


def _executor(setup: Setup, group: Group) -> Any:
    """The executor of the model's family over this rank's share."""
    loaded = load_model(setup.folder, setup.devices[group.rank], setup.dtype, group)
    kinds = {k.FAMILY: k for k in (DiffusionExecutor, AutoregressiveExecutor)}
    return kinds[loaded.family](
        loaded,
        page_tokens=setup.page_tokens,
        page_capacity=setup.page_capacity,
        threads=setup.threads,
        graphs="off",  # a captured pass would have to hold the collectives
    )


def _work(setup: Setup, rank: int, meeting: str, line: Line) -> None:
    """A worker's life: do what rank 0 says until it says nothing more, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the server, which drains first
    threading.Thread(target=_end_with_rank_0, daemon=True).start()
    with contextlib.suppress(EOFError):
        line.send("begun")
        executor = _executor(setup, _join(setup, rank, meeting, [line]))
        line.send("ready")
        while True:
            name, *rest = line.recv()
            if name == "read_kv":
                line.send(_bytes(executor.read_kv(*rest)))
            elif name == "write_kv":
                request_id, start, stop, raw = rest
                own = _tensor(raw, executor.config, stop - start, setup.dtype)
                executor.write_kv(request_id, start, stop, own)
            else:
                getattr(executor, name)(*rest)


def _end_with_rank_0() -> None:
    """Whatever this worker is waiting for."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "workers are started"
    parent.join()
    os._exit(1)


def _bytes(kv: Tensor) -> bytes:
    raw: bytes = kv.contiguous().view(torch.uint8).numpy().tobytes()
    return raw


def _tensor(raw: bytes, config: ModelConfig, tokens: int, dtype: torch.dtype) -> Tensor:
    """Keys and values ``[layers, tokens, 2, heads, head_dim]`` of as many heads as there are."""
    flat = torch.frombuffer(bytearray(raw), dtype=dtype)
    return flat.view(config.layers, tokens, 2, -1, config.head_dim)


class ParallelExecutor:
    """Runs steps of a model that is split over processes; implements ``core.protocols.Executor``.

    Not thread-safe. ``close`` ends the workers; so does the end of this object or process.
    """

    def __init__(self, setup: Setup) -> None:
        """Start the workers and load the model.

        Raises FieldError as ``load_model`` does, WorkerLostError if a worker does not begin.
        """
        self.setup = setup
        self._lines: list[Line] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        prepare()
        try:
            with tempfile.TemporaryDirectory(dir=_folder(os.getpid())) as folder:
                self._start(f"{folder}/meeting")
        except BaseException:
            self.close()
            raise

    def _start(self, meeting: str) -> None:
        for rank in range(1, self.setup.size):
            line, theirs = _processes.Pipe()
            worker = _processes.Process(
                target=_work,
                args=(self.setup, rank, meeting, theirs),
                name=f"tensor-parallel-{rank}",
                daemon=True,
            )
            self._lines.append(line)
            worker.start()
            self._processes.append(worker)
            theirs.close()
        self._hear(START_S)
        group = _join(self.setup, 0, meeting, self._lines)
        self._inner: DiffusionExecutor | AutoregressiveExecutor = _executor(self.setup, group)
        self.config: ModelConfig = self._inner.config
        self._hear(max(START_S, self.setup.timeout_s))

    def _hear(self, timeout_s: float) -> list[Any]:
        """The next word of every worker."""
        heard = []
        for line, worker in zip(self._lines, self._processes, strict=True):
            if line not in wait([line, worker.sentinel], timeout_s):
                raise WorkerLostError(f"{worker.name} does not answer ({worker.exitcode=})")
            try:
                heard.append(line.recv())
            except (EOFError, OSError) as error:
                raise WorkerLostError(f"{worker.name} is gone") from error
        return heard

    def _tell(self, *call: object) -> None:
        """Have every worker do something."""
        for rank in range(1, self.setup.size):
            self._send(rank, *call)

    def _send(self, rank: int, *call: object) -> None:
        try:
            self._lines[rank - 1].send(call)
        except OSError as error:
            raise WorkerLostError(f"worker {rank} is gone: {error}") from error

    @property
    def used_pages(self) -> int:
        """Pages that held requests own, the same on every rank."""
        return self._inner.used_pages

    def add(
        self, request: Request, payload: Payload, progress: Progress, settled: Mapping[int, int]
    ) -> None:
        """See the executor of the family."""
        self._inner.add(request, payload, progress, settled)
        self._tell("add", request, payload, progress, dict(settled))

    def run(self, batch: Batch) -> BatchResult:
        """See the executor of the family. Raises WorkerLostError if a rank dies or is late."""
        self._tell("run", batch)
        return self._inner.run(batch)

    def remove(self, request_id: RequestId) -> None:
        """Drop a request and free its pages. Unknown ids are ignored."""
        self._inner.remove(request_id)
        self._tell("remove", request_id)

    def close(self) -> None:
        """End the workers, whatever they are at. Nothing can be run any more."""
        for line in self._lines:
            line.close()
        for worker in self._processes:
            worker.join(1.0)
            worker.kill()
            worker.join()


class ParallelAutoregressiveExecutor(ParallelExecutor):
    """Of an autoregressive model; implements ``KvPages``, too.

    Chunks have all heads in their order, whatever the degree, and so have their checksums:
    instances of unlike degrees hand over to each other.
    """

    _inner: AutoregressiveExecutor

    def export_kv(self, request_id: RequestId, epoch: int, start: int, stop: int) -> KvChunk:
        """See ``AutoregressiveExecutor.export_kv``."""
        own = self._inner.read_kv(request_id, start, stop)
        self._tell("read_kv", request_id, start, stop)
        config, tokens = self.config, stop - start
        kv = own.new_empty(config.layers, tokens, 2, config.kv_heads, config.head_dim)
        raws = self._hear(self.setup.timeout_s)
        others = [_tensor(raw, config, tokens, own.dtype) for raw in raws]
        for rank, part in enumerate([own, *others]):
            self._heads(kv, rank).copy_(part)
        sums = checksums(kv, start, self.setup.page_tokens)
        return KvChunk(request_id, epoch, start, stop, sums, kv)

    def import_kv(self, chunk: KvChunk) -> bool:
        """See ``AutoregressiveExecutor.import_kv``: rank 0 judges, the others write."""
        if not self._inner.import_kv(chunk):
            return False
        assert isinstance(chunk.data, Tensor), "or it would not have been found good"
        for rank in range(1, self.setup.size):
            own = _bytes(self._heads(chunk.data, rank))
            self._send(rank, "write_kv", chunk.request_id, chunk.start, chunk.stop, own)
        return True

    def _heads(self, kv: Tensor, rank: int) -> Tensor:
        own = Share.of(self.config, rank, self.setup.size).kv_heads
        return kv[..., own.start : own.stop, :]

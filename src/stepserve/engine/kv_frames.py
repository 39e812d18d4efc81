"""Chunks of keys and values as bytes: frames in a stream, and a ring of shared memory."""

import hmac
import json
import math
import struct
import zlib
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor

from stepserve.core.ids import RequestId
from stepserve.core.payload import KvChunk

Key = tuple[RequestId, int]
"""A hand-over: request and epoch."""

_PREFIX = struct.Struct("<II")  # of a frame: bytes of its header, and their CRC-32
_HEADER_BYTES = 1 << 22
_SKIP_BYTES = 1 << 16
_DIMENSIONS = 8  # that a chunk can have; it has five
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Outbox:
    """Frames on their way to one peer; the first may be half sent."""

    def __init__(self) -> None:
        self._frames: deque[tuple[Key, memoryview]] = deque()
        self._begun = False

    def add(self, chunk: KvChunk) -> None:
        """Copy a chunk, whose data is a tensor or bytes, to the end of the queue."""
        dtype, shape, body = _as_bytes(chunk.data)
        about = (chunk.request_id, chunk.epoch, chunk.start, chunk.stop, chunk.checksums)
        header = json.dumps([*about, dtype, shape]).encode()
        prefix = _PREFIX.pack(len(header), zlib.crc32(header))
        frame = b"".join((prefix, header, body))
        self._frames.append(((chunk.request_id, chunk.epoch), memoryview(frame)))

    def pump(self, send: Callable[[memoryview], int]) -> None:
        """Send all that ``send`` takes; it returns how many bytes that were, 0 for not now."""
        while self._frames:
            key, rest = self._frames.popleft()
            sent = send(rest)
            self._begun = sent < len(rest) and (self._begun or sent > 0)
            if sent < len(rest):
                self._frames.appendleft((key, rest[sent:]))
            if sent == 0:
                return

    def drop(self, key: Key) -> None:
        """Drop frames of a hand-over. One that is half sent goes on, for what comes after it."""
        kept = [frame for i, frame in enumerate(self._frames)
                if frame[0] != key or (i == 0 and self._begun)]  # fmt: skip
        self._frames = deque(kept)


class Inbox:
    """Makes chunks of a byte stream that comes in any pieces. It must begin with ``secret``."""

    def __init__(self, room: dict[Key, int], landed: deque[KvChunk], secret: bytes = b"") -> None:
        self._parts = _parts(room, landed, secret)
        self._missing = next(self._parts)

    def pump(self, receive: Callable[[memoryview], int]) -> None:
        """Take all there is; ``receive`` fills a buffer and returns how far, 0 for not now."""
        while got := receive(self._missing):
            self._missing = self._missing[got:]
            if not self._missing:
                self._missing = next(self._parts)

    def end(self) -> None:
        """Nothing more will come."""
        self._parts.close()


def _parts(
    room: dict[Key, int], landed: deque[KvChunk], secret: bytes
) -> Generator[memoryview, None, NoReturn]:
    """Yields the buffer to be filled next: the secret; prefix, header and data of each frame.

    Raises ConnectionError where the stream makes no sense; nothing after that can be read.
    """
    if secret:
        said = bytearray(len(secret))
        yield memoryview(said)
        if not hmac.compare_digest(said, secret):
            raise ConnectionError("a stranger")
    while True:
        prefix = bytearray(_PREFIX.size)
        yield memoryview(prefix)
        length, crc = _PREFIX.unpack(prefix)
        if not 0 < length <= _HEADER_BYTES:
            raise ConnectionError("not a frame")
        header = bytearray(length)
        yield memoryview(header)
        if zlib.crc32(header) != crc:
            raise ConnectionError("damaged header")
        chunk, dtype, shape = _about(header)
        size = math.prod(shape) * (1 if dtype is None else dtype.itemsize)
        if size > room.get((chunk.request_id, chunk.epoch), 0):
            for begin in range(0, size, _SKIP_BYTES):
                yield memoryview(bytearray(min(_SKIP_BYTES, size - begin)))
            continue
        data = bytearray(size)
        try:
            yield memoryview(data)
        except GeneratorExit:
            landed.append(chunk)
            raise
        kv = bytes(data) if dtype is None else torch.frombuffer(data, dtype=dtype).view(shape)
        landed.append(replace(chunk, data=kv))


def _as_bytes(data: object) -> tuple[str, Sequence[int], bytes | memoryview]:
    """What a chunk holds as dtype, shape and bytes."""
    if isinstance(data, bytes):
        return "bytes", (len(data),), data
    assert isinstance(data, Tensor), "executors of other processes hand over tensors or bytes"
    kv = data.cpu().contiguous()
    dtype = str(kv.dtype).removeprefix("torch.")
    return dtype, kv.shape, kv.view(-1).view(torch.uint8).numpy().data


def _about(header: bytearray) -> tuple[KvChunk, torch.dtype | None, list[int]]:
    """What a frame holds: the chunk without its data, and dtype (of bytes none) and shape of it."""
    try:
        request_id, epoch, start, stop, sums, dtype, shape = json.loads(header)
        if type(request_id) is not str or type(sums) is not list or type(shape) is not list:
            raise TypeError("not the types of a chunk")
        if any(type(n) is not int or n < 0 for n in (epoch, start, stop, *sums, *shape)):
            raise ValueError("not the numbers of a chunk")
        if not 0 < len(shape) <= _DIMENSIONS or min(shape) < 1 or max(shape) >= 1 << 32:
            raise ValueError("not the shape of a chunk")
        chunk = KvChunk(RequestId(request_id), epoch, start, stop, tuple(sums), None)
        return chunk, None if dtype == "bytes" else _DTYPES[dtype], shape
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConnectionError("not a chunk") from error


class Ring:
    """Bytes in shared memory between one writer and one reader.

    They begin with three numbers: bytes written, bytes read, and whether either end has left.
    A writer counts bytes after it wrote them. Where a machine shows that in another order, the
    reader gets old bytes and checksums tell.
    """

    COUNTS = 24

    def __init__(self, memory: memoryview) -> None:
        self._counts = memory[: self.COUNTS].cast("Q")
        self._bytes = memory[self.COUNTS :]

    @property
    def ended(self) -> bool:
        """Whether either end has left."""
        return self._counts[2] > 0

    def send(self, source: memoryview) -> int:
        """Append what there is room for; returns how many bytes."""
        written, size = self._counts[0], len(self._bytes)
        at = written % size
        count = min(len(source), size - (written - self._counts[1]), size - at)
        self._bytes[at : at + count] = source[:count]
        self._counts[0] = written + count
        return count

    def receive(self, target: memoryview) -> int:
        """Fill ``target`` with the next bytes; returns how many."""
        read, size = self._counts[1], len(self._bytes)
        at = read % size
        count = min(len(target), self._counts[0] - read, size - at)
        target[:count] = self._bytes[at : at + count]
        self._counts[1] = read + count
        return count

    def leave(self) -> None:
        """Tell the other end, and let go of the memory, which can be unmapped only then."""
        self._counts[2] = 1
        self._counts.release()
        self._bytes.release()

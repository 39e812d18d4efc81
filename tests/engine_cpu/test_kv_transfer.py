"""One suite for all transports of keys and values."""

import errno
import json
import os
import random
import socket
import struct
import subprocess
import sys
import zlib
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stepserve.core.errors import CapacityError
from stepserve.core.payload import KvChunk
from stepserve.core.request import Progress
from stepserve.core.step import Batch, Step, StepKind
from stepserve.engine.kv_frames import Inbox, Outbox, Ring
from stepserve.engine.kv_pages import checksums
from stepserve.engine.kv_transfer import InProcess, SharedMemory, Tcp
from stepserve.engine.loader import load_model
from support.ar_models import engine, make, write_checkpoint

PAGE = 4
STREAMS = ("shared memory", "tcp")


def segments():
    return list(Path("/dev/shm").glob(f"stepserve-{os.getpid()}-*"))


class Ends:
    """Makes ends of one kind, and closes them."""

    def __init__(self, kind):
        self.kind, self.made, self.peers = kind, [], {}

    def make(self):
        end = {
            "in process": lambda: InProcess(self.peers),
            "shared memory": lambda: SharedMemory(ring_bytes=5000),
            "tcp": Tcp,
        }[self.kind]()
        self.made.append(end)
        return end, end.register()


@pytest.fixture(params=["in process", *STREAMS])
def ends(request):
    ends = Ends(request.param)
    yield ends
    for end in ends.made:
        end.close()
    assert segments() == []


def chunk_of(start, stop, name="r", epoch=1, seed=0, dtype=torch.float32, head=8):
    """Random keys and values, and their checksums."""
    chance = torch.Generator().manual_seed(1000 * seed + start)
    kv = torch.randn((2, stop - start, 2, 2, head), generator=chance).to(dtype)
    return KvChunk(name, epoch, start, stop, checksums(kv, start, PAGE), kv)


def assert_same(got, sent):
    assert replace(got, data=None) == replace(sent, data=None)
    assert got.data.dtype is sent.data.dtype
    assert torch.equal(got.data, sent.data)
    assert checksums(got.data, got.start, PAGE) == got.checksums


def gather(receiver, count, *senders):
    """Poll until so many chunks have landed."""
    landed = []
    while len(landed) < count:
        for sender in senders:
            sender.poll()
        landed += receiver.poll()
    return landed


MARK = chunk_of(0, 1, "mark", epoch=9)


def gather_until_mark(sender, receiver, address):
    """Everything that lands before a chunk that is written last."""
    receiver.reserve("mark", 9, 1 << 20)
    sender.write(address, MARK)
    landed = []
    while not landed or landed[-1].request_id != "mark":
        landed += gather(receiver, 1, sender)
    receiver.abort("mark", 9)
    sender.abort("mark", 9)
    return landed[:-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_chunks_come_as_they_were_sent_in_order(ends, dtype):
    (a, _), (b, _), (receiver, address) = ends.make(), ends.make(), ends.make()
    for name in ("x", "y"):
        receiver.reserve(name, 1, 1 << 20)
    sent = {
        name: [chunk_of(i, i + n, name, 1, i, dtype) for i, n in ((0, 4), (4, 90), (94, 1))]
        for name in ("x", "y")
    }
    for x, y in zip(sent["x"], sent["y"], strict=True):
        a.write(address, x)
        b.write(address, y)
    landed = gather(receiver, 6, a, b)
    for name, chunks in sent.items():
        mine = [chunk for chunk in landed if chunk.request_id == name]
        for got, expected in zip(mine, chunks, strict=True):
            assert_same(got, expected)
    assert receiver.poll() == [], "each once"


@pytest.mark.parametrize("ends", STREAMS, indirect=True)
def test_what_an_engine_without_tensors_sends_comes_as_bytes(ends):
    (sender, _), (receiver, address) = ends.make(), ends.make()
    receiver.reserve("r", 1, 1 << 20)
    sent = [KvChunk("r", 1, i, i + 1, (i,), bytes([i]) * 9000) for i in range(3)]
    for chunk in sent:
        sender.write(address, chunk)
    assert gather(receiver, 3, sender) == sent


def test_more_than_any_buffer_holds(ends):
    """20 MB: many times the ring, more than sockets keep."""
    (sender, _), (receiver, address) = ends.make(), ends.make()
    receiver.reserve("r", 1, 1 << 25)
    sent = chunk_of(0, 10_000, head=64)
    sender.write(address, sent)
    sender.write(address, chunk_of(10_000, 10_001))
    first, second = gather(receiver, 2, sender)
    assert_same(first, sent)
    assert_same(second, chunk_of(10_000, 10_001))


def damaged(chunk):
    kv, flipped = chunk.data, chunk.data.clone()
    flipped.view(torch.uint8)[1, 6, 1, 0, 3] ^= 1
    for data in (
        flipped,
        torch.cat(kv.split(PAGE, dim=1)[::-1], dim=1),
        torch.cat((torch.zeros_like(kv[:, :PAGE]), kv[:, PAGE:]), dim=1),
        kv[:, :-1],
        kv.bfloat16(),
    ):
        yield replace(chunk, data=data)
    yield replace(chunk, start=chunk.start + 4, stop=chunk.stop + 4)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_model(write_checkpoint(tmp_path_factory.mktemp("m"), seed=7))


def test_what_lands_goes_into_pages_only_if_it_is_intact(ends, loaded):
    """Bit flips, reversed and zeroed pages, a cut, another dtype, another place; any order."""
    (sender, _), (receiver, address) = ends.make(), ends.make()
    row = make(prompt=24)
    alpha, beta = engine(loaded), engine(loaded)
    alpha.add(*row, Progress(), {})
    beta.add(*row, Progress(), {})
    alpha.run(Batch(0, (Step("r", StepKind.PREFILL, 24, 24),)))
    receiver.reserve("r", 1, 1 << 20)
    for bad in damaged(alpha.export_kv("r", 1, 0, 16)):
        sender.write(address, bad)
        (landed,) = gather(receiver, 1, sender)
        assert not beta.import_kv(landed)
    assert beta.used_pages == 0
    spans = [(0, 4), (4, 11), (11, 16), (16, 23), (23, 24)]
    random.Random(2).shuffle(spans)
    for span in spans:
        sender.write(address, alpha.export_kv("r", 1, *span))
    assert all(beta.import_kv(chunk) for chunk in gather(receiver, 5, sender))
    kept, left = (end.export_kv("r", 1, 0, 24) for end in (beta, alpha))
    assert kept.checksums == left.checksums


def test_an_abort_on_either_side_drops_what_is_on_its_way(ends):
    (sender, _), (receiver, address) = ends.make(), ends.make()
    for at_sender in (False, True):
        epoch = 1 + at_sender
        receiver.reserve("r", epoch, 1 << 25)
        receiver.reserve("next", epoch, 1 << 25)
        sender.write(address, chunk_of(0, 10_000, epoch=epoch, head=64))  # half sent
        receiver._move()  # landed perhaps, not taken
        sender.write(address, chunk_of(10_000, 10_001, epoch=epoch))
        for end in (sender, receiver) if at_sender else (receiver,):
            end.abort("r", epoch)
        sender.write(address, chunk_of(0, 5, "next", epoch))
        (landed,) = gather_until_mark(sender, receiver, address)
        assert_same(landed, chunk_of(0, 5, "next", epoch))
        sender.abort("r", epoch)
        for end in (sender, receiver):
            end.abort("next", epoch)
            assert vars(end)["_room"] == {}
            assert not vars(end)["_landed"]
            end.abort("unknown", 7)
        assert segments() == []
        if ends.kind == "shared memory":
            assert sender._outgoing == {}
        if ends.kind == "tcp":
            assert not any(outbox._frames for _, outbox in sender._outgoing.values())


def test_a_sender_takes_back_what_it_has_not_begun_to_send():
    sender, receiver = Tcp(), Tcp()
    address = receiver.register()
    for name in ("r", "next"):
        receiver.reserve(name, 1, 1 << 25)
    for start, stop in ((0, 10_000), (10_000, 10_001), (10_001, 10_005)):
        sender.write(address, chunk_of(start, stop, head=64))
    sender.abort("r", 1)
    sender.write(address, chunk_of(0, 5, "next"))
    landed = gather(receiver, 2, sender)
    assert [(chunk.request_id, chunk.stop) for chunk in landed] == [("r", 10_000), ("next", 5)]
    assert_same(landed[0], chunk_of(0, 10_000, head=64))
    sender.close()
    receiver.close()


def test_an_old_epoch_an_unknown_request_or_too_much_is_dropped(ends):
    (sender, _), (receiver, address) = ends.make(), ends.make()
    receiver.reserve("r", 2, 1000)
    for chunk in (
        chunk_of(0, 5, epoch=1),
        chunk_of(0, 5, "other", epoch=2),
        chunk_of(0, 9_000, epoch=2),
        chunk_of(0, 3, epoch=2),
    ):
        sender.write(address, chunk)
    assert_same(*gather(receiver, 1, sender), chunk_of(0, 3, epoch=2))
    assert gather_until_mark(sender, receiver, address) == []


def test_peers_that_are_gone(ends):
    (sender, _), (receiver, address) = ends.make(), ends.make()
    (other, elsewhere) = ends.make()
    receiver.reserve("r", 1, 1 << 25)
    sender.write(address, chunk_of(0, 10_000, head=64))
    receiver.close()
    other.reserve("r", 2, 1 << 20)
    for _ in range(3):  # the sender learns of it at some point; nothing breaks meanwhile
        sender.write(address, chunk_of(0, 4))
        sender.poll()
    sender.abort("r", 1)
    sender.write(elsewhere, chunk_of(0, 4, epoch=2))
    assert_same(*gather(other, 1, sender), chunk_of(0, 4, epoch=2))


def test_a_link_that_ends_within_a_chunk(ends):
    (sender, _), (receiver, address) = ends.make(), ends.make()
    receiver.reserve("r", 1, 1 << 25)
    sent = replace(chunk_of(0, 10_000, head=64), checksums=(1,))  # so the header fits the ring
    sender.write(address, sent)
    sender.close()
    (landed,) = gather(receiver, 1)
    if ends.kind == "in process":
        assert landed is sent
    else:
        assert landed == replace(sent, data=None)


@pytest.mark.parametrize("seed", range(40))
def test_a_stream_in_any_pieces(seed):
    """Also when a hand-over is refused, and another aborted by the sender on the way."""
    chance = random.Random(seed)
    sent = [
        chunk_of(0, chance.randint(1, 12), f"ü{chance.randrange(3)}", i // 5, i, head=1)
        for i in range(10)
    ]
    room = {(chunk.request_id, chunk.epoch): 1 << 20 for chunk in sent if chunk.request_id != "ü1"}
    landed, outbox = deque(), Outbox()
    ring = Ring(memoryview(bytearray(Ring.COUNTS + chance.randint(1, 60))))
    inbox = Inbox(room, landed)
    for chunk in sent:
        outbox.add(chunk)
    aborted, when, turn = ("ü2", 1), chance.randrange(1, 400), 0

    def a_few(move):
        return lambda view: move(view[: chance.randint(0, 40)])

    while outbox._frames or ring._counts[0] > ring._counts[1]:
        turn += 1
        if turn == when:
            outbox.drop(aborted)
        outbox.pump(a_few(ring.send))
        inbox.pump(a_few(ring.receive))
    taken = [chunk for chunk in sent if (chunk.request_id, chunk.epoch) in room]
    kept = [chunk for chunk in landed if (chunk.request_id, chunk.epoch) == aborted]
    must = [chunk for chunk in taken if (chunk.request_id, chunk.epoch) != aborted]
    others = [chunk for chunk in landed if (chunk.request_id, chunk.epoch) != aborted]
    for got, chunk in zip(others, must, strict=True):
        assert_same(got, chunk)
    of_aborted = [chunk for chunk in taken if (chunk.request_id, chunk.epoch) == aborted]
    for got, chunk in zip(kept, of_aborted, strict=False):
        assert_same(got, chunk)
    assert turn >= when or len(kept) == len(of_aborted)


@pytest.mark.parametrize("at", [0, 3, 5, 9, 20])
def test_a_damaged_header_ends_the_stream(at):
    outbox, landed = Outbox(), deque()
    outbox.add(chunk_of(0, 4))
    frame = bytearray(outbox._frames[0][1])
    frame[at] ^= 1
    source = memoryview(bytes(frame * 2))

    def receive(view):
        nonlocal source
        count = min(len(view), len(source))
        view[:count], source = source[:count], source[count:]
        return count

    inbox = Inbox({("r", 1): 1 << 20}, landed)
    with pytest.raises(ConnectionError):
        inbox.pump(receive)
    inbox.pump(receive)
    inbox.end()
    assert not landed, "nothing after it can be read"


def test_nonsense_over_tcp_harms_nobody_else():
    sender, receiver = Tcp(), Tcp()
    address = receiver.register()
    receiver.reserve("r", 1, 1 << 20)
    secret, place = receiver._secret, where(address)
    bad = [secret + frame_about(about) for about in BAD_HEADERS]
    for nonsense in (b"GET / HTTP/1.1\r\n\r\n" * 300_000, secret + b"\0" * 8, b"x", *bad):
        with socket.create_connection(place) as stranger:
            stranger.setblocking(False)
            stranger.send(nonsense)
            sender.write(address, chunk_of(0, 3))
            assert_same(*gather(receiver, 1, sender), chunk_of(0, 3))
    sender.close()
    receiver.close()


def where(address):
    host, _, port = address.partition("@")[2].rpartition(":")
    return host, int(port)


def frame_about(about):
    header = about if isinstance(about, bytes) else json.dumps(about).encode()
    return struct.pack("<II", len(header), zlib.crc32(header)) + header


GOOD_HEADER = ["r", 1, 0, 4, [1], "float32", [2, 4, 2, 2, 8]]
BAD_HEADERS = [
    [*GOOD_HEADER[:at], bad, *GOOD_HEADER[at + 1 :]]
    for at, bads in {
        0: (1, None, ["r"], {}),
        1: (1.0, "1", -1, True, [1]),
        2: (0.5, "0", -1, None),
        3: ("4", {}),
        4: (1, "1", [1.0], [None], [[1]], {"1": 1}),
        5: ("int8", None, ["float32"], {}),
        6: ([1.5], [0], [-1, -1], [], ["2"], [True], 5, "23", {"2": 2}, [1] * 9, [1 << 70], [[2]]),
    }.items()
    for bad in bads
] + [b"[" * 100_000, b"\xff", b"1", b'"1234567"']


@pytest.mark.parametrize("about", BAD_HEADERS, ids=range(len(BAD_HEADERS)))
def test_a_header_that_is_none_of_a_chunk_ends_the_stream(about):
    source = memoryview(frame_about(about) + bytes(4096))

    def receive(view):
        nonlocal source
        count = min(len(view), len(source))
        view[:count], source = source[:count], source[count:]
        return count

    with pytest.raises(ConnectionError):
        Inbox({("r", 1): 1 << 20}, deque()).pump(receive)


def test_over_tcp_only_who_has_the_secret_can_send():
    sender, receiver = Tcp(), Tcp()
    address = receiver.register()
    receiver.reserve("r", 1, 1 << 20)
    secret, _, place = address.partition("@")
    guessed = bytes(byte ^ 1 for byte in bytes.fromhex(secret)).hex()
    for stranger in (Tcp(), Tcp()):
        stranger.write(f"{guessed}@{place}", chunk_of(4, 8))
        assert gather_until_mark(sender, receiver, address) == []
        stranger.close()
    assert len(receiver._incoming) == 1, "of the sender"
    sender.close()
    receiver.close()


def test_what_nobody_foresaw_ends_one_connection(monkeypatch):
    sender, receiver = Tcp(), Tcp()
    address = receiver.register()
    receiver.reserve("r", 1, 1 << 20)
    sender.write(address, chunk_of(0, 3))
    gather(receiver, 1, sender)
    (link, inbox), other = receiver._incoming[0], Tcp()

    def fails(_):
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(inbox, "pump", fails)
    other.write(address, chunk_of(3, 4))
    assert_same(*gather(receiver, 1, other), chunk_of(3, 4))
    assert link.fileno() < 0
    for end in (sender, other, receiver):
        end.close()


def test_a_ring_without_memory_is_refused(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space left")

    receiver = SharedMemory()
    receiver.register()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CapacityError, match="no space left"):
        receiver.reserve("r", 1, 1)
    assert segments() == []
    receiver.close()


SENDER = """
import sys, torch
from stepserve.core.payload import KvChunk
from stepserve.engine.kv_transfer import SharedMemory, Tcp
end = {"tcp": Tcp, "shared memory": SharedMemory}[sys.argv[1]]()
kv = torch.arange(40000.0).view(2, 5000, 2, 2, 1)
end.write(sys.argv[2], KvChunk("r", 1, 7, 5007, (1, 2), kv))
while not sys.stdin.read(1):
    pass
end.close()
"""

RECEIVER = """
import os, signal
from stepserve.engine.kv_transfer import SharedMemory
end = SharedMemory()
name = end.register()
end.reserve("r", 1, 1000)
assert any(file.startswith(name) for file in os.listdir("/dev/shm"))
print(name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("kind", STREAMS)
def test_between_processes(kind):
    receiver = {"shared memory": SharedMemory, "tcp": Tcp}[kind]()
    address = receiver.register()
    receiver.reserve("r", 1, 1 << 20)
    with subprocess.Popen(
        [sys.executable, "-c", SENDER, kind, address], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        (landed,) = gather(receiver, 1)
        _, errors = child.communicate(b".")
    assert (child.returncode, errors) == (0, b""), "and no word of leaked memory"
    assert (landed.start, landed.stop, landed.checksums) == (7, 5007, (1, 2))
    assert torch.equal(landed.data, torch.arange(40000.0).view(2, 5000, 2, 2, 1))
    receiver.close()
    assert segments() == []


def test_a_killed_receiver_leaves_no_segment():
    """Its resource tracker outlives it for a moment, and holds our end of the pipe so long."""
    with subprocess.Popen(
        [sys.executable, "-c", RECEIVER], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        name, _ = child.communicate()
    assert child.returncode == -9
    assert name.strip().startswith(b"stepserve-")
    assert not list(Path("/dev/shm").glob(f"{name.decode().strip()}*"))


def test_what_a_killed_process_left_is_removed_by_the_next():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left, kept = (Path(f"/dev/shm/stepserve-{pid}-0-0") for pid in (gone.pid, os.getpid()))
    for path in (left, kept):
        path.touch()
    SharedMemory().register()
    assert not left.exists()
    assert kept.exists()
    kept.unlink()

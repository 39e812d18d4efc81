"""Who comes in at an instance's address, and whom nobody has to wait for."""

import contextlib
import socket
import threading
from multiprocessing import AuthenticationError

import pytest

from stepserve.core.instance import InstanceSpec
from stepserve.live import connections, transport_remote
from stepserve.live.connections import Address, Listener, connect
from stepserve.live.transport_remote import RemoteHost


@contextlib.contextmanager
def entrance():
    """One that somebody waits at, and what that wait gave."""
    made, came = Listener("127.0.0.1"), []
    thread = threading.Thread(target=lambda: came.append(made.wait()), daemon=True)
    thread.start()
    yield made.address, thread, came
    thread.join(60)
    assert not thread.is_alive()
    made.close()


def test_who_hangs_up_talks_nonsense_or_stays_silent_keeps_nobody_out():
    with contextlib.ExitStack() as stack, entrance() as (address, thread, came):
        where = address.host, address.port
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\x04none"):
            with socket.create_connection(where) as stranger:
                stranger.sendall(said)
        for _ in range(20):
            stack.enter_context(socket.create_connection(where))  # says nothing
        near = stack.enter_context(connect(address))
        thread.join()
        far, offset_s = came[0]
        stack.enter_context(far)
        assert abs(offset_s) < 60, "one clock, here"
        near.send("in")
        assert far.recv() == "in"


def test_a_wrong_word_is_refused():
    with entrance() as (address, _, came):
        with pytest.raises(AuthenticationError):
            connect(Address(address.host, address.port, b"wrong"))
        assert not came
        connect(address).close()


def test_silence_at_either_side_has_an_end(monkeypatch):
    monkeypatch.setattr(connections, "HANDSHAKE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(BlockingIOError):
        connect(Address("127.0.0.1", silent.getsockname()[1], b"word"))
    with entrance() as (address, _, came):
        with socket.create_connection((address.host, address.port)) as stranger:
            while stranger.recv(1000):
                """Its challenge, and then the end."""
        assert not came
        near = connect(address)
        near.close()


class Unreachable:
    """A ``Process`` whose connection comes to nothing, for ever."""

    def __init__(self):
        self.given_up = threading.Event()

    def connect(self):
        self.given_up.wait()
        raise OSError("given up")

    def lives(self):
        return True

    def kill(self):
        self.given_up.set()


def test_an_instance_that_nobody_can_connect_to_is_lost(monkeypatch):
    spec = InstanceSpec("i", 1, 8, 8, 8)
    host = RemoteHost(spec, 0, Unreachable(), lambda *_: None)
    host.start()
    assert not host.is_lost(1e9)
    monkeypatch.setattr(transport_remote, "CONNECT_S", -1.0)
    assert host.is_lost(1e9)
    host.kill()
    host.join()

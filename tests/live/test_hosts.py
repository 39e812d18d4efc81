"""Ends of instances that go otherwise than they should."""

import threading

import pytest

from stepserve.core.instance import InstanceSpec
from stepserve.live import transport, wire
from stepserve.live.transport import Hosts
from stepserve.live.transport_remote import RemoteHost
from support.remote_cluster import scrambled_pair

SPECS = tuple(InstanceSpec(f"i{n}", 1, 8, 8, 8) for n in range(3))


class StubHost:
    """A host that is lost."""

    def __init__(self, spec, incarnation, calls):
        self.spec, self.incarnation, self.calls = spec, incarnation, calls

    def start(self):
        self.calls.append(("start", self.spec.id))

    def retire(self, announce):
        self.calls.append(("retire", self.spec.id))

    def kill(self):
        self.calls.append(("kill", self.spec.id))
        raise RuntimeError("no cluster there")

    def is_lost(self, hang_s):
        return True

    def join(self, timeout):
        self.clock.now_s += timeout


class Clock:
    """Stands while nobody waits."""

    now_s = 0.0

    def monotonic(self):
        return self.now_s


def test_all_that_hang_at_the_end_are_waited_for_together(monkeypatch):
    clock, calls = Clock(), []
    monkeypatch.setattr(transport, "time", clock)
    monkeypatch.setattr(StubHost, "clock", clock, raising=False)
    hosts = Hosts(lambda spec, number: StubHost(spec, number, calls), hang_s=60.0)
    for spec in SPECS:
        hosts.start(spec)
    calls.clear()
    hosts.close()
    assert calls == [(call, spec.id) for call in ("retire", "kill") for spec in SPECS]
    assert clock.now_s == 60.0 + transport.FREE_S


def test_all_that_are_lost_are_named_even_if_they_cannot_be_killed():
    calls = []
    hosts = Hosts(lambda spec, number: StubHost(spec, number, calls), hang_s=1.0)
    for spec in SPECS:
        hosts.start(spec)
    assert hosts.lost() == SPECS
    assert [call for call in calls if call[0] == "kill"] == [("kill", spec.id) for spec in SPECS]
    assert hosts.lost() == ()


class StuckProcess:
    """Its connection is there, or comes at some point; nothing ends it until ``ends`` is set."""

    def __init__(self, connects=True):
        self.near, self.far = scrambled_pair(0)
        self.connects, self.ends = threading.Event(), threading.Event()
        if connects:
            self.connects.set()

    def connect(self):
        self.connects.wait()
        return self.near

    def lives(self):
        return True

    def kill(self):
        self.ends.wait()


@pytest.mark.parametrize("connects", [True, False])
def test_a_kill_waits_for_nothing_and_ends_the_connection(monkeypatch, connects):
    monkeypatch.setattr(wire, "LOOK_S", 0.005)
    process = StuckProcess(connects)
    host = RemoteHost(SPECS[0], 0, process, lambda *_: None)
    host.start()
    while connects and host._link is None:
        host.join(0.001)
    if connects:
        host.kill()
    else:
        host.retire(announce=False)
        process.connects.set()
    while process.far.poll(60) and process.far._next[0] is not None:
        process.far.recv_bytes()
    assert host.is_alive(), "its process holds out"
    process.ends.set()
    host.join()

"""A recorded live run, replayed into fresh schedulers, reproduces every action."""

import asyncio
import contextlib
import dataclasses
import gzip
import itertools
import typing
from pathlib import Path

import pytest

from stepserve.cli.main import main
from stepserve.core.actions import RunBatch
from stepserve.core.config import Choice, ControlConfig, ServeConfig
from stepserve.core.errors import FieldError
from stepserve.core.events import (
    ChunkLanded,
    Event,
    HandedOff,
    HandoverAcknowledged,
    HandoverPrepared,
    HandoverStalled,
    InstanceStopped,
    PlanSolved,
    SegmentExtended,
    TimerExpired,
)
from stepserve.core.request import SLO, CacheMode, FinishReason
from stepserve.cost.step_log import read_step_logs
from stepserve.live.event_log import EventLog, read_events
from stepserve.live.recording import Handled
from support.live_cluster import collect, make_live_request, running_cluster

PLANNED = {PlanSolved, InstanceStopped}
"""Replayed in ``tests/live/test_control.py``: this cluster plans nothing."""

HANDED_OVER = {
    SegmentExtended,
    HandoverPrepared,
    ChunkLanded,
    HandedOff,
    HandoverAcknowledged,
    HandoverStalled,
    TimerExpired,
}
"""Of autoregressive models only."""


async def run_a_cluster(config):
    """Deadlines, a cancellation, the loss of an instance and of the global scheduler: every kind
    of event occurs."""
    async with running_cluster(config) as cluster:
        cancelled_on, lost = [], []

        def disturb(request):
            """Cancel the fourth request when it emits; later lose the instance it was not on."""
            ledger = cluster.loop.supervisor.scheduler.ledger
            segment = ledger.requests[request.id].segment if request.id in ledger.requests else None
            if request.id == "3" and not cancelled_on and segment:
                cancelled_on.append(segment.instance)
                cluster.frontend.cancel(request.id, FinishReason.CANCELLED)
            elif cancelled_on and not lost and segment and segment.instance != cancelled_on[0]:
                lost.append(segment.instance)
                cluster.transport.kill(segment.instance)
            elif lost and not cluster.loop.supervisor.restarts:
                cluster.operator.restart_scheduler()

        jobs = []
        for index in range(14):
            slo = SLO(e2e_s=0.02 * index) if index % 2 else SLO()
            cache = list(CacheMode)[index % 3]
            request, payload = make_live_request(
                cluster.frontend, str(index), slo=slo, cache=cache, output=41, floor=0.5
            )
            request = dataclasses.replace(request, client_id=f"client {index}")
            jobs.append(collect(cluster.frontend, request, payload, disturb))
        await asyncio.gather(*jobs)


@pytest.fixture(scope="module", params=["jsonl", "jsonl.gz"])
def logs(request, tmp_path_factory):
    """An event log and a step log of the same run."""
    folder = tmp_path_factory.mktemp("run")
    config = ServeConfig(
        instances=2,
        threads_per_instance=1,
        kv_pages=64,
        max_running_requests=4,
        events=str(folder / f"events.{request.param}"),
        log_steps=str(folder / "steps.csv.gz"),
        control=ControlConfig(caps_every_s=0.0),
    )
    asyncio.run(run_a_cluster(config))
    return Path(config.events), Path(config.log_steps)


def test_replay_reproduces_every_action(logs, capsys):
    assert main(["replay", str(logs[0])]) == 0
    out = capsys.readouterr().out
    assert "every action came out again" in out
    for kind in ("RunBatch", "SegmentPlaced", "CapsSet", "Rebuild", "Finish"):
        assert f" {kind}\n" in out
    _, entries = read_events(logs[0])
    entries = list(entries)
    assert len(entries) > 200
    assert {type(e.event) for e in entries} == set(typing.get_args(Event)) - PLANNED - HANDED_OVER
    batches = [a.batch for e in entries for a in e.actions if isinstance(a, RunBatch)]
    picked = {step.threshold for batch in batches for step in batch.steps}
    assert len(picked) > 1, "thresholds were chosen, not fixed"
    assert len({e.scheduler for e in entries}) >= 5, "two global, two local, and the rebuilt one"


def test_a_decision_that_comes_out_otherwise_is_shown(logs, tmp_path, capsys):
    text = reread(logs[0])
    changed = tmp_path / "changed.jsonl"
    assert '"why":"arrived"' in text
    changed.write_text(text.replace('"why":"arrived"', '"why":"fell from the sky"', 1))
    assert main(["replay", str(changed)]) == 1
    out = capsys.readouterr().out
    assert "first difference: global," in out
    assert "recorded: Predict(" in out
    assert "replayed: Predict(" in out


def test_a_log_that_was_cut_off_replays_up_to_there(logs, tmp_path):
    cut = tmp_path / f"cut{logs[0].suffix}"
    content = logs[0].read_bytes()
    cut.write_bytes(content[: len(content) * 2 // 3])
    assert main(["replay", str(cut)]) == 0
    assert 0 < len(list(read_events(cut)[1])) < len(list(read_events(logs[0])[1]))


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "is not a"), ("{}\n", "is not a"), (None, "cannot be read")],
)
def test_what_is_no_event_log_is_refused(tmp_path, capsys, text, message):
    path = tmp_path / "other.jsonl"
    if text is not None:
        path.write_text(text)
    assert main(["replay", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_the_story_of_a_request_is_told_stop_by_stop(logs, capsys):
    assert main(["trace", str(logs[0]), "--request", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    stops = [line.split(" s  ", 1)[1] for line in lines]
    assert stops[0] == (
        "arrived: prompt 10, at most 41 tokens, deadline in 0.1 s, threshold 0.9 to 0.5, cache dual"
    )
    assert stops[1].startswith("predicted: ")
    assert any(stop.startswith("placed on node0-gpu") for stop in stops)
    assert any(stop.startswith("recompute step on node0-gpu") for stop in stops)
    assert any(stop.startswith("cached step on node0-gpu") for stop in stops)
    assert stops[-1].startswith("finished (length): ")
    assert main(["trace", str(logs[0]), "--request", "client 5"]) == 0
    assert capsys.readouterr().out.splitlines() == lines
    assert main(["trace", str(logs[0])]) == 0
    assert "5  client 5  prompt 10" in capsys.readouterr().out
    assert main(["trace", str(logs[0]), "--request", "99"]) == 2
    assert "no '99' among the 14 requests" in capsys.readouterr().err


def test_the_step_log_has_a_row_for_every_step_that_counted(logs):
    rows = read_step_logs([logs[1]])
    assert rows.truncated == 0
    assert len(set(rows.request.tolist())) == 14
    assert set(rows.block_tokens.tolist()) == {8}


async def run_outside(config):
    """Twelve requests with deadlines, each alone in what it asks for."""
    async with running_cluster(config) as cluster:
        jobs = []
        for index in range(12):
            request, payload = make_live_request(
                cluster.frontend, str(index), slo=SLO(e2e_s=30.0), output=41, floor=0.5
            )
            jobs.append(collect(cluster.frontend, request, payload))
        await asyncio.gather(*jobs)


def test_policies_of_others_serve_and_replay_from_the_header(tmp_path, capsys):
    low = Choice("support.outside:LowEarly", {"floor_tokens": 16})
    config = ServeConfig(
        instances=2,
        threads_per_instance=1,
        kv_pages=200,
        events=str(tmp_path / "events.jsonl"),
        control=ControlConfig(
            threshold=low, placement=Choice("support.outside:MostLoaded"), migration=Choice("none")
        ),
    )
    asyncio.run(run_outside(config))
    setup, entries = read_events(Path(config.events))
    assert setup.control.threshold == low
    batches = [(e.instance, a.batch) for e in entries for a in e.actions if isinstance(a, RunBatch)]
    assert len({instance for instance, _ in batches}) == 1, "the fullest, that is always the same"
    assert {step.threshold for _, batch in batches for step in batch.steps} == {0.5, 0.9}
    assert main(["replay", config.events]) == 0
    assert "every action came out again" in capsys.readouterr().out
    text = Path(config.events).read_text()
    changed = tmp_path / "changed.jsonl"
    changed.write_text(text.replace('["floor_tokens",16]', '["floor_tokens",0]', 1))
    assert changed.read_text() != text
    assert main(["replay", str(changed)]) == 1, "the options count"
    changed.write_text(text.replace("LowEarly", "Nobody", 1))
    assert main(["replay", str(changed)]) == 2
    assert "support.outside:Nobody cannot be loaded" in capsys.readouterr().err


def reread(path):
    content = path.read_bytes()
    return (gzip.decompress(content) if ".gz" in path.suffixes else content).decode()


def rewritten(log, path, part_bytes, keep, until=None):
    """The same run, written in parts."""
    setup, entries = read_events(log)
    specs = {}
    with contextlib.closing(EventLog(path, setup, part_bytes, keep)) as parts:
        for entry in itertools.islice(entries, until):
            spec = specs.setdefault(entry.scheduler, entry.spec)
            parts.note(
                Handled(spec, entry.incarnation, entry.at_s, entry.event, entry.actions, 0.0)
            )
    return path


def numbered(path):
    return sorted(int(p.name.rpartition(".")[2]) for p in path.parent.glob(f"{path.name}.*"))


def test_a_log_in_parts_is_read_as_one(logs, tmp_path, capsys):
    """Whichever part is named: from the beginning of its run to its own end."""
    size = len(reread(logs[0]))
    path = rewritten(logs[0], tmp_path / logs[0].name, size // 5, 99)
    older = numbered(path)
    assert older == [*range(1, len(older) + 1)]
    assert len(older) >= 4
    parts = [path, *(path.with_name(f"{path.name}.{n}") for n in older)]
    assert all(len(reread(part)) < size // 2 for part in parts)
    assert main(["replay", str(path)]) == 0
    assert "every action came out again" in capsys.readouterr().out

    def told(log):
        return [(e.at_s, e.event, e.actions, e.scheduler) for e in read_events(log)[1]]

    assert told(path) == told(logs[0])
    before = told(parts[2])
    assert before == told(logs[0])[: len(before)]
    assert 0 < len(before) < len(told(path))
    for command in (
        ["trace"],
        ["simulate", "--out", str(tmp_path / "out"), "--jobs", "1", "--from"],
    ):
        assert main([*command, str(path)]) == 0


def test_what_is_not_kept_is_said(logs, tmp_path, capsys):
    size = len(reread(logs[0]))
    path = rewritten(logs[0], tmp_path / logs[0].name, size // 6, 2)
    assert numbered(path) == [1, 2], "no more are kept"
    assert main(["replay", str(path)]) == 2
    assert "parts 1 to" in capsys.readouterr().err
    assert main(["trace", str(path)]) == 0
    assert list(read_events(path)[1]), "the rest can still be told"


def test_an_earlier_run_is_kept_and_is_no_part_of_the_next(logs, tmp_path):
    path = tmp_path / logs[0].name
    first = list(read_events(rewritten(logs[0], path, 0, 2, until=20))[1])
    second = list(read_events(rewritten(logs[0], path, 0, 2, until=30))[1])
    assert (len(first), len(second)) == (20, 30)
    earlier = path.with_name(f"{path.name}.1")
    assert len(list(read_events(earlier)[1])) == 20
    for _ in range(3):
        rewritten(logs[0], path, 0, 2, until=5)
    assert numbered(path) == [1, 2]


def test_a_file_that_is_no_log_is_not_overwritten(logs, tmp_path):
    path = tmp_path / "notes.jsonl"
    path.write_text("mine")
    rewritten(logs[0], path, 0, 1, until=5)
    assert path.with_name("notes.jsonl.1").read_text() == "mine"
    with pytest.raises(FieldError, match="is not a"):
        read_events(path.with_name("notes.jsonl.1"))


def test_a_log_that_cannot_go_on_in_a_new_file_goes_on_in_this_one(logs, tmp_path, monkeypatch):
    def fails(self, target):
        raise OSError("no room")

    monkeypatch.setattr(Path, "replace", fails)
    path = rewritten(logs[0], tmp_path / logs[0].name, len(reread(logs[0])) // 5, 9)
    assert numbered(path) == []
    assert len(list(read_events(path)[1])) == len(list(read_events(logs[0])[1]))

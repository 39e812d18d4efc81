"""``stepserve trace`` of autoregressive requests that two instances share, one cut on either side.

Cuts are those that placement chooses on an idle cluster, from a profile that is made up: only
the times of the trace depend on the machine.
"""

import asyncio
import dataclasses
import re
import unittest.mock
from itertools import pairwise, product

import pytest

from stepserve.cli.main import main
from stepserve.core.config import ServeConfig
from stepserve.core.request import SLO, FinishReason
from stepserve.core.step import Mix
from stepserve.cost.batch_profile import BatchProfile
from stepserve.engine.loader import load_model
from stepserve.families import profiles
from support.ar_models import make, write_checkpoint
from support.live_cluster import collect, running_cluster
from support.parts import make_control

NAME, FIRST, SECOND = "told", "node0-gpu0", "node0-gpu1"
SHAPES = {"prefill": (600, 24), "decode": (48, 260)}


def profile():
    """0.4 ms a prefilled token, 4 ms a decode."""
    grid = product((0, 64, 512), (0, 1, 8), (0, 512))
    steps = [
        (Mix(p, p * p // 2, d, d * c), 0.002 + 4e-4 * p + 2e-3 * d) for p, d, c in grid if p + d
    ]
    shape = {"parameters": 1e5, "layers": 2, "hidden": 32}
    bytes_ = {"kv_bytes_per_token": 256.0, "weight_bytes": 4e5}
    return BatchProfile.fitted(**shape, **bytes_, steps=steps, source="made up")


async def serve(config, loaded, prompt, output):
    """One request, alone, told that its output will reach its limit."""
    with unittest.mock.patch.object(profiles, "_measured", return_value=profile()):
        async with running_cluster(config, loaded=loaded) as cluster:
            while len(cluster.loop.status().instances) < config.instances:
                await asyncio.sleep(0)
            request, payload = make(NAME, prompt, output, ignore_eos=True)
            request = dataclasses.replace(
                request,
                arrival_s=cluster.frontend.now_s(),
                slo=SLO(ttft_s=9.0, tbt_s=0.1),
                expected_output_tokens=output,
            )
            end = (await collect(cluster.frontend, request, payload)).end
    assert end.reason is FinishReason.LENGTH


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Event log of each shape."""
    folder = tmp_path_factory.mktemp("logs")
    loaded = load_model(write_checkpoint(folder))
    cuts = make_control(chunk_tokens=160, placement={"gain": 0.05})
    logs = {}
    for name, shape in SHAPES.items():
        logs[name] = folder / f"{name}.jsonl"
        config = ServeConfig(
            instances=2,
            threads_per_instance=1,
            kv_pages=200,
            events=str(logs[name]),
            control=cuts,
        )
        asyncio.run(serve(config, loaded, *shape))
    return logs


def stops(log, capsys):
    """The trace's lines without times, and without what is said of single steps."""
    assert main(["trace", str(log), "--request", NAME]) == 0
    lines = [line.split(" s  ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    return lines, [line for line in lines if not re.match(r"(predicted|\w+ step on)", line)]


@pytest.mark.parametrize("where", SHAPES)
def test_the_trace_of_a_split_request(told, where, capsys):
    prompt, output = SHAPES[where]
    lines, told_stops = stops(told[where], capsys)
    rest = iter(told_stops)

    def follows(pattern):
        """What the pattern finds in the first later line that it matches."""
        for line in rest:
            if found := re.fullmatch(pattern, line):
                return found.groups()
        raise AssertionError(f"{pattern!r} is not in {told_stops}")

    targets = "no deadline, 9 s to the first token, 0.1 s between tokens"
    follows(f"arrived: prompt {prompt}, at most {output} tokens, {targets}")
    times = r"T1 ([\d.]+) s, T2 ([\d.]+) s, TBT ([\d.]+) s"
    cut, *promised = follows(rf"placed on {SECOND} from (\d+): epoch 2, .*; s=\d+ of .*, {times}")
    assert int(cut) < prompt if where == "prefill" else prompt < int(cut) < prompt + output - 1
    again = follows(rf"placed on {FIRST} up to {cut}: epoch 1, .*; s={cut} of .*, {times}")
    assert list(again) == promised
    emitted = max(0, int(cut) - prompt + 1)
    follows(f"handed off to {SECOND} at {cut}, with {emitted} tokens emitted")
    follows(f"{SECOND} takes over: epoch 2, goes on at {cut}")
    measured = r"in ([\d.]+) s \(machine time predicted ([\d.]+) s\)"
    between = r", ([\d.]+) ms between tokens \(predicted ([\d.]+) ms\)"
    settled, rest = prompt + output - 1, iter(sorted(told_stops))  # the first may hear later
    left = f"left {FIRST}: handed_off, {cut} positions settled {measured}"
    first = follows(left if where == "prefill" else left + between)
    second = follows(f"left {SECOND}: finished, {settled} positions settled {measured}{between}")
    assert [first[1], second[1]] == promised[:2]
    assert float(second[3]) == pytest.approx(1e3 * float(promised[2]), abs=0.5)
    assert min(float(first[0]), float(second[0]), float(second[2])) > 0.0
    assert [line for line in told_stops if line.startswith("finished (length): ")]
    kinds = {line.split(":")[0] for line in lines if " step on " in line}
    both = {f"prefill step on {FIRST}", f"decode step on {SECOND}"}
    extra = f"prefill step on {SECOND}" if where == "prefill" else f"decode step on {FIRST}"
    assert kinds == both | {extra}


@pytest.mark.parametrize("where", SHAPES)
def test_room_and_every_push_are_told_in_order(told, where, capsys):
    lines, told_stops = stops(told[where], capsys)
    cut = int(re.search(r"placed on .* up to (\d+):", "\n".join(lines)).group(1))
    assert f"room on {SECOND}, to go on at {cut} after {FIRST}" in told_stops
    assert f"joined {FIRST} at position 0 until {cut}" in told_stops
    assert f"{FIRST} may push keys and values" in told_stops
    assert f"{FIRST} hears that it was taken over" in told_stops
    pushed = (
        "keys and values {start} to {stop} go to " + SECOND + ": {stop} of {cut} tokens settled"
    )
    landed = "keys and values {start} to {stop} landed on " + SECOND
    chunks = [line for line in told_stops if line.startswith("keys and values")]
    ranges = [tuple(map(int, re.findall(r"\d+", line)[:2])) for line in chunks if " go to " in line]
    assert len(ranges) > 1, "pushed while it ran"
    assert ranges[0][0] == 0
    assert ranges[-1][1] == cut
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    for start, stop in ranges:
        push = chunks.index(pushed.format(start=start, stop=stop, cut=cut))
        assert push < chunks.index(landed.format(start=start, stop=stop))
    assert not [line for line in told_stops if "waits no longer" in line], "all in time"


@pytest.mark.parametrize("where", SHAPES)
def test_the_recorded_run_replays(told, where, capsys):
    assert main(["replay", str(told[where])]) == 0
    assert "every action came out again" in capsys.readouterr().out

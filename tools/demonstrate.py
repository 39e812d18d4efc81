"""Shows the mechanisms of DiLaServe or DynaServe at work on a server that is started for it.

    python tools/demonstrate.py dilaserve
    python tools/demonstrate.py dynaserve --cluster ray --layout 2,1

`dilaserve`: the bundled diffusion model and a planner, at a low rate, then at a high one, all
requests with deadlines. `dynaserve`: a random autoregressive model, some of the prompts long, a
target between tokens. Rates are shares of what the machine can do, which is measured first. What
this tool does not know goes to `stepserve serve`. Then the event log is replayed. Exits with 1 if a
request failed, a mechanism was never seen, or the replay differs. ``--short`` asks a few requests
only, too few for every mechanism: that one was never seen is no failure then.
"""

import argparse
import contextlib
import json
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from stepserve.cli import watch
from stepserve.cli.main import main as stepserve
from stepserve.core.events import HandedOff
from stepserve.live.event_log import read_events

START_S = 300.0
"""How long the server may take until it is ready, on a machine that does much else."""

AT_ONCE = 16

Report = Mapping[str, Any]
"""Of one run of `stepserve bench`; its key ``total`` is what /metrics counted until then."""

SHAPE = ("--layers", "2", "--hidden", "128", "--positions", "2048")
"""Of the autoregressive model: two cores are enough for it."""

STEPSERVE = (sys.executable, "-m", "stepserve.cli.main")


@contextmanager
def served(folder: Path, options: Sequence[str]) -> Iterator[str]:
    """A server, ready; its address. At the end everything accepted has been answered."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [*STEPSERVE, "serve", "--port", port, *options]
    say(command[3:])
    with (folder / "serve.log").open("w") as log:
        process = subprocess.Popen(command, stderr=log, stdout=log)
    try:
        url = f"http://127.0.0.1:{port}"
        until_s = time.monotonic() + START_S
        while not ready(url):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
            if process.returncode is not None or time.monotonic() > until_s:
                raise SystemExit((folder / "serve.log").read_text())
        yield url
        process.send_signal(signal.SIGTERM)
        if process.wait(START_S):
            raise SystemExit(f"the server ended with {process.returncode}")
    finally:
        process.kill()


def ready(url: str) -> bool:
    """Whether an instance is up."""
    try:
        return httpx.get(f"{url}/ready", timeout=10.0).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def say(words: Sequence[str]) -> None:
    """What could be typed instead."""
    print(f"\n$ stepserve {shlex.join(words)}", flush=True)


def run(*words: str) -> int:
    """A command of stepserve, in this process; its exit status."""
    say(words)
    status = stepserve(words)
    sys.stdout.flush()
    return status


def bench(url: str, folder: Path, *options: str) -> Report:
    """Load; what the benchmark reports."""
    file = folder / "bench.json"
    run("bench", "--url", url, "--json", str(file), "--detailed", *options)
    (found,) = json.loads(file.read_text())["variants"].values()
    metrics = httpx.get(f"{url}/metrics", timeout=60.0).raise_for_status().text
    return {**found, "total": watch.parse(metrics)}


def total(name: str) -> Callable[[Sequence[Report]], float]:
    """Counted by the server from its start to the end of the last run."""
    return lambda reports: reports[-1]["total"][f"stepserve:{name}_total"]


def dilaserve(url: str, folder: Path, args: argparse.Namespace) -> list[Report]:
    """Few requests, then more than their preferred thresholds leave time for."""
    most = capacity(url, folder)
    slo = ("--slo-multiple", str(args.slo_multiple))
    shares = (args.low, args.high)
    return [bench(url, folder, *slo, *rate(share * most, args.seconds)) for share in shares]


def dynaserve(url: str, folder: Path, args: argparse.Namespace) -> list[Report]:
    """A fifth of the prompts is long."""
    load = ["--dataset", "random", "--prompt-tokens", "64", "--long-prompts", "0.2:1200"]
    load += ["--max-tokens", "48", "--ignore-eos"]
    most = capacity(url, folder, *load)
    load += ["--tbt-ms", str(args.tbt_ms)]
    return [bench(url, folder, *load, *rate(args.low * most, args.seconds))]


def capacity(url: str, folder: Path, *load: str) -> float:
    """Requests per second when ``AT_ONCE`` come together."""
    found = bench(url, folder, *load, "--rate", "1000", "--requests", str(AT_ONCE))
    return float(found["completed"]) / float(found["duration_s"])


def rate(per_s: float, seconds: float) -> list[str]:
    """Arrivals for some seconds, a few at least."""
    return ["--rate", f"{per_s:.3g}", "--requests", str(max(12, round(per_s * seconds)))]


def thresholds(reports: Sequence[Report]) -> float:
    """How many different mean thresholds requests had in the last run."""
    means = (record["dlm"].get("threshold_mean") for record in reports[-1]["records"])
    return len({round(mean, 3) for mean in means if mean is not None})


Mechanisms = Mapping[str, Callable[[Sequence[Report]], float]]
"""By its name: how often something was seen in the runs."""

DILASERVE: Mechanisms = {
    "updates of the caps": total("caps_updates"),
    "caps below 0.9 (the lowest)": lambda reports: max(
        0.0, 0.9 - min(report["server"]["cap_lowest"] for report in reports)
    ),
    "different thresholds of requests": lambda reports: max(0.0, thresholds(reports) - 1),
    "forecasts refreshed": total("forecasts_refreshed"),
    "migrations": total("migrations_done"),
    "changes of the layout": total("layout_changes"),
}
DYNASERVE: Mechanisms = {
    "requests handed over": total("handovers"),
    "share of gaps in time": lambda reports: reports[-1]["text_gaps_in_time"],
}


def shown(mechanisms: Mechanisms, reports: Sequence[Report]) -> tuple[bool, bool]:
    """Print what was seen; whether everything was, and whether every request was answered."""
    print()
    seen = {name: count(reports) for name, count in mechanisms.items()}
    for name, value in seen.items():
        print(f"{value:10.4g} {name}{'' if value else ': NEVER SEEN'}")
    asked = sum(report["requests"] for report in reports)
    done = sum(report["completed"] for report in reports)
    print(f"{done} of {asked} requests were answered whole")
    return all(seen.values()), done == asked


def traced(events: Path) -> bool:
    """Print the trace of a request that was handed over; whether there was one."""
    _, entries = read_events(events)
    cut = (entry.event.request_id for entry in entries if isinstance(entry.event, HandedOff))
    name = next(cut, None)
    return name is not None and run("trace", str(events), "--request", name) == 0


def ar_model(folder: Path) -> list[str]:
    """Random weights and how long its batches take; options of `serve`."""
    model = folder / "model"
    writer = Path(__file__).parent / "random_checkpoint.py"
    subprocess.run([sys.executable, writer, model, *SHAPE], check=True)
    profile = model / "batch_profile.json"
    if run("profile", "--model", str(model), "--repeats", "2", "--out", str(profile)):
        raise SystemExit("the model could not be measured")
    config = folder / "serve.toml"
    config.write_text("[control.placement]\ngain = 0.05\n")  # as published: our own cuts less
    return ["--model", str(model), "--instances", "2", "--config", str(config)]


def main() -> int:
    """Serve, load, show, replay; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("system", choices=("dilaserve", "dynaserve"))
    parser.add_argument("--short", action="store_true", help="a few requests, to try it")
    parser.add_argument("--seconds", type=float, default=30.0, help="of load at each rate")
    parser.add_argument("--low", type=float, default=0.4, help="rate, as a share of capacity")
    parser.add_argument("--high", type=float, default=1.5, help="the second one, of dilaserve")
    parser.add_argument("--slo-multiple", type=float, default=3.0, help="of dilaserve")
    parser.add_argument("--tbt-ms", type=float, default=200.0, help="of dynaserve")
    args, others = parser.parse_known_args()
    if args.short:
        args.seconds = 0.0
    with tempfile.TemporaryDirectory() as name:
        folder, events = Path(name), Path(name) / "run.jsonl.gz"
        options = ["--events", str(events), "--threads-per-instance", "1"]
        if args.system == "dilaserve":
            options += ["--instances", "3", "--planner", "capacity_ilp", "--plan-every", "8"]
            load, mechanisms = dilaserve, DILASERVE
        else:
            options += ar_model(folder)
            load, mechanisms = dynaserve, DYNASERVE
        with served(folder, [*options, *others]) as url:
            reports = load(url, folder, args)
        seen, ok = shown(mechanisms, reports)
        ok &= run("replay", str(events)) == 0
        if args.system == "dynaserve":
            seen &= traced(events)
        ok &= seen or args.short
    print("\nall answered, all replayed" if ok else "\nnot all was as it should be")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

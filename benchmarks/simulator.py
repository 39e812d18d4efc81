"""Speed of the simulator with full policies, where its time goes, and how it grows.

A saturating GSM8K-like load on 16 GPUs, then the same load per GPU on 256. Times are CPU
seconds of one process, and also multiples of a plain heap event on the same machine, which is
what to compare between machines. A row-step is one request's share of one batch.

    python benchmarks/simulator.py [--system dilaserve] [--profile]
"""

import argparse
import cProfile
import heapq
import pstats
import time
from dataclasses import dataclass

from stepserve.core.request import Family
from stepserve.cost.boosted_steps import StepModel
from stepserve.sim.config import Setting
from stepserve.sim.diffusion import DiffusionSimulation, train_predictor
from stepserve.sim.experiment import read_experiment
from stepserve.sim.instance import untimed
from stepserve.sim.measure import Meter
from stepserve.sim.simulate import rare_collection
from stepserve.sim.simulation import Point
from stepserve.sim.systems import SYSTEMS
from stepserve.sim.world import World

SYSTEMS_OF = SYSTEMS[Family.DIFFUSION]

GOAL_US = 18.0
"""Microseconds per row-step at which the published 2-hour run takes 120 s of CPU."""
RATE_PER_GPU_PER_S = 1.65
PARTS = ("local", "global", "outcomes", "predictor")


def heap_event_us() -> float:
    """CPU microseconds of one pop and push on a heap of 1,000 tuples: the machine's unit."""
    heap = [(float(i), i) for i in range(1000)]
    start = time.process_time()
    for number in range(300_000):
        at_s, _ = heapq.heappop(heap)
        heapq.heappush(heap, (at_s + 1000.0, number))
    return (time.process_time() - start) / 0.3


@dataclass
class Result:
    """One run: CPU and wall seconds, requests, row-steps."""

    world: World
    cpu_s: float
    wall_s: float
    meter: Meter

    @property
    def requests(self) -> int:
        return len(self.world.records)

    @property
    def row_steps(self) -> int:
        return sum(r.step_count for r in self.world.records.values())


def run(name: str, nodes: int, requests: int, model: StepModel | None, meter_parts: bool) -> Result:
    """Simulate a load of so many requests on ``nodes`` nodes of 4 GPUs."""
    rates = [RATE_PER_GPU_PER_S]
    experiment = read_experiment(
        {
            "systems": [name],
            "setting": {"model": "llada-8b", "nodes": [4] * nodes},
            "workload": {"name": "gsm8k", "requests": requests, "rates_per_gpu_per_s": rates},
        }
    )
    point = Point(name, name, experiment.rates_per_s[0], 0)
    simulation = DiffusionSimulation(experiment, point, model)
    meter = Meter(time.perf_counter, PARTS)
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    world = simulation.world(timed=meter.timed if meter_parts else untimed)
    with rare_collection():
        world.run()
    return Result(world, time.process_time() - cpu_s, time.perf_counter() - wall_s, meter)


def show(label: str, result: Result, unit_us: float) -> None:
    us = 1e6 * result.cpu_s / result.row_steps
    print(
        f"{label:10s} {result.requests:6d} requests  {result.row_steps:8d} row-steps"
        f"  {result.requests / result.cpu_s:6.0f} requests/s  {us:5.1f} us per row-step"
        f" ({us / unit_us:.1f} heap events; goal {GOAL_US:g} us)"
    )


def shares(result: Result) -> None:
    """Where the time goes; measuring itself is counted to the world."""
    seconds = {part: result.meter.seconds.get(part, 0.0) for part in PARTS}
    seconds["world"] = result.wall_s - sum(seconds.values())
    for part, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        us, calls = 1e6 * spent / result.row_steps, result.meter.calls.get(part)
        called = f"{calls} calls of {1e6 * spent / calls:.1f} us" if calls else ""
        print(f"  {part:10s} {spent / result.wall_s:5.1%}  {us:5.2f} us per row-step  {called}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--system", default="dilaserve", choices=list(SYSTEMS_OF))
    parser.add_argument("--requests", type=int, default=1000, help="on 16 GPUs")
    parser.add_argument("--train", type=int, default=400, help="requests that forecasts learn from")
    parser.add_argument("--profile", action="store_true", help="functions by time, and no more")
    args = parser.parse_args()
    boosted = SYSTEMS_OF[args.system].predictor.use == "boosted"
    model = train_predictor(Setting(), "gsm8k", False, args.train) if boosted else None
    if args.profile:
        with cProfile.Profile() as profile:
            run(args.system, 4, args.requests, model, meter_parts=False)
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
        return
    unit_us = heap_event_us()
    print(f"{args.system}; a heap event takes {unit_us:.2f} us here")
    small = run(args.system, 4, args.requests, model, meter_parts=False)
    show("16 GPUs", small, unit_us)
    shares(run(args.system, 4, args.requests, model, meter_parts=True))
    large = run(args.system, 64, 6 * args.requests, model, meter_parts=False)
    show("256 GPUs", large, unit_us)
    growth = large.cpu_s / large.requests / (small.cpu_s / small.requests)
    print(f"cost per request, 256 against 16 GPUs: {growth:.2f} x (goal 1.5 x)")


if __name__ == "__main__":
    main()

"""Microseconds per ``handle()`` of both schedulers at 200 running requests and more.

Three settings: a cluster of 8 instances with 25 running requests each (the global scheduler sees
200), one instance that holds all 200 itself, and the published one of 64 instances with 320
requests, where the published scheduler takes 6.6 ms a decision (DiLaServe B7). Events are those of
a steady run: every request that ends is replaced by a new one. The mean over all events is what
serving pays; the costliest kind is shown too.

Then ``TandemSplit.place`` alone, for autoregressive requests on instances that hold 60 segments
each, with the segment cost and the table of batch times that are served with (14B on an A100): two
instances change what they hold between two requests, and the table learns from eight batches. Time
passed, and of the processor, which is what a machine that is shared should be judged by. The
published whole of it is less than 20 ms a request (DynaServe 1.3).

    python benchmarks/scheduler.py
"""

import argparse
import random
import statistics
import time
from collections import defaultdict
from dataclasses import replace

from stepserve.control.local_scheduler import LocalScheduler
from stepserve.core.actions import Finish, Predict, Report, RunBatch, Send
from stepserve.core.config import Choice, ControlConfig, NoOptions
from stepserve.core.events import (
    BatchDone,
    GlobalEvent,
    InstanceUp,
    LocalEvent,
    Predicted,
    RequestArrived,
)
from stepserve.core.forecast import StepForecast
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.instance import ClusterView, InstanceLoad, InstanceSpec, Link, Work
from stepserve.core.protocols import Parts
from stepserve.core.request import SLO, DiffusionOptions, Family, FinishReason, Progress, Request
from stepserve.core.step import Mix, StepOutcome
from stepserve.cost.batch_table import BatchTable
from stepserve.cost.forecast_parts import ForecastParts
from stepserve.cost.remaining_steps import MeanYield
from stepserve.cost.roofline import roofline_on_a100
from stepserve.cost.segment_cost import Occupancy
from stepserve.cost.step_table import StepProfile, StepTable
from stepserve.families.assemble import assemble_global, assemble_local
from stepserve.families.autoregressive import AUTOREGRESSIVE
from stepserve.families.diffusion import DIFFUSION
from stepserve.policies.placement.tandem_split import TandemSplit

PROFILE = StepProfile((32, 512, 1024, 4096, 8192), (0.012, 0.0165, 0.029, 0.126, 0.25), "H100")
LIMIT_US = 200.0
PLACE_LIMITS_MS = {16: 2.0, 64: 5.0, 256: 5.0}
HELD = 60


class Run:
    """Drives schedulers without an engine, timing every ``handle``."""

    def __init__(self, instances: int, running_requests: int, batching: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.config = ControlConfig(batching=Choice(batching))
        self.predictor = MeanYield(NoOptions(), ForecastParts())
        self.scheduler = assemble_global(DIFFUSION, self.config, StepTable({1: PROFILE}))
        self.times: dict[str, list[float]] = defaultdict(list)
        self.now_s, self.arrived, self.ran = 0.0, 0, 0
        self.left: dict[RequestId, int] = {}
        self.done: dict[RequestId, int] = {}
        self.batches: list[tuple[InstanceId, RunBatch]] = []
        self.locals: dict[InstanceId, LocalScheduler] = {}
        for index in range(instances):
            name = InstanceId(f"i{index:02d}")
            spec = InstanceSpec(name, 1, 200_000, 16, running_requests // instances)
            self.locals[name] = assemble_local(
                DIFFUSION, self.config, spec, StepTable({1: PROFILE})
            )
            self.to_global(InstanceUp(spec))
        for _ in range(running_requests):
            self.arrive()

    def note(self, event: GlobalEvent | LocalEvent, began_ns: int) -> None:
        self.times[type(event).__name__].append((time.perf_counter_ns() - began_ns) / 1e3)

    def arrive(self) -> None:
        self.arrived += 1
        request = Request(
            RequestId(str(self.arrived)), Family.DIFFUSION, "m", 1000, 256, self.now_s,
            SLO(e2e_s=self.rng.uniform(2.0, 20.0)), DiffusionOptions(),
        )  # fmt: skip
        self.left[request.id], self.done[request.id] = 256, 0
        self.to_global(RequestArrived(request))

    def to_global(self, event: GlobalEvent) -> None:
        began_ns = time.perf_counter_ns()
        actions = self.scheduler.handle(self.now_s, event)
        self.note(event, began_ns)
        for action in actions:
            match action:
                case Predict():
                    self.to_global(Predicted(action.request.id, self.forecast(action)))
                case Send():
                    self.to_local(action.to, action.event)
                case Finish():
                    self.arrive()

    def forecast(self, action: Predict) -> StepForecast:
        return self.predictor.remaining_steps(action.request, action.progress, action.thresholds)

    def to_local(self, name: InstanceId, event: LocalEvent) -> None:
        began_ns = time.perf_counter_ns()
        actions = self.locals[name].handle(self.now_s, event)
        self.note(event, began_ns)
        for action in actions:
            match action:
                case Report():
                    self.to_global(action.event)
                case Predict():
                    self.to_local(name, Predicted(action.request.id, self.forecast(action)))
                case RunBatch():
                    self.batches.append((name, action))

    def step(self) -> None:
        name, action = self.batches.pop(0)
        outcomes = []
        for step in action.batch.steps:
            inside = 32 - self.done[step.request_id] % 32
            count = min(self.rng.randint(1, 5), inside)
            self.done[step.request_id] += count
            ended = self.done[step.request_id] >= 256
            reason = FinishReason.LENGTH if ended else None
            outcomes.append(StepOutcome(step.request_id, count, self.done[step.request_id], reason))
        self.now_s += 0.02
        self.ran += 1
        self.to_local(name, BatchDone(action.batch.id, tuple(outcomes), 0.02))


def time_places(
    instances: int, ttft_s: float | None, count: int, seed: int
) -> tuple[list[float], list[float], float]:
    """Microseconds of every ``place``, and of the processor; share of requests that were cut."""
    rng = random.Random(seed)
    line = roofline_on_a100("qwen2.5-14b")
    table, control = BatchTable({1: line}), ControlConfig()
    program, link = AUTOREGRESSIVE.program(control), Link(line.kv_bytes_per_token, 25e9)
    loads: list[InstanceLoad] = []
    for index in range(instances):
        spec = InstanceSpec(InstanceId(f"i{index:03d}"), 1, 200_000, 16, 256)
        rows = [(rng.random() < 0.2, rng.randint(100, 4000)) for _ in range(HELD)]
        work = [
            Work(n * waits, n * (not waits), rng.uniform(1.0, 800.0) * (rng.random() < 0.8))
            for waits, n in rows
        ]
        loads.append(InstanceLoad(spec, HELD, sum(n for _, n in rows), 9999, 0.0, tuple(work)))
    loads.sort(key=lambda load: load.running_tokens)
    by_id = {load.spec.id: load for load in loads}
    view = ClusterView(0.0, by_id)
    times: list[float] = []
    busy: list[float] = []
    cuts = 0
    parts = Parts(program, table, control, link)
    parts = replace(parts, segment_cost=Occupancy(Occupancy.Options(), parts))
    policy = TandemSplit(TandemSplit.Options(gain=0.05), parts)
    for number in range(count):
        prompt, output = rng.choice(((8192, 32), (2048, 512), (219, 1467), (850, 100)))
        name, slo = RequestId(str(number)), SLO(ttft_s=ttft_s)
        request = Request(name, Family.AUTOREGRESSIVE, "m", prompt, 4096, 0.0, slo)
        forecast = StepForecast((1.0,), (float(output),), float(output))
        for load in rng.sample(loads, 2):  # where the one before was placed, say
            turned = load._replace(work=(*load.work[1:], load.work[0]))
            by_id[load.spec.id] = loads[loads.index(load)] = turned
        for _ in range(8):
            decodes, prefill = rng.randint(0, HELD), rng.choice((0, 128, 512))
            mix = Mix(prefill, prefill * (prefill + 1) // 2, decodes, 1000 * decodes)
            seconds = rng.uniform(0.9, 1.1) * line.seconds(mix)
            table.observe(prefill + decodes, decodes + (prefill > 0), loads[0].spec, seconds, mix)
        start, start_busy = time.perf_counter_ns(), time.thread_time_ns()
        placement = policy.place(request, Progress(), forecast, view)
        busy.append((time.thread_time_ns() - start_busy) / 1e3)
        times.append((time.perf_counter_ns() - start) / 1e3)
        cuts += len(placement.segments) > 1
    return sorted(times), sorted(busy), cuts / count


def places(count: int) -> None:
    print(f"\n{'TandemSplit.place, us':42s}   p50    p99   processor: p50    p99  cuts")
    for instances, limit_ms in PLACE_LIMITS_MS.items():
        for ttft_s in (None, 10.0):
            times, busy, cuts = time_places(instances, ttft_s, count, seed=0)
            label = f"{instances} instances x {HELD} held, {'with' if ttft_s else 'no'} TTFT target"
            half, most = count // 2, int(count * 0.99)
            print(
                f"{label:42s} {times[half]:5.0f} {times[most]:6.0f} {busy[half]:16.0f}"
                f" {busy[most]:6.0f}  {cuts:4.0%}"
                f"  ({busy[most] / limit_ms / 1e3:.2f} x the limit of {limit_ms:.0f} ms)"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=400, help="of each setting")
    parser.add_argument("--places", type=int, default=2000, help="requests placed, of each setting")
    args = parser.parse_args()
    print(f"{'setting':42s} {'events':>7s} {'mean us':>8s} {'p99 us':>8s}  costliest kind (median)")
    for instances, running_requests, batching in (
        (8, 200, "latency_budget"),
        (8, 200, "all_running"),
        (1, 200, "latency_budget"),
        (1, 200, "all_running"),
        (64, 320, "latency_budget"),
        (64, 320, "all_running"),
    ):
        label = (
            f"{instances} instances x {running_requests // instances} running requests, {batching}"
        )
        run = Run(instances, running_requests, batching, seed=0)
        run.times.clear()
        for _ in range(args.batches):
            run.step()
        everything = sorted(t for times in run.times.values() for t in times)
        medians = {kind: statistics.median(times) for kind, times in run.times.items()}
        kind = max(medians, key=medians.__getitem__)
        mean, p99 = statistics.mean(everything), everything[int(len(everything) * 0.99)]
        print(
            f"{label:42s} {len(everything):7d} {mean:8.1f} {p99:8.1f}  {kind} {medians[kind]:.1f}"
            f"  ({mean / LIMIT_US:.2f} x the budget of {LIMIT_US:.0f} us)"
        )
    places(args.places)


if __name__ == "__main__":
    main()

"""Carries a plan out against a server: warm-up, unloaded latency, then one run a variant."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

from stepserve import __version__
from stepserve.cli.bench_plan import (
    BenchConfig,
    Body,
    Plan,
    base_fields,
    deadlines_s,
    request_fields,
)
from stepserve.cli.client import OBJECTS, Client, Outcome, Reply
from stepserve.cli.drive import Record, one_by_one, open_loop
from stepserve.cli.jobs import Job
from stepserve.cli.options import merged
from stepserve.cli.report import Difference, Scored, Summary, summarise
from stepserve.cli.watch import ServerSide, Watch
from stepserve.core.errors import StepserveError
from stepserve.sim.workload import mean_rate_per_s

Stage = Callable[[str, int], AbstractContextManager[Callable[[Reply], None]]]
"""Announces a stage of so many requests; gives what to call when one of them is answered."""


@dataclass(frozen=True, slots=True)
class Run:
    """One variant: what it changed in the request bodies, and what came of it."""

    body: Body
    scored: list[Scored]
    summary: Summary
    server: ServerSide | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """Everything a benchmark found. ``base`` is the unloaded measurement, if one was made."""

    config: BenchConfig
    model: str
    plan: Plan
    base: Summary | None
    deadlines_s: list[float | None]
    runs: dict[str, Run]

    @property
    def reference(self) -> str:
        """The variant that the others are compared with: ``fixed``, or else the first."""
        return "fixed" if "fixed" in self.runs else next(iter(self.runs))

    def accuracy_differences(self) -> dict[str, Difference]:
        """Accuracy of each other variant minus the reference's, where it was measured."""
        reference = self.runs[self.reference].scored
        found = {
            name: Difference.paired(run.scored, reference)
            for name, run in self.runs.items()
            if name != self.reference
        }
        return {name: difference for name, difference in found.items() if difference}

    def as_json(self, detailed: bool) -> dict[str, Any]:
        """The report as JSON values; ``detailed`` adds a record of every request."""
        limits = [limit for limit in self.deadlines_s if limit is not None]
        return {
            "stepserve": __version__,
            "config": asdict(self.config),
            "model": self.model,
            "arrivals": {
                "requests": len(self.plan.arrivals),
                "dropped_too_long": self.plan.dropped,
                "mean_rate_per_s": mean_rate_per_s(self.plan.arrivals),
                "last_s": self.plan.arrivals[-1].at_s,
            },
            "base": asdict(self.base) if self.base else None,
            "deadline_s": {"min": min(limits), "max": max(limits)} if limits else None,
            "variants": {
                name: {
                    "body": run.body,
                    **asdict(run.summary),
                    "server": asdict(run.server) if run.server else None,
                    **({"records": _rows(run.scored)} if detailed else {}),
                }
                for name, run in self.runs.items()
            },
            "accuracy_difference": {
                "reference": self.reference,
                "variants": {n: asdict(d) for n, d in self.accuracy_differences().items()},
            },
        }


async def measure(config: BenchConfig, plan: Plan, client: Client, stage: Stage) -> Result:
    """Run the whole benchmark.

    Raises StepserveError when the server cannot be reached or fails while it is not loaded.
    """
    model = await client.model(config.model)

    def sender(bodies: Sequence[Body], jobs: Sequence[Job]) -> Callable[[int], Awaitable[Reply]]:
        ready = [
            client.body(model, [{"role": "user", "content": job.prompt}], body)
            for job, body in zip(jobs, bodies, strict=True)
        ]
        return lambda index: client.ask(ready[index])

    async def unloaded(name: str, jobs: Sequence[Job]) -> list[Record]:
        send = sender([base_fields(config, job) for job in jobs], jobs)
        with stage(name, len(jobs)) as tick:
            records = await one_by_one(len(jobs), send, tick)
        for record in records:
            if record.reply.outcome is not Outcome.COMPLETED:
                raise StepserveError(f"a request to the idle server failed: {record.reply.error}")
        return records

    if plan.warmup:
        await unloaded("warm-up", plan.warmup)
    base = None
    if plan.base:
        base = summarise(_score(await unloaded("unloaded", plan.base), plan.base))
    base_s = base.e2e_s.mean if base and base.e2e_s else None
    limits = deadlines_s(config, plan.jobs, base_s)
    due_s = [arrival.at_s for arrival in plan.arrivals]
    runs = {}
    for name, changes in plan.variants.items():
        bodies = [
            merged(request_fields(config, job, limit), changes)
            for job, limit in zip(plan.jobs, limits, strict=True)
        ]
        watch = Watch(client.metrics)
        with stage(name, len(due_s)) as tick:
            async with watch.watching():
                records = await open_loop(due_s, sender(bodies, plan.jobs), tick)
        scored = _score(records, plan.jobs, limits, config.tbt_ms)
        runs[name] = Run(changes, scored, summarise(scored), watch.found())
    return Result(config, model, plan, base, limits, runs)


def _score(
    records: Sequence[Record],
    jobs: Sequence[Job],
    limits: Sequence[float | None] | None = None,
    tbt_ms: float | None = None,
) -> list[Scored]:
    tbt_s = None if tbt_ms is None else 1e-3 * tbt_ms
    return [
        Scored(record, limit, job.correct(record.reply.text), tbt_s)
        for record, job, limit in zip(records, jobs, limits or [None] * len(jobs), strict=True)
    ]


def _rows(scored: Sequence[Scored]) -> list[Mapping[str, Any]]:
    """Every request as JSON values; times in seconds from the first arrival."""
    start_s = scored[0].record.due_s
    return [
        {
            "due_s": s.record.due_s - start_s,
            "sent_s": s.record.reply.sent_s - start_s,
            "ended_s": s.record.reply.ended_s - start_s,
            "text_s": [event.at_s - start_s for event in s.record.reply.events],
            "outcome": s.record.reply.outcome,
            "error": s.record.reply.error,
            "tokens": s.record.reply.tokens,
            "deadline_s": s.deadline_s,
            "met": s.met,
            "correct": s.correct,
            "text": s.record.reply.text,
            **{name: s.record.reply.objects.get(name, {}) for name in OBJECTS},
        }
        for s in scored
    ]

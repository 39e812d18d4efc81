"""What a simulated run came to: one row per (system, rate, SLO, seed), and its timeline."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepserve.core.actions import Finish
from stepserve.core.request import FinishReason
from stepserve.metrics.latency import percentile

from .instance import CLIENT
from .record import DiffusionRecord, RequestRecord
from .world import World

DIGITS = 6
"""Significant digits of numbers in files."""

ENDED = (FinishReason.STOP, FinishReason.LENGTH)

Row = dict[str, Any]


def finished(record: RequestRecord) -> bool:
    """Whether the request got its whole answer."""
    return isinstance(record.answer, Finish) and record.answer.reason in ENDED


def latency_s(record: RequestRecord) -> float:
    """Seconds from arrival to the answer."""
    return record.answered_s - record.request.arrival_s


def met(record: RequestRecord) -> bool:
    """Whether the whole answer came by the deadline; without one, whether it came."""
    return finished(record) and not record.request.slo.missed(e2e=latency_s(record))


def attainment(records: Sequence[RequestRecord]) -> float:
    """Met / all, those refused, dropped and failed included (DiLaServe C9.5)."""
    return sum(map(met, records)) / len(records)


def mean_threshold(records: Sequence[DiffusionRecord]) -> float | None:
    """Mean over settled tokens of the threshold they were settled at."""
    tokens = sum(r.tokens for r in records)
    return sum(r.use.mean_threshold * r.tokens for r in records) / tokens if tokens else None


def _skipped(done: Sequence[DiffusionRecord]) -> Row:
    """Of the refreshes that request options let go, the share that was; where there are any."""
    cheap = sum(r.cheap_openings for r in done)
    return {"skipped_share": sum(r.skipped for r in done) / cheap} if cheap else {}


def denoised(world: World) -> list[DiffusionRecord]:
    """The records of the diffusion requests, in order of arrival."""
    return [r for r in world.records.values() if isinstance(r, DiffusionRecord)]


def summary(world: World, layout_changes: int) -> Row:
    """The measured part of a row. Latencies are of whole answers; ``None`` without any."""
    records = denoised(world)
    done = [r for r in records if finished(r)]
    latencies = [latency_s(r) for r in done]
    end_s = max(r.answered_s for r in records)
    span_s = end_s - records[0].request.arrival_s
    per_s = 1.0 / span_s if span_s > 0.0 else math.inf
    return {
        "attainment": attainment(records),
        "latency_mean_s": sum(latencies) / len(done) if done else None,
        "latency_p50_s": percentile(latencies, 50.0) if done else None,
        "latency_p99_s": percentile(latencies, 99.0) if done else None,
        "threshold_mean": mean_threshold(records),
        "rejected": sum(not isinstance(r.answer, Finish) for r in records),
        "failed": sum(isinstance(r.answer, Finish) and not finished(r) for r in records),
        "goodput_requests_per_s": sum(map(met, records)) * per_s,
        "steps": sum(r.progress.steps for r in done if r.progress) / len(done) if done else None,
        "refreshes": sum(r.refreshes for r in done) / len(done) if done else None,
        **_skipped(done),
        "migrations": sum(r.releases for r in done),
        "layout_changes": layout_changes,
        "losses": world.losses,
        "batches": world.batches,
    }


class Timeline:
    """Samples a running world: caps, active requests, instances by TP degree."""

    def __init__(self, world: World, bucket_s: float) -> None:
        """Samples ten times per bucket, as long as requests are to come or are active."""
        self._world = world
        self._bucket_s = bucket_s
        self._samples: list[tuple[float, float | None, int, dict[int, int]]] = []
        self._sample(None, None)

    def _sample(self, _: None, __: None) -> None:
        world = self._world
        state = world.scheduler.ledger.requests.values()
        caps = [t.cap for t in state]
        degrees: dict[int, int] = {}
        for instance in world.instances.values():
            degree = instance.spec.tp_degree
            degrees[degree] = degrees.get(degree, 0) + 1
        mean_cap = sum(caps) / len(caps) if caps else None
        self._samples.append((world.now_s, mean_cap, len(caps), degrees))
        if not world.over:
            world.at(world.now_s + self._bucket_s / 10.0, CLIENT, self._sample, None)

    def rows(self) -> list[Row]:
        """One row per bucket of arrival time; attainment is of the requests that arrived in it."""
        rows: list[Row] = []
        arrived: dict[int, list[DiffusionRecord]] = {}
        for record in denoised(self._world):
            arrived.setdefault(int(record.request.arrival_s // self._bucket_s), []).append(record)
        sampled: dict[int, list[tuple[float, float | None, int, dict[int, int]]]] = {}
        for sample in self._samples:
            sampled.setdefault(int(sample[0] // self._bucket_s), []).append(sample)
        for bucket in sorted(arrived.keys() | sampled.keys()):
            records, samples = arrived.get(bucket, []), sampled.get(bucket, [])
            caps = [cap for _, cap, _, _ in samples if cap is not None]
            rows.append(
                {
                    "start_s": bucket * self._bucket_s,
                    "arrivals": len(records),
                    "attainment": attainment(records) if records else None,
                    "threshold_mean": mean_threshold(records),
                    "cap_mean": sum(caps) / len(caps) if caps else None,
                    "active_mean": sum(s[2] for s in samples) / len(samples) if samples else None,
                    "instances": samples[-1][3] if samples else {},
                }
            )
        return rows


def rounded(value: Any) -> Any:
    """The same JSON values with floats at ``DIGITS`` significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value


def save(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON that is the same, byte for byte, for the same content."""
    path.write_text(json.dumps(rounded(content), indent=1, sort_keys=True) + "\n")

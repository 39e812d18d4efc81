"""What a simulated run came to: one row, of the same columns for both families, and its timeline.

Requests that arrive while a run warms up are left out of everything that is counted per request
or per token. Tokens reach the client when their batch ends.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stepserve.core.actions import Finish
from stepserve.core.errors import FieldError
from stepserve.metrics.latency import percentile
from stepserve.metrics.slo import pooled_tbt_s

from .ar_record import ArRecord
from .instance import CLIENT
from .record import DiffusionRecord, RequestRecord
from .world import World

DIGITS = 6
"""Significant digits of numbers in files."""

Row = dict[str, Any]

IDENTITY = (
    "kind", "system", "tuned", "family", "model", "workload", "seed", "gpus", "instances",
    "rate_per_s", "rate_per_gpu_per_s", "slo_multiple", "requests", "swept",
)  # fmt: skip
CLIENTS = (
    "attainment", "finished_share", "served_share", "rejected", "failed", "latency_mean_s",
    "latency_p50_s", "latency_p99_s", "ttft_p50_s", "ttft_p99_s", "tbt_attainment", "tbt_p50_s",
    "tbt_p99_s", "tbt_max_s", "goodput_requests_per_s", "goodput_tokens_per_s",
    "goodput_tokens_with_first_per_s", "queue_growth",
)  # fmt: skip
QUALITY = (
    "accuracy", "accuracy_in_time", "accuracy_kind", "accuracy_weighted", "classes",
    "threshold_mean", "steps", "refreshes", "skipped_share",
)  # fmt: skip
MACHINES = (
    "batches", "busy", "mfu", "migrations", "layout_changes", "losses", "kv_bytes_moved",
    "exposed_transfer_mean_s", "exposed_transfer_p99_s", "handoff_gap_p99_s", "splits",
    "profile_error", "segment_error", "stalled_handovers",
)  # fmt: skip
COLUMNS = (*IDENTITY, *CLIENTS, *QUALITY, *MACHINES, "capacity_per_s", "probes")


def row_of(values: Mapping[str, Any]) -> Row:
    """A row with every column; those not given do not apply, and are null."""
    unknown = values.keys() - set(COLUMNS)
    assert not unknown, f"no such columns: {unknown}"
    return {name: values.get(name) for name in COLUMNS}


def attainment(records: Sequence[RequestRecord]) -> float:
    """Met / all, those refused, dropped and failed included (DiLaServe C9.5)."""
    return sum(r.met for r in records) / len(records)


def mean_threshold(records: Sequence[DiffusionRecord]) -> float | None:
    """Mean over settled tokens of the threshold they were settled at."""
    tokens = sum(r.tokens for r in records)
    return sum(r.use.mean_threshold * r.tokens for r in records) / tokens if tokens else None


def mean(values: Sequence[float]) -> float | None:
    """Their mean; ``None`` without any."""
    return sum(values) / len(values) if values else None


def percentile_or_none(values: Sequence[float], percent: float) -> float | None:
    """Nearest rank; ``None`` without any."""
    return percentile(values, percent) if values else None


def client_columns(records: Sequence[RequestRecord], patience_s: float) -> Row:
    """What clients see; ``records`` are those judged. Latencies are of whole answers."""
    done = [r for r in records if r.whole]
    latencies = [r.latency_s for r in done]
    span_s = max(r.answered_s for r in records) - records[0].request.arrival_s
    per_s = 1.0 / span_s if span_s > 0.0 else math.inf
    tokens = [r for r in records if isinstance(r, ArRecord)]
    return {
        "requests": len(records),
        "attainment": attainment(records),
        "finished_share": len(done) / len(records),
        "rejected": sum(not isinstance(r.answer, Finish) for r in records),
        "failed": sum(isinstance(r.answer, Finish) and not r.whole for r in records),
        "latency_mean_s": mean(latencies),
        "latency_p50_s": percentile_or_none(latencies, 50.0),
        "latency_p99_s": percentile_or_none(latencies, 99.0),
        "goodput_requests_per_s": sum(r.met for r in records) * per_s,
        "steps": mean([r.step_count for r in done]),
        **(_token_columns(tokens, patience_s, per_s) if tokens else {}),
    }


def _token_columns(records: Sequence[ArRecord], patience_s: float, per_s: float) -> Row:
    """What clients see of single tokens. A gap without a target is within it."""
    tbt_s = pooled_tbt_s(r.times_s for r in records)
    limits_s = np.repeat(
        [r.request.slo.tbt_s or math.inf for r in records],
        [max(0, len(r.times_s) - 1) for r in records],
    )
    good = int(np.count_nonzero(tbt_s <= limits_s))
    aimed = len(tbt_s) and bool(np.any(np.isfinite(limits_s)))
    ttft_s = [
        (r.times_s[0] - r.request.arrival_s, r.request.slo.ttft_s) for r in records if r.times_s
    ]
    first = sum(limit_s is None or t <= limit_s for t, limit_s in ttft_s)
    firsts = [t for t, _ in ttft_s]
    return {
        "served_share": sum(r.served(patience_s) for r in records) / len(records),
        "ttft_p50_s": percentile_or_none(firsts, 50.0),
        "ttft_p99_s": percentile_or_none(firsts, 99.0),
        "tbt_attainment": good / len(tbt_s) if aimed else None,
        "tbt_p50_s": percentile_or_none(tbt_s.tolist(), 50.0),
        "tbt_p99_s": percentile_or_none(tbt_s.tolist(), 99.0),
        "tbt_max_s": float(tbt_s.max()) if len(tbt_s) else None,
        "goodput_tokens_per_s": good * per_s,
        "goodput_tokens_with_first_per_s": (good + first) * per_s,
    }


def machine_columns(world: World, records: Sequence[RequestRecord]) -> Row:
    """What every run has of machines, of the whole run. ``busy``: share of the time from the start
    to the last answer, by instance in order of their ids.
    """
    end_s = max(r.answered_s for r in records)
    return {
        "batches": world.batches,
        "busy": [world.busy_s[name] / end_s for name in sorted(world.instances)],
        "migrations": sum(r.releases for r in records if r.whole),
        "layout_changes": world.supervisor.layout_changes,
        "losses": world.losses,
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
        caps = world.supervisor.scheduler.status().caps
        degrees: dict[int, int] = {}
        for instance in world.instances.values():
            degree = instance.spec.tp_degree
            degrees[degree] = degrees.get(degree, 0) + 1
        self._samples.append((world.now_s, mean(caps), len(caps), degrees))
        if not world.over:
            world.at(world.now_s + self._bucket_s / 10.0, CLIENT, self._sample, None)

    def rows(self) -> list[Row]:
        """One row per bucket of arrival time; attainment is of the requests that arrived in it."""
        rows: list[Row] = []
        arrived: dict[int, list[RequestRecord]] = {}
        for record in self._world.records.values():
            arrived.setdefault(int(record.request.arrival_s // self._bucket_s), []).append(record)
        sampled: dict[int, list[tuple[float, float | None, int, dict[int, int]]]] = {}
        for sample in self._samples:
            sampled.setdefault(int(sample[0] // self._bucket_s), []).append(sample)
        for bucket in sorted(arrived.keys() | sampled.keys()):
            records, samples = arrived.get(bucket, []), sampled.get(bucket, [])
            caps = [cap for _, cap, _, _ in samples if cap is not None]
            denoised = [r for r in records if isinstance(r, DiffusionRecord)]
            rows.append(
                {
                    "start_s": bucket * self._bucket_s,
                    "arrivals": len(records),
                    "attainment": attainment(records) if records else None,
                    "threshold_mean": mean_threshold(denoised),
                    "cap_mean": mean(caps),
                    "active_mean": mean([s[2] for s in samples]),
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


def make_folders(**folders: Path | None) -> None:
    """Make the folders that results go to. Raises FieldError for one that cannot be."""
    for name, folder in folders.items():
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise FieldError(f"--{name}", f"{folder} is no folder: {error}") from error


def save(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON that is the same, byte for byte, for the same content."""
    path.write_text(json.dumps(rounded(content), indent=1, sort_keys=True) + "\n")

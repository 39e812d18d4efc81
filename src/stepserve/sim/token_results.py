"""What a simulated run of autoregressive models came to: one row (DynaServe 3.10.5).

Requests that arrive while the run warms up are left out of everything that is counted per request
or per token. Tokens reach the client when their batch ends.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from stepserve.cost.batch_table import BatchTable
from stepserve.metrics.latency import percentile
from stepserve.metrics.slo import pooled_tbt_s, tbt_attainment, token_goodput_per_s

from .ar_record import ArRecord
from .results import Row, finished
from .token_config import TokenSetting
from .token_watch import CountedTruth, Samples, Watch
from .world import World

SPLITS = ("solo", "below", "at", "above")
HELD_SHARE = 0.99


def held(row: Row, setting: TokenSetting) -> bool:
    """Whether a run's rate was held: see ``TokenSetting``."""
    tbt_s = row["tbt_p99_s"]
    in_time = tbt_s is None or tbt_s <= setting.tbt_s
    return in_time and bool(row["served_share"] >= HELD_SHARE)


def token_summary(setting: TokenSetting, records: Sequence[ArRecord], samples: Samples) -> Row:
    """The part of a row that clients see; ``records`` are those judged."""
    done = [r for r in records if finished(r)]
    limit_s, tbt_s = setting.tbt_s, pooled_tbt_s(r.times_s for r in records)
    ttft_s = [r.times_s[0] - r.request.arrival_s for r in records if r.times_s]
    in_time = sum(t <= setting.ttft_s for t in ttft_s) if setting.ttft_s else len(ttft_s)
    whole = [r for r in done if r.times_s[0] - r.request.arrival_s <= setting.patience_s]
    met = [r for r in done if _met(r, setting)]
    span_s = max(r.answered_s for r in records) - records[0].request.arrival_s
    return {
        "requests": len(records),
        "finished_share": len(done) / len(records),
        "served_share": len(whole) / len(records),
        "attainment": tbt_attainment(tbt_s, limit_s),
        "tbt_p50_s": _percentile(tbt_s.tolist(), 50.0),
        "tbt_p99_s": _percentile(tbt_s.tolist(), 99.0),
        "tbt_max_s": float(tbt_s.max()) if len(tbt_s) else None,
        "goodput_tokens_per_s": token_goodput_per_s(tbt_s, limit_s, span_s),
        "goodput_tokens_with_first_per_s": token_goodput_per_s(tbt_s, limit_s, span_s, in_time),
        "goodput_requests_per_s": len(met) / span_s,
        "ttft_p50_s": _percentile(ttft_s, 50.0),
        "ttft_p99_s": _percentile(ttft_s, 99.0),
        "e2e_mean_s": float(np.mean([r.answered_s - r.request.arrival_s for r in done]))
        if done
        else None,
        "queue_growth": samples.growth,
    }


def _met(record: ArRecord, setting: TokenSetting) -> bool:
    """Every gap of a whole answer within the target, and its first token, if that has one."""
    times_s = record.times_s
    ttft_s = times_s[0] - record.request.arrival_s
    first = not setting.ttft_s or ttft_s <= setting.ttft_s
    return first and bool(np.all(np.diff(times_s) <= setting.tbt_s))


def machine_summary(
    world: World,
    records: Sequence[ArRecord],
    watch: Watch,
    truth: CountedTruth,
    tables: Sequence[BatchTable],
) -> Row:
    """The part of a row that is about instances, links and predictions, of the whole run.

    ``mfu``: useful operations / (peak of the TP group x time from the start to the last answer),
    by instance in order of their ids, and the share of that time it was ``busy``. ``splits``:
    shares of the requests placed, by where they were cut relative to the end of the prompt.
    ``segment_error``: |predicted - measured| / measured of the seconds of first and second
    segments, and of the time between tokens, against the mean of each answer.
    ``profile_error``: that of the batch times of the local scheduler that is worst at it
    (``tables`` are theirs), of its latest 4,096 batches, so in short runs those of the warm-up
    too; ``covered``: the share that took no longer than planned.
    """
    end_s = max(r.answered_s for r in records)
    errors = [table.accuracy() for table in tables]
    assert world.transfers is not None
    shape = truth.shape
    exposed_s = [h.exposed_s for r in records for h in r.handovers if h.exposed_s is not None]
    gaps_s = [gap_s for r in records for gap_s in r.handover_gaps_s()]
    cuts = Counter(_cut(r) for r in records if r.segments)
    told = [r.predicted_and_measured_s() for r in records]
    return {
        "mfu": [shape.mfu(truth.flops[i], end_s) for i in sorted(world.instances)],
        "busy": [watch.busy_s[i] / end_s for i in sorted(world.instances)],
        "kv_bytes_moved": world.transfers.bytes_moved,
        "exposed_transfer_mean_s": sum(exposed_s) / len(exposed_s) if exposed_s else None,
        "exposed_transfer_p99_s": _percentile(exposed_s, 99.0),
        "handoff_gap_p99_s": _percentile(gaps_s, 99.0),
        "splits": {name: cuts[name] / max(1, cuts.total()) for name in SPLITS},
        "profile_error": {
            "median": max(e.median for e in errors),
            "p95": max(e.p95 for e in errors),
            "covered": min(e.covered for e in errors),
        },
        "segment_error": {
            "t1": _error([_off(*pairs[0]) for pairs in told if pairs]),
            "t2": _error([_off(*pairs[1]) for pairs in told if len(pairs) > 1]),
            "tbt": _error(_tbt_errors(records)),
        },
        "stalled_handovers": watch.stalled,
        "batches": world.batches,
    }


def _cut(record: ArRecord) -> str:
    """Where the first plan cut a request."""
    stop = min(record.segments, key=lambda s: (s.at_s, s.start)).stop
    if stop is None:
        return "solo"
    beyond = stop - record.request.prompt_tokens
    return "below" if beyond < 0 else "above" if beyond else "at"


def _off(predicted: float, measured: float) -> float:
    return abs(predicted - measured) / measured


def _tbt_errors(records: Sequence[ArRecord]) -> list[float]:
    errors = []
    for record in records:
        times_s, told_s = record.times_s, [s.predicted_tbt_s for s in record.segments]
        if len(times_s) > 1 and told_s and told_s[0] is not None:
            errors.append(_off(told_s[0], (times_s[-1] - times_s[0]) / (len(times_s) - 1)))
    return errors


def _error(errors: Sequence[float]) -> Row:
    return {"median": _percentile(errors, 50.0), "p95": _percentile(errors, 95.0)}


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return percentile(values, percent) if values else None

"""What a benchmark found: numbers from records, and the table that shows them.

Every arrival counts: one that was rejected, failed or answered late missed its deadline.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from statistics import fmean, stdev
from typing import TypeVar

from rich.box import SIMPLE_HEAD
from rich.table import Table

from stepserve.cli.client import Outcome, Reply
from stepserve.cli.drive import Record
from stepserve.cli.watch import ServerSide
from stepserve.core.request import SLO
from stepserve.metrics import latency, slo
from stepserve.metrics.latency import AnswerTrace

R = TypeVar("R")

LAG_WARNING_S = 0.05
"""Client lag (p99) beyond which a run says that the client could not keep the schedule."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles (nearest rank) of a sample, in the unit of its name."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread | None":
        """The spread of some values; ``None`` when there are none."""
        sample = list(values)
        if not sample:
            return None
        p50, p99 = (latency.percentile(sample, percent) for percent in (50, 99))
        return cls(fmean(sample), p50, p99)


@dataclass(frozen=True, slots=True)
class Share:
    """A share of some trials with its binomial standard error."""

    value: float
    standard_error: float
    trials: int

    @classmethod
    def of(cls, outcomes: Sequence[bool]) -> "Share | None":
        """The share of true outcomes; ``None`` when there are none."""
        if not outcomes:
            return None
        share = sum(outcomes) / len(outcomes)
        return cls(share, sqrt(share * (1.0 - share) / len(outcomes)), len(outcomes))


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in numbers; the keys of the JSON report. ``None``: not measured, or not told.

    Latencies are of completed requests and count from the time a request was due.
    Formulas are those of ``stepserve.metrics``: ``text_gap_s`` pools the times between text
    events (TBT), ``text_gaps_in_time`` is the share of them within ``--tbt-ms``;
    ``token_gap_s`` is the same shared out over tokens, ``tpot_s`` amortised over the tokens of
    each request. Goodput counts what met its deadline (everything completed, without one).
    ``accuracy`` is the share of completed answers that are right; ``right_in_time`` the share of
    all arrivals whose answer is right and met its deadline. ``threshold_mean`` weighs the server's
    mean of each request by its tokens.
    """

    requests: int
    completed: int
    rejected: int
    failed: int
    duration_s: float
    slo_attainment: float | None
    ttft_s: Spread | None
    e2e_s: Spread | None
    text_gap_s: Spread | None
    text_gaps_in_time: float | None
    token_gap_s: Spread | None
    tpot_s: Spread | None
    goodput_requests_per_s: float
    goodput_tokens_per_s: float | None
    accuracy: Share | None
    right_in_time: Share | None
    threshold_mean: float | None
    forwards_mean: float | None
    client_lag_p99_s: float


@dataclass(frozen=True, slots=True)
class Scored:
    """A record with what it is judged by. ``correct`` is ``None`` where no answer is known."""

    record: Record
    deadline_s: float | None
    correct: bool | None
    tbt_s: float | None = None

    @property
    def completed(self) -> bool:
        """Whether the answer arrived whole."""
        return self.record.reply.outcome is Outcome.COMPLETED

    @property
    def met(self) -> bool:
        """Whether the answer arrived whole and in time."""
        return slo.meets(*self.served)

    @property
    def served(self) -> slo.Served:
        """The targets and the answer in the terms of ``stepserve.metrics``."""
        return SLO(e2e_s=self.deadline_s, tbt_s=self.tbt_s), self.trace

    @property
    def trace(self) -> AnswerTrace:
        """What happened when. Tokens billed after the last text belong to it.

        Without a running count, each text event but the last is taken for one token.
        """
        reply = self.record.reply
        counts = [0, *(event.tokens or n for n, event in enumerate(reply.events, 1))]
        counts[-1] = max(counts[-1], reply.tokens or 0)
        events = tuple(
            latency.TextEvent(event.at_s, after - before)
            for event, (before, after) in zip(reply.events, pairwise(counts), strict=True)
        )
        return AnswerTrace(self.record.due_s, events, reply.ended_s, ok=self.completed)


def summarise(scored: Sequence[Scored]) -> Summary:
    """The numbers of a run of at least one request."""
    records = [s.record for s in scored]
    done = [s for s in scored if s.completed]
    replies, traces = [s.record.reply for s in done], [s.trace for s in done]
    served = [s.served for s in scored]
    duration_s = max(r.reply.ended_s for r in records) - min(r.due_s for r in records)
    duration_s = max(duration_s, 1e-9)  # a run of instant failures has rates of 0, not an error
    outcomes = Counter(r.reply.outcome for r in records)
    counted = all(reply.tokens is not None for reply in replies)
    lag = Spread.of(r.lag_s for r in records)
    return Summary(
        requests=len(records),
        completed=outcomes[Outcome.COMPLETED],
        rejected=outcomes[Outcome.REJECTED],
        failed=outcomes[Outcome.FAILED],
        duration_s=duration_s,
        slo_attainment=slo.attainment(served)
        if any(s.deadline_s is not None or s.tbt_s is not None for s in scored)
        else None,
        ttft_s=Spread.of(s for t in traces if (s := latency.ttft_s(t)) is not None),
        e2e_s=Spread.of(map(latency.e2e_s, traces)),
        text_gap_s=Spread.of(gap for t in traces for gap in latency.tbt_s(t)),
        text_gaps_in_time=_gaps_in_time(done),
        token_gap_s=Spread.of(
            gap for d in done if running(d) for gap in latency.token_gaps_s(d.trace)
        ),
        tpot_s=Spread.of(s for d in done if (s := tpot_s(d)) is not None),
        goodput_requests_per_s=slo.goodput_requests_per_s(served, duration_s),
        goodput_tokens_per_s=slo.goodput_tokens_per_s(served, duration_s) if counted else None,
        accuracy=Share.of([s.correct for s in done if s.correct is not None]),
        right_in_time=Share.of([s.correct and s.met for s in scored if s.correct is not None]),
        threshold_mean=_mean_threshold(replies),
        forwards_mean=_mean(reply.told.get("metrics.forwards") for reply in replies),
        client_lag_p99_s=lag.p99 if lag else 0.0,
    )


def _gaps_in_time(done: Sequence[Scored]) -> float | None:
    """Share of the times between text events, pooled, that keep the target between them."""
    kept = [gap <= s.tbt_s for s in done if s.tbt_s for gap in latency.tbt_s(s.trace)]
    return fmean(kept) if kept else None


def running(scored: Scored) -> bool:
    """Whether every text event told how many tokens there were so far."""
    events = scored.record.reply.events
    return bool(events) and all(event.tokens for event in events)


def tpot_s(scored: Scored) -> float | None:
    """Amortised time per token; ``None`` if the tokens of the text events were not told."""
    reply = scored.record.reply
    known = running(scored) or (len(reply.events) == 1 and reply.tokens)
    return latency.tpot_s(scored.trace) if known else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _mean_threshold(replies: Sequence[Reply]) -> float | None:
    """Mean threshold over tokens: the server's mean of each request, weighted by its tokens."""
    told = [
        (threshold, reply.tokens or 0)
        for reply in replies
        if (threshold := reply.told.get("dlm.threshold_mean")) is not None
    ]
    total = sum(tokens for _, tokens in told)
    return sum(t * n for t, n in told) / total if total else None


@dataclass(frozen=True, slots=True)
class Difference:
    """Accuracy of one variant minus another's, over the problems that both completed.

    The standard error is that of paired differences: the same problems were asked of both.
    """

    value: float
    standard_error: float
    problems: int

    @classmethod
    def paired(cls, one: Sequence[Scored], other: Sequence[Scored]) -> "Difference | None":
        """The difference ``one - other``; ``None`` when no problem was scored in both."""
        pairs = [
            float(a.correct) - float(b.correct)
            for a, b in zip(one, other, strict=True)
            if a.completed and b.completed and a.correct is not None and b.correct is not None
        ]
        if not pairs:
            return None
        deviation = stdev(pairs) if len(pairs) > 1 else 0.0
        return cls(fmean(pairs), deviation / sqrt(len(pairs)), len(pairs))


def tables(
    summaries: Mapping[str, Summary], servers: Mapping[str, ServerSide | None]
) -> list[Table]:
    """What was delivered, how fast, how right, and what the server says it did meanwhile.

    A row a variant, within 80 columns.
    """
    grids = [_grid(columns, summaries) for columns in (_DELIVERED, _LATENCIES, _QUALITY)]
    told = {name: server for name, server in servers.items() if server is not None}
    return [*grids, _grid(_SERVER, told)] if told else grids


def _grid(columns: Mapping[str, Callable[[R], str]], rows: Mapping[str, R]) -> Table:
    grid = Table(box=SIMPLE_HEAD, padding=(0, 1))
    grid.add_column("variant", no_wrap=True)
    for name in columns:
        grid.add_column(name, justify="right")
    for name, row in rows.items():
        grid.add_row(name, *(cell(row) for cell in columns.values()))
    return grid


def three_digits(value: float | None) -> str:
    """A number at a glance: three digits or all those before the point; "-" when unknown."""
    if value is None:
        return "-"
    return f"{value:.{0 if value >= 100.0 else 1 if value >= 10.0 else 2}f}"


def _ms(spread: Spread | None, *names: str) -> str:
    if spread is None:
        return "-"
    return " / ".join(three_digits(1e3 * getattr(spread, name)) for name in names)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100.0 * share:.1f}"


def _share(share: Share | None) -> str:
    return "-" if share is None else f"{_percent(share.value)} ± {_percent(share.standard_error)}"


_Columns = dict[str, Callable[[Summary], str]]

_SERVER: dict[str, Callable[[ServerSide], str]] = {
    "cap\nlow / mean": lambda s: f"{s.cap_lowest:.2f} / {s.cap_mean:.2f}",
    "caps\nupdates": lambda s: f"{s.caps_updates:.0f}",
    "fore-\ncasts": lambda s: f"{s.forecast_refreshes:.0f}",
    "moves": lambda s: f"{s.migrations:.0f}",
    "plans /\nchanges": lambda s: f"{s.plans:.0f} / {s.layout_changes:.0f}",
    "sched.\nus/event": lambda s: three_digits(s.scheduler_us),
}

_DELIVERED: _Columns = {
    "done / rejected\n/ failed": lambda s: f"{s.completed} / {s.rejected} / {s.failed}",
    "SLO met\n%": lambda s: _percent(s.slo_attainment),
    "gaps in\ntime %": lambda s: _percent(s.text_gaps_in_time),
    "goodput\nreq/s": lambda s: three_digits(s.goodput_requests_per_s),
    "goodput\ntok/s": lambda s: three_digits(s.goodput_tokens_per_s),
    "client lag\nms p99": lambda s: three_digits(1e3 * s.client_lag_p99_s),
}
_LATENCIES: _Columns = {
    "end to end ms\nmean / p50 / p99": lambda s: _ms(s.e2e_s, "mean", "p50", "p99"),
    "first text ms\np50 / p99": lambda s: _ms(s.ttft_s, "p50", "p99"),
    "text gap ms\np50 / p99": lambda s: _ms(s.text_gap_s, "p50", "p99"),
    "TPOT ms\np50 / p99": lambda s: _ms(s.tpot_s, "p50", "p99"),
}
_QUALITY: _Columns = {
    "accuracy\n% ± se": lambda s: _share(s.accuracy),
    "right in time\n% ± se": lambda s: _share(s.right_in_time),
    "threshold\nmean": lambda s: three_digits(s.threshold_mean),
    "forwards\nmean": lambda s: three_digits(s.forwards_mean),
}

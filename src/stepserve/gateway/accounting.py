"""What a reply says of its own cost: ``usage``, ``metrics``, ``slo`` and ``dlm`` (docs/api.md)."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from stepserve.core.frontend import RequestReport
from stepserve.core.request import Family, Request
from stepserve.gateway.generation import Choice

# Best first: a reply is as good as its worst choice.
_STATUS_ORDER = ("none", "met", "degraded", "missed")


def usage(choices: Iterable[Choice]) -> dict[str, int]:
    """Token counts so far. A prompt counts once, however many samples it has."""
    choices = list(choices)
    prompt = sum(c.sample.request.prompt_tokens for c in choices if c.sample.first_of_prompt)
    completion = sum(len(c.text.tokens) for c in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


class Answer:
    """The choices of a reply taken as one answer: what the fields of its objects are made of."""

    def __init__(self, choices: Sequence[Choice]) -> None:
        """``choices`` have ended."""
        self.request = choices[0].sample.request
        self.max_tokens = max(choice.sample.rules.max_tokens for choice in choices)
        self.billed = sum(len(choice.text.tokens) for choice in choices)
        self.events = sorted((e for c in choices for e in c.events), key=lambda event: event.at_s)
        self.gaps_s = [b.at_s - a.at_s for c in choices for a, b in itertools.pairwise(c.events)]
        self.reports = [choice.report for choice in choices if choice.report is not None]
        self.forwards = self.total(lambda report: report.forwards)
        self.queue_s = min((report.queue_s for report in self.reports), default=0.0)

    def total(self, value: Callable[[RequestReport], int]) -> int:
        """The sum over the choices."""
        return sum(map(value, self.reports))

    def known(self, value: Callable[[RequestReport], float | None]) -> list[float]:
        """The values of the choices that have one."""
        return [number for report in self.reports if (number := value(report)) is not None]

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first text."""
        return self.events[0].at_s - self.request.arrival_s if self.events else None

    @property
    def generation_s(self) -> float:
        """First step to last text; 0 for an answer without text."""
        last_s = self.events[-1].at_s - self.request.arrival_s if self.events else self.queue_s
        return last_s - self.queue_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens that became text, by the time they took."""
        tokens = sum(event.tokens for event in self.events)
        return tokens / self.generation_s if self.generation_s > 0 else None

    @property
    def status(self) -> str:
        """How the targets were kept: the worst ``RequestReport.slo_status``."""
        found = [report.slo_status for report in self.reports]
        return max(found, key=_STATUS_ORDER.index, default="none")

    @property
    def threshold_mean(self) -> float | None:
        """Mean threshold of the forward passes."""
        means = [
            (r.threshold_mean, r.forwards) for r in self.reports if r.threshold_mean is not None
        ]
        forwards = sum(count for _, count in means)
        return sum(mean * count for mean, count in means) / forwards if forwards else None


Fields = Mapping[str, Callable[[Answer], Any]]

METRICS: Fields = {
    "time_to_first_token_ms": lambda a: _ms(a.ttft_s),
    "queue_time_ms": lambda a: _ms(a.queue_s),
    "generation_time_ms": lambda a: _ms(a.generation_s),
    "e2e_ms": lambda a: _ms(max((report.e2e_s for report in a.reports), default=0.0)),
    "mean_itl_ms": lambda a: _ms(_mean(a.gaps_s)),
    "time_per_output_token_ms": lambda a: _ms(_mean(a.known(lambda report: report.tpot_s))),
    "tokens_per_second": lambda a: _rounded(a.tokens_per_s, 3),
    "forwards": lambda a: a.forwards,
    "max_tokens": lambda a: a.max_tokens,
    "migrations": lambda a: a.total(lambda report: report.migrations),
    "handovers": lambda a: a.total(lambda report: report.handovers),
    "paused_ms": lambda a: _ms(max((report.paused_s for report in a.reports), default=0.0)),
}
SLO: Fields = {
    "class": lambda a: a.request.slo.slo_class,
    "e2e_ms": lambda a: _ms(a.request.slo.e2e_s),
    "ttft_ms": lambda a: _ms(a.request.slo.ttft_s),
    "tpot_ms": lambda a: _ms(a.request.slo.tpot_s),
    "tbt_ms": lambda a: _ms(a.request.slo.tbt_s),
    "scheduled_tbt_ms": lambda a: _ms(_scheduled_tbt_s(a.request)),
    "weight": lambda a: a.request.slo.weight,
    "status": lambda a: a.status,
    "met": lambda a: None if a.status == "none" else a.status != "missed",
    "missed": lambda a: sorted({name for report in a.reports for name in report.missed}),
    "slack_ms": lambda a: _ms(min(a.known(lambda report: report.slack_s), default=None)),
}
DLM: Fields = {
    "forwards": lambda a: a.forwards,
    "tokens_per_forward": lambda a: _rounded(a.billed / a.forwards if a.forwards else None, 3),
    "blocks": lambda a: a.total(lambda report: report.blocks),
    "block_length": lambda a: a.request.diffusion.block_tokens,
    "threshold_min": lambda a: min(a.known(lambda report: report.threshold_min), default=None),
    "threshold_mean": lambda a: _rounded(a.threshold_mean, 4),
    "forced_commits": lambda a: a.total(lambda report: report.forced),
    "refreshes": lambda a: a.total(lambda report: report.refreshes),
    "cache": lambda a: "exact" if a.request.diffusion.cache_mode.exact else _cache(a),
}


_OF_SOME_FAMILIES = {"dlm": DLM}


def objects(request_fields: frozenset[str]) -> Mapping[str, Fields]:
    """``metrics`` and ``slo`` for every model; any other where its requests may have one, too."""
    some = {name: fields for name, fields in _OF_SOME_FAMILIES.items() if name in request_fields}
    return {"metrics": METRICS, "slo": SLO} | some


def summary(choices: Sequence[Choice], objects: Mapping[str, Fields]) -> dict[str, Any]:
    """The objects of a reply whose choices have ended."""
    answer = Answer(choices)
    return {
        name: {field: value(answer) for field, value in fields.items()}
        for name, fields in objects.items()
    }


def slo_status(choices: Sequence[Choice]) -> str:
    """How the targets of the reply were kept, in a word."""
    return Answer(choices).status


def _scheduled_tbt_s(request: Request) -> float | None:
    return None if request.family is Family.DIFFUSION else request.slo.scheduled_tbt_s


def _cache(answer: Answer) -> str:
    return answer.request.diffusion.cache_mode.value


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _ms(seconds: float | None) -> float | None:
    return _rounded(None if seconds is None else seconds * 1e3, 3)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)

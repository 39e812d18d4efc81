"""Arrivals: drawn from a renewal process, or read from a trace. Seeded, without a clock.

The load generator and the simulator share these functions, so that a claim made in one world
can be checked in the other on the same arrivals.
"""

import csv
import gzip
import itertools
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from stepserve.core.errors import FieldError

Floats = NDArray[np.float64]

ARRIVAL_COLUMNS = ("arrival_s", "arrived_s", "timestamp")
PROMPT_COLUMNS = (
    "input_tokens", "prompt_tokens", "input_length", "contexttokens", "request tokens"
)  # fmt: skip
OUTPUT_COLUMNS = (
    "output_tokens", "completion_tokens", "output_length", "generatedtokens", "response tokens"
)  # fmt: skip
CLASS_COLUMNS = ("class", "slo_class")
HASH_COLUMNS = ("hash_ids",)
"""Names understood, in lower case: ours, then those of Mooncake, Azure and BurstGPT traces."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload; a length is ``None`` where the workload does not say it.

    ``block_hashes``: names of the blocks of its prompt, equal where prefixes are.
    """

    at_s: float
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    slo_class: str = ""
    block_hashes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RateCurve:
    """Piecewise constant arrival rate: ``rates_per_s[i]`` holds from ``starts_s[i]`` on.

    Raises FieldError unless starts begin at 0 and increase, no rate is negative, and the last
    rate, which holds for ever, is positive.
    """

    starts_s: tuple[float, ...]
    rates_per_s: tuple[float, ...]

    def __post_init__(self) -> None:
        starts, rates = self.starts_s, self.rates_per_s
        if len(starts) != len(rates) or not starts or starts[0] != 0.0:
            raise FieldError("starts_s", "must begin at 0 and pair with rates_per_s")
        if any(a >= b for a, b in itertools.pairwise(starts)):
            raise FieldError("starts_s", "must increase")
        if min(rates) < 0.0 or rates[-1] <= 0.0:
            raise FieldError("rates_per_s", "must not be negative, and the last must be positive")

    @classmethod
    def constant(cls, rate_per_s: float) -> "RateCurve":
        """The same rate for ever."""
        return cls((0.0,), (rate_per_s,))

    def burst(self, start_s: float, duration_s: float, factor: float) -> "RateCurve":
        """This curve with its rate multiplied by ``factor`` for a while."""
        stop_s = start_s + duration_s
        starts = sorted({*self.starts_s, start_s, stop_s})
        scaled = [self.at(t) * (factor if start_s <= t < stop_s else 1.0) for t in starts]
        return RateCurve(tuple(starts), tuple(scaled))

    def at(self, time_s: float) -> float:
        """The rate at a time."""
        return self.rates_per_s[int(np.searchsorted(self.starts_s, time_s, side="right")) - 1]

    def expected(self, duration_s: float) -> float:
        """Expected number of arrivals before ``duration_s``."""
        spent = np.diff(np.minimum([*self.starts_s, np.inf], duration_s))
        return float(spent @ np.asarray(self.rates_per_s))

    def times(self, counts: Floats) -> Floats:
        """The times at which the expected number of arrivals reaches each of ``counts``."""
        starts, rates = np.asarray(self.starts_s), np.asarray(self.rates_per_s)
        reached = np.concatenate([[0.0], np.cumsum(np.diff(starts) * rates[:-1])])
        piece = np.searchsorted(reached, counts, side="right") - 1
        result: Floats = starts[piece] + (counts - reached[piece]) / rates[piece]
        return result


def renewal(
    curve: RateCurve,
    cv: float,
    rng: np.random.Generator,
    *,
    requests: int | None = None,
    duration_s: float | None = None,
) -> tuple[Arrival, ...]:
    """Arrivals with gamma-distributed gaps, up to a number of requests, a time, or both.

    ``cv`` is the coefficient of variation of the gaps: 1 is a Poisson process, 0 is regular,
    above 1 is bursty. The rate follows ``curve`` by a change of time, which keeps a Poisson
    process Poisson. Raises FieldError when neither limit is given, or for a bad ``cv``.
    """
    if not 0.0 <= cv < np.inf:
        raise FieldError("cv", "must be finite and not negative")
    if requests is None and duration_s is None:
        raise FieldError("requests", "give requests, duration_s or both")
    end = np.inf if duration_s is None else curve.expected(duration_s)
    wanted = requests if requests is not None else int(end * 1.1) + 16
    gaps = _unit_gaps(cv, wanted, rng)
    while requests is None and gaps.sum() < end:
        gaps = np.concatenate([gaps, _unit_gaps(cv, wanted, rng)])
    counts = np.cumsum(gaps)
    return tuple(Arrival(float(t)) for t in curve.times(counts[counts < end]))


def _unit_gaps(cv: float, count: int, rng: np.random.Generator) -> Floats:
    """Gaps of mean 1."""
    if cv < 1e-6:  # regular to the last digit; cv**-2 would overflow
        return np.ones(count)
    return rng.gamma(cv**-2, cv**2, count)


def read_trace(path: Path, *, timed: bool = True) -> tuple[Arrival, ...]:
    """Read a trace, gzipped or not, in order of arrival.

    It is CSV with a header row, or JSON lines (``.jsonl``). It needs arrival times (seconds, or
    ISO dates; a ``timestamp`` in JSON lines is in milliseconds, as Mooncake writes it) unless it
    is not ``timed``, and takes lengths, SLO classes and block hashes where it has them; see
    ``ARRIVAL_COLUMNS`` and its neighbours for the names. Dates are counted from the earliest,
    seconds are taken as they are. Raises FieldError naming the column (and the line) at fault.
    """
    read = _json_rows if ".jsonl" in path.suffixes else _csv_rows
    found: list[Arrival] = []
    when = ""
    try:
        for row, place in read(path):
            when = _name(row, ARRIVAL_COLUMNS)
            if not when and timed:
                known = ", ".join(ARRIVAL_COLUMNS)
                raise FieldError("arrival_s", f"no such column in {path}; understood: {known}")
            found.append(_arrival(row, when, place, 1e-3 if read is _json_rows else 1.0))
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise FieldError("file", f"{path} cannot be read: {error}") from error
    if not found:
        raise FieldError(when or ARRIVAL_COLUMNS[0], f"no rows in {path}")
    found.sort(key=lambda a: a.at_s)
    origin_s = found[0].at_s if found[0].at_s > _EPOCH_S else 0.0
    return tuple(replace(a, at_s=a.at_s - origin_s) for a in found)


_EPOCH_S = 1e8
"""A time beyond three years is a date, not an offset."""

_Row = Mapping[str, Any]


def _open(path: Path) -> IO[str]:
    """As UTF-8; a mark at its beginning is no part of the first name."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _csv_rows(path: Path) -> Iterator[tuple[_Row, str]]:
    with _open(path) as file:
        rows = csv.DictReader(file)
        names = {name: name.strip().lower() for name in rows.fieldnames or ()}
        for row in rows:
            lower = {names[name]: value for name, value in row.items() if name in names}
            yield lower, f"{path}:{rows.line_num}"


def _json_rows(path: Path) -> Iterator[tuple[_Row, str]]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise FieldError("file", f"{path}:{number} is no JSON: {error}") from error
            if not isinstance(row, dict):
                raise FieldError("file", f"{path}:{number} is no JSON object")
            yield {name.lower(): value for name, value in row.items()}, f"{path}:{number}"


def _name(row: _Row, wanted: tuple[str, ...]) -> str:
    return next((name for name in wanted if name in row), "")


def _arrival(row: _Row, when: str, place: str, timestamp_s: float) -> Arrival:
    seconds = _seconds(row, when, place) if when else 0.0
    hashes = row.get(_name(row, HASH_COLUMNS), ())
    return Arrival(
        seconds * timestamp_s if when == "timestamp" else seconds,
        _tokens(row, _name(row, PROMPT_COLUMNS), place),
        _tokens(row, _name(row, OUTPUT_COLUMNS), place),
        str(row.get(_name(row, CLASS_COLUMNS)) or ""),
        tuple(hashes) if isinstance(hashes, list) else (),
    )


def _seconds(row: _Row, name: str, place: str) -> float:
    text = str(row[name] if row[name] is not None else "")
    try:
        seconds = float(text)
    except ValueError:
        seconds = _date(text, name, place)
    if not 0.0 <= seconds < np.inf:
        raise FieldError(name, f"must be finite and not negative at {place}: {text!r}")
    return seconds


def _date(text: str, name: str, place: str) -> float:
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise FieldError(name, f"neither seconds nor a date at {place}: {text!r}") from None


def _tokens(row: _Row, name: str, place: str) -> int | None:
    if not name:
        return None
    text = str(row[name] if row[name] is not None else "")
    try:
        count = int(text)
    except ValueError:
        raise FieldError(name, f"not a whole number at {place}: {text!r}") from None
    if count < 0:
        raise FieldError(name, f"negative at {place}: {text!r}")
    return count


def mean_rate_per_s(arrivals: Sequence[Arrival]) -> float:
    """Arrivals a second between the first and the last; 0 when they span no time."""
    span_s = arrivals[-1].at_s - arrivals[0].at_s if arrivals else 0.0
    return (len(arrivals) - 1) / span_s if span_s > 0.0 else 0.0


def resample(
    arrivals: Sequence[Arrival], factor: float, rng: np.random.Generator
) -> tuple[Arrival, ...]:
    """Multiply the rate and leave the shape in time: thin below 1, replicate above.

    Each arrival is kept ``factor`` times on average. The copies of a replicated arrival come
    up to a second later, with lengths drawn from the same minute, so that length and time stay
    tied. Gaps between arrivals are not comparable with the original after replication.
    """
    if factor <= 0.0:
        raise FieldError("factor", "must be positive")
    copies = int(factor) + (rng.random(len(arrivals)) < factor % 1.0)
    if factor <= 1.0:
        return tuple(a for a, kept in zip(arrivals, copies, strict=True) if kept)
    minutes: dict[int, list[Arrival]] = {}
    for arrival in arrivals:
        minutes.setdefault(int(arrival.at_s // 60.0), []).append(arrival)
    drawn = list(_replicas(arrivals, copies, minutes, rng))
    return tuple(sorted(drawn, key=lambda a: a.at_s))


def _replicas(
    arrivals: Sequence[Arrival],
    copies: NDArray[np.int_],
    minutes: dict[int, list[Arrival]],
    rng: np.random.Generator,
) -> Iterator[Arrival]:
    for arrival, count in zip(arrivals, copies, strict=True):
        yield arrival
        minute = minutes[int(arrival.at_s // 60.0)]
        for delay_s in rng.random(count - 1):
            lengths = minute[int(rng.integers(len(minute)))]
            yield replace(lengths, at_s=arrival.at_s + float(delay_s))


def stretch(arrivals: Sequence[Arrival], factor: float) -> tuple[Arrival, ...]:
    """Multiply the rate by compressing time: gaps keep their shape, bursts become shorter."""
    if factor <= 0.0:
        raise FieldError("factor", "must be positive")
    return tuple(replace(a, at_s=a.at_s / factor) for a in arrivals)


def jitter(
    arrivals: Sequence[Arrival], width_s: float, rng: np.random.Generator
) -> tuple[Arrival, ...]:
    """Delay each arrival by up to ``width_s``: for traces whose times were quantised."""
    delays = rng.random(len(arrivals)) * width_s
    moved = (replace(a, at_s=a.at_s + float(d)) for a, d in zip(arrivals, delays, strict=True))
    return tuple(sorted(moved, key=lambda a: a.at_s))


def within(arrivals: Sequence[Arrival], max_total_tokens: int) -> tuple[Arrival, ...]:
    """Drop requests longer than a context limit; the others keep their times."""
    return tuple(
        a for a in arrivals if (a.prompt_tokens or 0) + (a.output_tokens or 0) <= max_total_tokens
    )

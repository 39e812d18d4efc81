"""The step log: one row per executed step, the training data of the remaining-step predictor.

Any run can write it, live, simulated or offline: ``StepLog.note`` takes what
``StepPredictor.learn`` takes. A row says how far the request was *before* the step and what
the step did. Source: DiLaServe B5 (step logs) and DiLaServe B4 (the confidence summary); prompt
tokens, forced tokens and the reason of the end are ours.

The file is gzipped CSV: a version line, a line of column names, then the rows in the order
they were noted. A log cut off by a killed process is readable up to its last whole row.
"""

import csv
import gzip
import io
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepserve.core.errors import FieldError
from stepserve.core.request import Confidence, FinishReason, Progress, Request
from stepserve.core.step import Step, StepOutcome

VERSION = "# stepserve step log 1"

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _share(text: str) -> float:
    """A number in [0, 1]; the confidences of a request's first step are empty, read as 0."""
    value = float(text or "0")
    if not 0.0 <= value <= 1.0:
        raise ValueError(text)
    return value


def _threshold(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value <= 0.0:
        raise ValueError(text)
    return value


COLUMNS: dict[str, Callable[[str], Any]] = {
    "request": str,
    "threshold": _threshold,
    "steps": _count,
    "unmasked": _count,
    "settled": _count,
    "forced": _count,
    "emitted": _count,
    "prompt_tokens": _count,
    "limit_tokens": _positive,
    "block_tokens": _positive,
    "minimum": _share,
    "p25": _share,
    "median": _share,
    "mean": _share,
    "p75": _share,
    "finished": lambda text: FinishReason(text).value if text else "",
}
"""Column -> how its text is read. ``steps``, ``unmasked`` and the five confidences are from
before the step; ``settled``, ``forced``, ``emitted`` (length of the contiguous settled output
prefix) and ``finished`` (empty: it goes on) are what the step did."""


class StepLog:
    """Writes a step log. Buffered; not thread-safe: a driver with threads brings its lock."""

    def __init__(self, path: Path) -> None:
        """Raises FieldError (``log``) if the file cannot be written."""
        try:
            self._file = io.TextIOWrapper(
                gzip.GzipFile(path, "wb", compresslevel=4), encoding="utf-8", newline=""
            )
        except OSError as error:
            raise FieldError("log", f"{path} cannot be written: {error}") from error
        self._file.write(f"{VERSION}\n{','.join(COLUMNS)}\n")
        self._write = csv.writer(self._file, lineterminator="\n").writerow

    def note(self, request: Request, progress: Progress, outcome: StepOutcome, step: Step) -> None:
        """Log one executed step; ``progress`` is from before it. Same as ``StepPredictor.learn``.

        Steps without a threshold (not denoising) are left out.
        """
        if step.threshold is None:
            return
        before = progress.confidence
        self._write(
            (
                request.id,
                step.threshold,
                progress.steps,
                progress.settled - request.prompt_tokens,
                outcome.settled,
                outcome.forced,
                outcome.emitted,
                request.prompt_tokens,
                request.max_output_tokens,
                request.diffusion.block_tokens,
                *(_NO_CONFIDENCE if before is None else _short(before)),
                "" if outcome.finished is None else outcome.finished.value,
            )
        )

    def close(self) -> None:
        """Write what is buffered and end the file."""
        self._file.close()


_NO_CONFIDENCE = ("",) * 5


def _short(c: Confidence) -> tuple[str, ...]:
    return tuple(f"{value:.5g}" for value in (c.minimum, c.p25, c.median, c.mean, c.p75))


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of step logs as columns, those of a request together and ordered by ``steps``.

    Every array has one entry per row; ``confidence`` is ``[rows, 5]``; ``request`` numbers
    the requests from 0. ``truncated`` counts logs that end within a row.
    """

    request: Ints
    threshold: Floats
    steps: Ints
    unmasked: Ints
    settled: Ints
    forced: Ints
    emitted: Ints
    prompt_tokens: Ints
    limit_tokens: Ints
    block_tokens: Ints
    confidence: Floats
    finished: NDArray[np.str_]
    truncated: int = 0


def read_step_logs(paths: Sequence[Path]) -> StepRows:
    """Read logs as one; a request id names another request in each file.

    Raises FieldError: field ``log`` for a file that is no step log, field ``log.<column>``
    with file and line for a value that cannot be.
    """
    columns: list[list[Any]] = [[] for _ in COLUMNS]
    numbers: dict[tuple[int, str], int] = {}
    truncated = 0
    for index, path in enumerate(paths):
        text, whole = _decompressed(path)
        truncated += not whole
        for row in _rows(path, text, whole):
            row[0] = numbers.setdefault((index, row[0]), len(numbers))
            for column, value in zip(columns, row, strict=True):
                column.append(value)
    data = dict(zip(COLUMNS, map(np.array, columns), strict=True))
    if not numbers:
        raise FieldError("log", "no steps in " + ", ".join(map(str, paths)))
    order = np.lexsort((data["steps"], data["request"]))
    sorted_ = {name: values[order] for name, values in data.items()}
    five = [sorted_.pop(name) for name in ("minimum", "p25", "median", "mean", "p75")]
    return StepRows(**sorted_, confidence=np.column_stack(five), truncated=truncated)


def _decompressed(path: Path) -> tuple[str, bool]:
    """The text of a log, and whether its end is there."""
    unzip = zlib.decompressobj(wbits=31)
    try:
        content = unzip.decompress(path.read_bytes())
    except (OSError, zlib.error) as error:
        raise FieldError("log", f"{path} cannot be read: {error}") from error
    return content.decode(errors="replace"), unzip.eof and content.endswith(b"\n")


def _rows(path: Path, text: str, whole: bool) -> Iterator[list[Any]]:
    """Rows with their values read; without the last one of a log that is not whole."""
    if not whole:
        text = text[: text.rfind("\n") + 1]
    lines = csv.reader(io.StringIO(text))
    head = (",".join(next(lines, ())), next(lines, []))
    if head != (VERSION, list(COLUMNS)):
        raise FieldError("log", f"{path} does not start as {VERSION[2:]!r} does")
    for row in lines:
        if len(row) != len(COLUMNS):
            what = f"{path}, line {lines.line_num}: {len(row)} values, not {len(COLUMNS)}"
            raise FieldError("log", what)
        values = []
        for (name, read), value in zip(COLUMNS.items(), row, strict=True):
            try:
                values.append(read(value))
            except ValueError:
                what = f"{path}, line {lines.line_num}: {value!r} is not possible"
                raise FieldError(f"log.{name}", what) from None
        yield values

"""The autoregressive model: the next token is a hash of all tokens so far."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from stepserve.core.errors import StepserveError
from stepserve.core.ids import RequestId
from stepserve.core.payload import KvChunk, Payload, SettledToken
from stepserve.core.request import Progress, Request
from stepserve.core.step import Step, StepKind, StepOutcome
from stepserve.engine.sequence import TokenSequence

from .hashes import END, KEY_BYTES, HashExecutor, follow, letter


@dataclass(slots=True)
class Row:
    """What is held of a request. ``keys``: of each position that was executed, or has landed.

    ``held``: positions without a gap. ``started``: whether a step was run here.
    """

    request: Request
    payload: Payload
    sequence: TokenSequence
    keys: dict[int, bytes] = field(default_factory=dict)
    held: int = 0
    started: bool = False


class HashAutoregressive(HashExecutor[Row]):
    """Implements ``Executor`` and ``KvPages``.

    The key of a position stands for its keys and values: the next one is made of it. An answer that
    goes on elsewhere stays the same only if the right keys came along.
    """

    def add(
        self, request: Request, payload: Payload, progress: Progress, settled: Mapping[int, int]
    ) -> None:
        """See ``Executor.add``. Added again before its first step, a request keeps what landed."""
        self.check(request, payload)
        row = self.rows.get(request.id)
        if row is not None and row.started:
            raise StepserveError(f"request {request.id} is already held")
        limit, ends = request.max_output_tokens, (END,)
        prompt, sampling = payload.prompt_ids, payload.sampling
        sequence = TokenSequence(prompt, sampling, limit=limit, eos_token_ids=ends, settled=settled)
        if row is None:
            self.rows[request.id] = Row(request, payload, sequence)
        else:
            row.sequence = sequence

    def step(self, row: Row, step: Step) -> tuple[StepOutcome, tuple[SettledToken, ...]]:
        """Execute the next inputs; one that executes the last known one emits a token."""
        sequence = row.sequence
        if sequence.finished is not None:
            return StepOutcome(step.request_id, 0, sequence.emitted, sequence.finished), ()
        span = range(step.context_tokens - step.query_tokens, step.context_tokens)
        if step.kind not in (StepKind.PREFILL, StepKind.DECODE):
            raise StepserveError(f"an autoregressive request has no {step.kind} steps")
        if not row.started:
            row.held = min(row.held, span.start)  # what the scheduler did not hear of landing
        if not span or span.start != row.held or span.stop > len(sequence):
            raise StepserveError(f"inputs {span.start} to {span.stop}, but {row.held} are here")
        for position in span:
            before = row.keys[position - 1] if position else b""
            row.keys[position] = follow(before, sequence.tokens[position])
        row.held, row.started = span.stop, True
        tokens: tuple[SettledToken, ...] = ()
        if span.stop == len(sequence):
            token = letter(row.keys[span.stop - 1], row.payload, sequence.forbidden())
            tokens = (SettledToken(sequence.emitted, token),)
            sequence.append(token)
        return StepOutcome(step.request_id, len(span), sequence.emitted, sequence.finished), tokens

    def export_kv(self, request_id: RequestId, epoch: int, start: int, stop: int) -> KvChunk:
        """See ``KvPages.export_kv``. Bytes go everywhere: to other threads, processes and nodes."""
        row = self.rows.get(request_id)
        if row is None or not 0 <= start < stop <= row.held:
            raise StepserveError(f"{request_id}: positions {start} to {stop} are not here")
        data = b"".join(row.keys[position] for position in range(start, stop))
        return KvChunk(request_id, epoch, start, stop, self._checksums(data, start), data)

    def import_kv(self, chunk: KvChunk) -> bool:
        """See ``KvPages.import_kv``. Chunks come in any order."""
        row, data, tokens = self.rows.get(chunk.request_id), chunk.data, chunk.stop - chunk.start
        if row is None or row.started or not isinstance(data, bytes):
            return False
        longest = row.request.prompt_tokens + row.request.max_output_tokens
        within = 0 <= chunk.start < chunk.stop <= longest
        if not within or len(data) != tokens * KEY_BYTES:
            return False
        if self._checksums(data, chunk.start) != chunk.checksums:
            return False
        for index in range(tokens):
            key = data[index * KEY_BYTES : (index + 1) * KEY_BYTES]
            row.keys[chunk.start + index] = key
        while row.held in row.keys:
            row.held += 1
        return True

    def _checksums(self, data: bytes, start: int) -> tuple[int, ...]:
        """CRC-32 of what each page has of the data; the position is the initial value."""
        stop, page = start + len(data) // KEY_BYTES, self._page_tokens
        edges = [start, *range((start // page + 1) * page, stop, page), stop]
        return tuple(
            zlib.crc32(data[(a - start) * KEY_BYTES : (b - start) * KEY_BYTES], a)
            for a, b in pairwise(edges)
        )

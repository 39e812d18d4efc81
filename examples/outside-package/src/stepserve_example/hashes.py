"""What stands in for a model: a hash of the tokens so far, and what both executors share."""

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from typing import Generic, TypeVar

from stepserve.core.errors import FieldError, StepserveError
from stepserve.core.ids import RequestId
from stepserve.core.payload import Payload, SettledToken
from stepserve.core.protocols import BatchResult
from stepserve.core.request import FinishReason, Request
from stepserve.core.step import Batch, Step, StepOutcome

END, MASK = 256, 257  # tokens below are bytes
LETTERS = b"etaoin shrdlu"
KEY_BYTES = 16

RowT = TypeVar("RowT")


def follow(before: bytes, number: int) -> bytes:
    """The key of a position: a hash of the key before it and of its token."""
    return hashlib.blake2b(before + number.to_bytes(8, "big"), digest_size=KEY_BYTES).digest()


def key_of(tokens: Iterable[int]) -> bytes:
    """That of the last of some tokens."""
    key = b""
    for token in tokens:
        key = follow(key, token)
    return key


def share(key: bytes) -> float:
    """A key as a number in [0, 1)."""
    return int.from_bytes(key[:6], "big") / (1 << 48)


def letter(key: bytes, payload: Payload, forbidden: Collection[int]) -> int:
    """The token that a key stands for: every 64th is the end, unless that is forbidden."""
    sampling = payload.sampling
    if sampling.temperature > 0.0:
        key = follow(key, sampling.seed & (1 << 64) - 1)
    if key[-1] % 64 == 0 and END not in forbidden:
        return END
    allowed = [token for token in LETTERS if token not in forbidden] or LETTERS
    return allowed[int(share(key) * len(allowed))]


class HashExecutor(ABC, Generic[RowT]):
    """An ``Executor`` but for ``add`` and the steps themselves."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self.rows: dict[RequestId, RowT] = {}

    def run(self, batch: Batch) -> BatchResult:
        """See ``Executor.run``: row by row; one that fails is dropped."""
        began_s = time.perf_counter()
        outcomes, settled = [], {}
        for step in batch.steps:
            try:
                if step.request_id not in self.rows:
                    raise StepserveError("request is not held on this instance")
                outcome, tokens = self.step(self.rows[step.request_id], step)
                settled[step.request_id] = tokens
            except StepserveError as error:
                self.remove(step.request_id)
                outcome = StepOutcome(step.request_id, 0, 0, FinishReason.ERROR, error=str(error))
            outcomes.append(outcome)
        return BatchResult(tuple(outcomes), settled, time.perf_counter() - began_s)

    @abstractmethod
    def step(self, row: RowT, step: Step) -> tuple[StepOutcome, tuple[SettledToken, ...]]:
        """Run one step of a request. Raises StepserveError if it cannot be run."""

    def check(self, request: Request, payload: Payload) -> None:
        """Raises FieldError for a request that cannot be held."""
        if payload.sampling.logprobs is not None:
            raise FieldError("logprobs", "this engine has none")
        if not 0 < len(payload.prompt_ids) == request.prompt_tokens:
            raise FieldError("prompt", f"{len(payload.prompt_ids)} tokens, not as announced")

    def remove(self, request_id: RequestId) -> None:
        """See ``Executor.remove``."""
        self.rows.pop(request_id, None)

    def close(self) -> None:
        """See ``Executor.close``."""

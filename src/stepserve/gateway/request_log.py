"""One line of the log for each HTTP request of generation that is over."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from stepserve.gateway import accounting
from stepserve.gateway.generation import Choice

_LOG = logging.getLogger("stepserve.requests")


class RequestLog:
    """Told of the end of each choice of a request; the last one makes the line."""

    def __init__(self, choices: int, now_s: Callable[[], float]) -> None:
        """``now_s``: the clock that requests arrive by."""
        self._count, self._now_s = choices, now_s
        self._ended: list[Choice] = []

    def ended(self, choice: Choice) -> None:
        """No update follows of this choice."""
        self._ended.append(choice)
        if len(self._ended) == self._count:
            note_end(self._ended, self._now_s() - choice.sample.request.arrival_s)


def note_end(choices: Sequence[Choice], e2e_s: float) -> None:
    """Log a request whose choices have all ended, ``e2e_s`` after it came.

    The values are also the record's ``fields``, for logs of JSON.
    """
    request = choices[0].sample.request
    failed = next((choice.failure for choice in choices if choice.failure is not None), None)
    finishes = sorted({c.text.finish.value for c in choices if c.text.finish is not None})
    tokens = accounting.usage(choices)
    fields: dict[str, Any] = {
        "id": request.id.rpartition("-")[0],
        "request_id": request.client_id,
        "model": request.model,
        "prompt_tokens": tokens["prompt_tokens"],
        "completion_tokens": tokens["completion_tokens"],
        "e2e_ms": round(1e3 * e2e_s, 1),
        "slo": accounting.slo_status(choices),
        "status": 200 if failed is None else failed.status,
        "end": "+".join(finishes) if failed is None else failed.message,
    }
    _LOG.info(
        "%(id)s (%(request_id)s) %(model)s: %(prompt_tokens)d + %(completion_tokens)d tokens, "
        "%(e2e_ms).1f ms, slo %(slo)s, %(status)d %(end)s",
        fields,
        extra={"fields": fields},
    )

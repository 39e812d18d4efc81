"""Runs the samples of one HTTP request and merges their updates into one ordered stream."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.types import Receive

from stepserve.core.frontend import (
    Frontend,
    RequestEnded,
    RequestRejected,
    RequestReport,
    TokensEmitted,
    Update,
)
from stepserve.core.request import FinishReason, Request
from stepserve.gateway.contract import Observer
from stepserve.gateway.errors import APIError, rejected
from stepserve.gateway.streaming import ChoiceText, Delta
from stepserve.gateway.tokenizer import TextTokenizer
from stepserve.gateway.translate import Sample

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TextEvent:
    """Tokens that became text at one moment of the frontend's clock."""

    at_s: float
    tokens: int


class Choice:
    """One sample on its way: its text, the moments its text came, and how it ended."""

    def __init__(self, sample: Sample, tokenizer: TextTokenizer) -> None:
        self.sample = sample
        self.text = ChoiceText(tokenizer.decoding(begins=not sample.echo), sample.rules)
        self.events: list[TextEvent] = []
        self.report: RequestReport | None = None
        self.failure: APIError | None = None
        self.cancelled: FinishReason | None = None

    @property
    def over(self) -> bool:
        """Whether no update follows."""
        return self.report is not None or self.failure is not None


@dataclass(frozen=True, slots=True)
class ChoiceUpdate:
    """New text of a choice, or its end. The last update of a choice has ``ended``."""

    choice: Choice
    delta: Delta
    ended: bool = False


class Generation:
    """All samples of one HTTP request.

    Each sample is read by a task of its own until the frontend says that it ended, also after
    the client has left: ``close`` only asks for an end. So the observer is told of the end of
    every sample that was started, once. The tasks are kept in ``readers`` while they run;
    ``ended`` is told of each, started or not.

    ``receive`` is the request's ASGI channel, with the body already read: all that can still
    come is the message that the client has left, streaming or not.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        frontend: Frontend,
        tokenizer: TextTokenizer,
        observer: Observer,
        receive: Receive,
        readers: set["asyncio.Task[None]"],
        ended: Callable[[Choice], None],
    ) -> None:
        self.choices = [Choice(sample, tokenizer) for sample in samples]
        self._frontend = frontend
        self._observer = observer
        self._updates: deque[ChoiceUpdate] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._waits_since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._running = len(self.choices)
        self._ended = ended
        self._watcher = asyncio.create_task(self._watch(receive))
        for choice in self.choices:
            reader = asyncio.create_task(self._read(choice))
            readers.add(reader)
            reader.add_done_callback(readers.discard)

    @property
    def over(self) -> bool:
        """Whether the last update has been taken."""
        return self._running == 0

    async def next(self, timeout_s: float | None = None) -> ChoiceUpdate | None:
        """The next update, or ``None`` after ``timeout_s`` without any.

        Raises APIError when a sample failed: the request as a whole has then failed.
        """
        if not self._updates:
            loop = asyncio.get_running_loop()
            self._waiter, self._waits_since_s = loop.create_future(), loop.time()
            if timeout_s is not None and self._timer is None:
                self._timer = loop.call_later(timeout_s, self._look, timeout_s)
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.next_now()

    def next_now(self) -> ChoiceUpdate | None:
        """The next update if it is there. Raises as ``next``."""
        if not self._updates:
            return None
        update = self._updates.popleft()
        self._running -= update.ended
        if update.choice.failure is not None:
            raise update.choice.failure
        return update

    def _look(self, timeout_s: float) -> None:
        """Wake who has waited for so long: one timer for all waits of a reply."""
        loop, left_s = asyncio.get_running_loop(), timeout_s
        if self._waiter is not None:
            left_s = self._waits_since_s + timeout_s - loop.time()
            if left_s <= 0.0:
                _wake(self._waiter)
                left_s = timeout_s
        self._timer = loop.call_later(left_s, self._look, timeout_s)

    def _put(self, update: ChoiceUpdate) -> None:
        self._updates.append(update)
        if update.ended:
            self._ended(update.choice)
        if self._waiter is not None:
            _wake(self._waiter)

    def close(self) -> None:
        """Stop what is still running. Call once the reply is over, for whatever reason."""
        self._watcher.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._cancel_all()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._cancel_all()

    def _cancel_all(self) -> None:
        for choice in self.choices:
            if not choice.over:
                self._cancel(choice, FinishReason.CANCELLED)

    def _cancel(self, choice: Choice, reason: FinishReason) -> None:
        if choice.cancelled is None:
            choice.cancelled = reason
            self._frontend.cancel(choice.sample.request.id, reason)

    async def _read(self, choice: Choice) -> None:
        if choice.cancelled is not None:  # the client left before this task first ran
            choice.failure = _client_left()
            self._put(ChoiceUpdate(choice, Delta(), ended=True))
            return
        request = choice.sample.request
        self._observer.started(request)
        if not request.max_output_tokens:  # nothing is to be generated
            e2e_s = self._frontend.now_s() - request.arrival_s
            self._take_end(choice, RequestEnded(FinishReason.LENGTH, _unserved(request, e2e_s)))
            return
        try:
            async for update in self._frontend.submit(request, choice.sample.payload):
                self._take(choice, update)
        except Exception:
            _LOG.exception("request %s (%s) failed", request.id, request.client_id)
            self._cancel(choice, FinishReason.ERROR)
        finally:
            if not choice.over:
                self._fail(choice, APIError(500, "the answer broke off"), FinishReason.ERROR)

    def _take(self, choice: Choice, update: Update) -> None:
        match update:
            case TokensEmitted():
                self._take_tokens(choice, update)
            case RequestEnded():
                self._take_end(choice, update)
            case RequestRejected():
                choice.failure = rejected(update)
                self._observer.rejected(choice.sample.request)
                self._put(ChoiceUpdate(choice, Delta(), ended=True))

    def _take_tokens(self, choice: Choice, update: TokensEmitted) -> None:
        delta = choice.text.feed(update.tokens)
        if not delta.tokens:
            return
        gap_s = update.at_s - choice.events[-1].at_s if choice.events else None
        choice.events.append(TextEvent(update.at_s, len(delta.tokens)))
        self._observer.emitted(choice.sample.request, len(delta.tokens), gap_s)
        if isinstance(choice.text.stop_reason, str):
            # Only the gateway knows stop strings; other ends the frontend finds by itself.
            self._cancel(choice, FinishReason.STOP)
        self._put(ChoiceUpdate(choice, delta))

    def _take_end(self, choice: Choice, end: RequestEnded) -> None:
        failed = end.reason in (FinishReason.ERROR, FinishReason.CANCELLED)
        if failed and choice.text.finish is None:
            if choice.cancelled is FinishReason.CANCELLED:
                error = _client_left()
            elif end.reason is FinishReason.CANCELLED:
                error = APIError(503, "the request was cancelled by the server")
            else:
                error = APIError(500, end.error or "internal error")
            self._fail(choice, error, end.reason, end.report)
            return
        delta = choice.text.end(end.reason)
        choice.report = end.report
        reason = choice.text.finish or end.reason
        self._observer.finished(choice.sample.request, reason, len(choice.text.tokens), end.report)
        self._put(ChoiceUpdate(choice, delta, ended=True))

    def _fail(
        self,
        choice: Choice,
        error: APIError,
        reason: FinishReason,
        report: RequestReport | None = None,
    ) -> None:
        choice.failure = error
        self._observer.finished(
            choice.sample.request, reason, len(choice.text.tokens), report or RequestReport()
        )
        self._put(ChoiceUpdate(choice, Delta(), ended=True))


def _unserved(request: Request, e2e_s: float) -> RequestReport:
    missed, deadline_s = request.slo.missed(e2e=e2e_s), request.slo.e2e_s
    return RequestReport(
        queue_s=e2e_s,
        e2e_s=e2e_s,
        slack_s=None if deadline_s is None else deadline_s - e2e_s,
        slo_met=not missed if request.slo.targets_s else None,
        missed=missed,
    )


def _client_left() -> APIError:
    return APIError(499, "the client closed the connection")


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)

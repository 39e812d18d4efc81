"""The two generation endpoints: translate, run, reply."""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from stepserve.core.config import ServeConfig
from stepserve.core.frontend import Frontend
from stepserve.core.request import SLO
from stepserve.gateway import accounting
from stepserve.gateway.authentication import tenant_of
from stepserve.gateway.contract import ModelCard, Observer
from stepserve.gateway.direct import EventStream
from stepserve.gateway.errors import REQUEST_ID_KEY, APIError, check_model, try_again
from stepserve.gateway.fields import check_extra_fields, ignored_fields_header
from stepserve.gateway.gate import Gate
from stepserve.gateway.generation import Choice, ChoiceUpdate, Generation
from stepserve.gateway.messages import chat_size
from stepserve.gateway.replies import ChatShape, CompletionShape, Json, Reply, Shape
from stepserve.gateway.request_log import RequestLog
from stepserve.gateway.schemas import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    StreamOptions,
)
from stepserve.gateway.slo import SLOReader
from stepserve.gateway.tokenizer import TextTokenizer
from stepserve.gateway.translate import Arrival, Sample, Translator
from stepserve.gateway.translation import TranslationThreads

_LOG = logging.getLogger(__name__)
# Proxies would otherwise collect a stream, or keep it.
_UNBUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class GenerationService:
    """Serves completions and chats. ``ping_s``: silence after which a stream says it lives."""

    def __init__(
        self,
        frontend: Frontend,
        tokenizer: TextTokenizer,
        model: ModelCard,
        config: ServeConfig,
        observer: Observer,
        threads: TranslationThreads,
        unix_time: Callable[[], float] = time.time,
        ping_s: float = 15.0,
    ) -> None:
        self._frontend = frontend
        self._tokenizer = tokenizer
        self._translator = Translator(model, tokenizer, config.strict_limits)
        self._gate = Gate(config, observer, frontend.now_s)
        self._threads = threads
        self._slo = SLOReader(config, model.weighs, observer.header_ignored)
        self._objects = accounting.objects(model.request_fields)
        self._config = config
        self._observer = observer
        self._unix_time = unix_time
        self._ping_s = ping_s
        self._readers: set[asyncio.Task[None]] = set()

    async def completions(self, http: Request, body: CompletionRequest) -> Response:
        """``POST /v1/completions``."""

        def translate(slo: SLO, arrival: Arrival) -> tuple[Sample, ...]:
            return self._translator.completion(body, slo, arrival)

        shape = CompletionShape(self._tokenizer)
        return await self._serve(http, body, "cmpl", shape, translate, sum(map(len, body.prompt)))

    async def chat(self, http: Request, body: ChatRequest) -> Response:
        """``POST /v1/chat/completions``."""

        def translate(slo: SLO, arrival: Arrival) -> tuple[Sample, ...]:
            return self._translator.chat(body, slo, arrival)

        shape = ChatShape(self._tokenizer)
        return await self._serve(http, body, "chatcmpl", shape, translate, chat_size(body.messages))

    async def _serve(
        self,
        http: Request,
        body: GenerationRequest,
        prefix: str,
        shape: Shape,
        translate: Callable[[SLO, Arrival], tuple[Sample, ...]],
        size: int,
    ) -> Response:
        arrival_s, unix_s = self._frontend.now_s(), self._unix_time()
        if not self._frontend.accepts():
            raise APIError(
                503,
                "no instance is ready, or the server is about to end",
                headers=try_again(1.0),
            )
        check_model(body.model, self._translator.card.id)
        ignored = check_extra_fields(body, self._config.strict_fields)
        tenant = tenant_of(http.scope)
        asked = self._gate.fields(tenant, body)
        slo = self._slo.read(asked, body.service_tier, http.headers, unix_s * 1e3)
        self._gate.check(tenant, body, slo)
        options = body.stream_options or StreamOptions()
        reply = Reply(
            id=f"{prefix}-{uuid.uuid4().hex}",
            created=int(unix_s),
            model=self._translator.card.id,
            shape=shape,
            objects=self._objects,
            service_tier=body.service_tier,
            usage_chunk=bool(options.include_usage),
            usage_in_chunks=bool(options.continuous_usage_stats),
        )
        arrival = Arrival(reply.id, arrival_s, http.scope.get(REQUEST_ID_KEY, ""))
        samples = self._gate.admit(tenant, await self._threads.run(size, translate, slo, arrival))
        log = RequestLog(len(samples), self._frontend.now_s)

        def ended(choice: Choice) -> None:
            self._gate.ended(choice)
            log.ended(choice)

        parts = self._frontend, self._tokenizer, self._observer
        generation = Generation(samples, *parts, http.receive, self._readers, ended)
        headers = {**ignored_fields_header(ignored), **_lowered_limit(body, samples)}
        if not body.stream:
            return await _whole(reply, generation, headers)
        try:
            # A refusal is the first update: it must be known before the status is sent.
            first = await generation.next(self._ping_s)
        except BaseException:
            generation.close()
            raise
        events = self._events(reply, generation, first)
        return EventStream(events, {**headers, **_UNBUFFERED})

    async def _events(
        self, reply: Reply, generation: Generation, first: ChoiceUpdate | None
    ) -> AsyncIterator[str]:
        """Server-sent events; a failure is one event with the error, and the end."""
        choices = generation.choices
        try:
            text = "".join(map(_event, reply.opening(choices)))
            update = first
            while True:
                if update is not None:
                    chunks = reply.chunks(update, choices, last=generation.over)
                    text += "".join(map(_event, chunks))
                if generation.over:
                    break
                update = generation.next_now()
                if update is None:  # all that was there goes out as one
                    if text:
                        yield text
                    update = await generation.next(self._ping_s)
                    text = ": ping\n\n" if update is None else ""
            yield text + "data: [DONE]\n\n"
        except APIError as error:
            yield _event(error.body())
        except Exception:
            _LOG.exception("stream %s failed", reply.id)
            yield _event(APIError(500, "internal error").body())
        finally:
            generation.close()


def _lowered_limit(body: GenerationRequest, samples: Sequence[Sample]) -> Mapping[str, str]:
    """Says that a limit was more than there is room for, and the least that held."""
    asked = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    held = min(sample.request.max_output_tokens for sample in samples)
    return {} if asked is None or held == asked else {"x-stepserve-max-tokens": str(held)}


async def _whole(reply: Reply, generation: Generation, headers: Mapping[str, str]) -> Response:
    try:
        while not generation.over:
            await generation.next()
    finally:
        generation.close()
    status = {"x-slo-status": accounting.slo_status(generation.choices)}
    return JSONResponse(reply.whole(generation.choices), headers={**headers, **status})


def _event(value: Json) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"

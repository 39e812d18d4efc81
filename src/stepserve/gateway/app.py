"""The HTTP application: routes, limits, and what is not generation."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import PlainTextResponse, Response
from starlette.routing import Route

from stepserve import __version__
from stepserve.core.config import ServeConfig
from stepserve.core.errors import FieldError
from stepserve.core.frontend import Frontend
from stepserve.gateway.authentication import Authentication
from stepserve.gateway.contract import ModelCard, Observer
from stepserve.gateway.direct import Direct
from stepserve.gateway.errors import APIError, check_model, install_error_handlers, try_again
from stepserve.gateway.messages import chat_size, chat_text
from stepserve.gateway.middleware import BodyLimit, HeadAsGet, Patience, RequestIds
from stepserve.gateway.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from stepserve.gateway.serving import GenerationService
from stepserve.gateway.tenants import Tenants
from stepserve.gateway.tokenizer import TextTokenizer
from stepserve.gateway.translation import TranslationThreads

MAX_BODY_BYTES = 4 * 2**20
EXPOSED_HEADERS = (
    "x-request-id",
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    "x-slo-status",
    "x-stepserve-ignored-fields",
    "x-stepserve-max-tokens",
    "x-llm-d-request-dropped-reason",
)
"""What scripts of other origins (``cors_origins``) may read."""


def create_app(
    frontend: Frontend,
    tokenizer: TextTokenizer,
    model: ModelCard,
    config: ServeConfig,
    observer: Observer,
    *,
    unix_time: Callable[[], float] = time.time,
    ping_s: float = 15.0,
) -> FastAPI:
    """Assemble the gateway in front of a cluster.

    ``unix_time`` (seconds) is read to stamp replies and to place absolute deadlines; latency
    is always measured on ``frontend.now_s``. ``ping_s``: silence after which a stream carries
    a keep-alive comment.
    """
    app = FastAPI(title="stepserve", version=__version__)
    install_error_handlers(app)
    app.add_middleware(BodyLimit, max_bytes=MAX_BODY_BYTES)
    if config.tenants:
        tenants = Tenants(Path(config.tenants), config.slo_classes)
        app.add_middleware(Authentication, tenants=tenants)
    app.add_middleware(Patience, body_s=config.body_s, stall_s=config.stall_s)
    app.add_middleware(HeadAsGet)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    app.add_middleware(RequestIds)

    threads = TranslationThreads()
    service = GenerationService(
        frontend, tokenizer, model, config, observer, threads, unix_time=unix_time, ping_s=ping_s
    )
    bodies: dict[str, Direct] = {
        "/v1/completions": Direct(CompletionRequest, service.completions),
        "/v1/chat/completions": Direct(ChatRequest, service.chat),
    }
    for path, endpoint in bodies.items():
        app.router.routes.append(Route(path, endpoint, methods=["POST"]))
        app.add_api_route(path, endpoint.call, methods=["POST"])  # for the API's page: not reached
    facts = _Facts(frontend, tokenizer, model, observer, threads, created=int(unix_time()))
    for path in ("/health", "/live", "/ping"):
        app.add_api_route(path, facts.health, methods=["GET"])
    app.add_api_route("/ready", facts.ready, methods=["GET"])
    app.add_api_route("/metrics", facts.metrics, methods=["GET"])
    app.add_api_route("/version", facts.version, methods=["GET"])
    app.add_api_route("/v1/models", facts.models, methods=["GET"])
    app.add_api_route("/v1/models/{model_id:path}", facts.model, methods=["GET"])
    app.add_api_route("/tokenize", facts.tokenize, methods=["POST"])
    app.add_api_route("/detokenize", facts.detokenize, methods=["POST"])
    return app


class _Facts:
    """The endpoints that answer at once."""

    def __init__(
        self,
        frontend: Frontend,
        tokenizer: TextTokenizer,
        card: ModelCard,
        observer: Observer,
        threads: TranslationThreads,
        created: int,
    ) -> None:
        self._frontend = frontend
        self._tokenizer = tokenizer
        self._card = card
        self._observer = observer
        self._threads = threads
        self._created = created

    async def health(self) -> Response:
        """Whether the process makes progress; says nothing about readiness."""
        return Response(status_code=200 if self._frontend.healthy() else 503)

    async def ready(self) -> Response:
        """Whether requests are being taken."""
        return Response(status_code=200 if self._frontend.ready() else 503)

    async def metrics(self) -> Response:
        """Prometheus' text format."""
        return PlainTextResponse(
            self._observer.render(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def version(self) -> dict[str, str]:
        """The version of stepserve."""
        return {"version": __version__}

    async def models(self) -> dict[str, Any]:
        """The served model; 503 until it can be used."""
        self._check_ready()
        return {"object": "list", "data": [self._model()]}

    async def model(self, model_id: str) -> dict[str, Any]:
        """One model by name."""
        self._check_ready()
        check_model(model_id, self._card.id)
        return self._model()

    async def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        """Token ids of a prompt or a chat as generation would see it."""
        check_model(body.model, self._card.id)
        if (body.prompt is None) == (body.messages is None):
            raise FieldError("prompt", "give either prompt or messages")
        size = len(body.prompt or "") + chat_size(body.messages or ())
        ids = await self._threads.run(size, self._ids, body)
        return {"count": len(ids), "max_model_len": self._card.context_tokens, "tokens": ids}

    async def detokenize(self, body: DetokenizeRequest) -> dict[str, Any]:
        """Text of token ids."""
        check_model(body.model, self._card.id)
        text = await self._threads.run(len(body.tokens), self._tokenizer.decode, body.tokens)
        return {"prompt": text}

    def _ids(self, body: TokenizeRequest) -> tuple[int, ...]:
        if body.messages is not None:
            return self._tokenizer.encode(chat_text(body.messages, self._tokenizer))
        if body.add_special_tokens:
            return self._tokenizer.completion_ids(body.prompt or "")
        return self._tokenizer.encode(body.prompt or "")

    def _check_ready(self) -> None:
        if not self._frontend.ready():
            raise APIError(503, "the model is not ready", headers=try_again(1.0))

    def _model(self) -> dict[str, Any]:
        card = self._card
        facts: dict[str, Any] = {
            "id": card.id,
            "object": "model",
            "created": self._created,
            "owned_by": "stepserve",
            "max_model_len": card.context_tokens,
            "default_max_tokens": card.default_max_tokens,
            "default_temperature": card.default_temperature,
            "family": card.family.value,
        }
        if card.denoises:
            facts["block_lengths"] = card.block_lengths
        return facts

"""The operator's API on a port of its own, and how uvicorn serves any."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from fastapi import FastAPI

from stepserve.core.config import ServeConfig
from stepserve.gateway.operator import Operator, operator_app

from .listening import scheme

logger = logging.getLogger(__name__)


def uvicorn_config(app: FastAPI, config: ServeConfig) -> uvicorn.Config:
    """How an application is served, over TLS if there is a certificate."""
    certificate, key = config.ssl_certfile or None, config.ssl_keyfile or None
    return uvicorn.Config(
        app,
        log_level="warning",
        log_config=None,  # without a configuration of its own, it logs as we do
        ssl_certfile=certificate,
        ssl_keyfile=key,
        timeout_graceful_shutdown=1,  # whoever is left then was waited for
        ws="none",
    )


class _Server(uvicorn.Server):
    """Ends when it is told to, and leaves signals to the others."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None."""
        yield


@contextlib.asynccontextmanager
async def operator_api(
    config: ServeConfig, operator: Operator, listener: socket.socket | None
) -> AsyncIterator[None]:
    """Serve the operator's API while the block runs; nothing without a ``listener``."""
    if listener is None:
        yield
        return
    server = _Server(uvicorn_config(operator_app(operator, config), config))
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    where = f"{scheme(config)}://{config.operator_host}:{listener.getsockname()[1]}"
    logger.info("the operator's API is at %s", where)
    try:
        yield
    finally:
        server.should_exit = True
        await serving

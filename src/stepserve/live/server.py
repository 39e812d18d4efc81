"""An HTTP server that ends well: uvicorn with a drain."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

logger = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """On SIGTERM or SIGINT: take nothing new, finish what was accepted, then leave with 0."""

    def __init__(self, config: uvicorn.Config, drain: Callable[[], None]) -> None:
        super().__init__(config)
        self._drain = drain

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but the signal is not raised again afterwards: the cluster stops first."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: drain. A second SIGINT ends at once."""
        logger.info("draining: accepted requests are finished, nothing new is taken")
        self._drain()
        super().handle_exit(sig, frame)

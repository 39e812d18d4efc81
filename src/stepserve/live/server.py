"""An HTTP server that ends well: uvicorn with a drain."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Iterator, Mapping
from typing import Protocol

import uvicorn

from stepserve.core.config import ServeConfig

logger = logging.getLogger(__name__)

LOOK_S = 0.02
"""How often a drain looks whether anything is still under way."""


class Drains(Protocol):
    """What a server tells of its drain."""

    def leave(self) -> None:
        """Be not ready, so that balancers send nothing; what they still send is taken."""
        ...

    def drain(self) -> None:
        """Take no new requests; what was accepted is finished."""
        ...


class Server(uvicorn.Server):
    """Ends by a signal: leave, then drain, then stop (see ``ServeConfig.drain_s``)."""

    def __init__(
        self,
        config: uvicorn.Config,
        drains: Drains,
        signals: Mapping[int, float],
        drain_s: float,
    ) -> None:
        """``signals``: how long requests are still taken after each. A second one ends at once."""
        super().__init__(config)
        self._drains, self._drain_s = drains, drain_s
        self._signals = signals
        self._ending: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """In place of uvicorn's, which would take no connection from the signal on."""
        loop = asyncio.get_running_loop()
        for number in self._signals:
            loop.add_signal_handler(number, self._signalled, number)
        yield

    def _signalled(self, number: int) -> None:
        if self._ending is not None:
            self.should_exit = self.force_exit = True
            return
        delay_s = self._signals[number]
        self._ending = asyncio.get_running_loop().create_task(self._end(delay_s))

    async def _end(self, delay_s: float) -> None:
        """Nothing that was accepted is broken off before the time is over."""
        self._drains.leave()
        if delay_s:
            logger.info("not ready any more; requests are still taken for %g s", delay_s)
            await asyncio.sleep(delay_s)
        logger.info("draining: accepted requests are finished, nothing new is taken")
        self._drains.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                while self.server_state.tasks:
                    await asyncio.sleep(LOOK_S)
        if self.server_state.tasks:
            logger.error("%d requests are broken off", len(self.server_state.tasks))
        self.should_exit = True


def both_signals(config: ServeConfig) -> dict[int, float]:
    """What ends a server of one process: only SIGTERM, which is not typed, may wait."""
    return {signal.SIGTERM: config.drain_delay_s, signal.SIGINT: 0.0}

"""What the server's own metrics say of a run: read before, during and after it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from statistics import fmean

Values = Mapping[str, float]
"""Samples of a scrape by name, those with the same name added up."""

EVERY_S = 1.0
"""Between scrapes: caps change about once a second."""


@dataclass(frozen=True, slots=True)
class ServerSide:
    """What the control plane did meanwhile; caps as seen once a second, under load only.

    ``scheduler_us``: mean time of one event in a scheduler.
    """

    migrations: float
    forecast_refreshes: float
    caps_updates: float
    cap_lowest: float
    cap_mean: float
    plans: float
    layout_changes: float
    scheduler_us: float | None


def parse(text: str) -> dict[str, float]:
    """Prometheus' text format, without labels. Raises ValueError for what is none."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            series, value = line.rsplit(" ", 1)
            name = series.partition("{")[0]
            values[name] = values.get(name, 0.0) + float(value)
    return values


class Watch:
    """Scrapes a server while a run goes on. A server without such metrics is asked once."""

    def __init__(self, scrape: Callable[[], Awaitable[Values | None]]) -> None:
        self._scrape = scrape
        self._scrapes: list[Values] = []

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch for as long as the body runs."""
        if not await self._look():
            yield
            return
        task = asyncio.ensure_future(self._keep_looking())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._look()

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            await self._look()

    async def _look(self) -> bool:
        values = await self._scrape()
        found = values is not None and "stepserve:cap_lowest" in values
        if values is not None and found:
            self._scrapes.append(values)
        return found

    def found(self) -> ServerSide | None:
        """What was seen; ``None`` if the server does not say."""
        if len(self._scrapes) < 2:
            return None
        first, last = self._scrapes[0], self._scrapes[-1]

        def grown(name: str) -> float:
            name = f"stepserve:{name}_total"
            return last.get(name, 0.0) - first.get(name, 0.0)

        busy = [s for s in self._scrapes if s.get("vllm:num_requests_running")] or [last]
        events = grown("scheduler_events")
        return ServerSide(
            migrations=grown("migrations_done"),
            forecast_refreshes=grown("forecasts_refreshed"),
            caps_updates=grown("caps_updates"),
            cap_lowest=min(s["stepserve:cap_lowest"] for s in busy),
            cap_mean=fmean(s["stepserve:cap_mean"] for s in busy),
            plans=grown("plans_solved"),
            layout_changes=grown("layout_changes"),
            scheduler_us=1e6 * grown("scheduler_seconds") / events if events else None,
        )

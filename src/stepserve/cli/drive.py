"""The open-loop driver: requests leave when they are due, whatever became of earlier ones.

Time is the event loop's, so a loop with virtual time runs an hour of arrivals at once.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from stepserve.cli.client import Reply


@dataclass(frozen=True, slots=True)
class Record:
    """What became of one arrival. ``due_s`` is on the clock of the reply's times.

    Latencies count from ``due_s``, not from when the request left: a slow client must not
    make a server look fast. The difference is published as the client's lag.
    """

    due_s: float
    reply: Reply

    @property
    def lag_s(self) -> float:
        """How late the client itself was in sending."""
        return self.reply.sent_s - self.due_s


async def open_loop(
    due_s: Sequence[float],
    send: Callable[[int], Awaitable[Reply]],
    on_done: Callable[[Reply], None] = lambda reply: None,
) -> list[Record]:
    """Send request ``i`` at ``due_s[i]`` seconds from now, and wait for all answers."""
    loop = asyncio.get_running_loop()
    start_s = loop.time()

    async def one(index: int) -> Record:
        reply = await send(index)
        on_done(reply)
        return Record(start_s + due_s[index], reply)

    tasks = []
    async with asyncio.TaskGroup() as group:
        for index, due in enumerate(due_s):
            await asyncio.sleep(start_s + due - loop.time())
            tasks.append(group.create_task(one(index)))
    return [task.result() for task in tasks]


async def one_by_one(
    count: int,
    send: Callable[[int], Awaitable[Reply]],
    on_done: Callable[[Reply], None] = lambda reply: None,
) -> list[Record]:
    """Send each request when the one before it has been answered: latency without load."""
    records = []
    for index in range(count):
        reply = await send(index)
        on_done(reply)
        records.append(Record(reply.sent_s, reply))
    return records

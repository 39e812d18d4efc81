"""A small event simulation of the published baseline, independent of the control plane.

INFaaS as adapted by the DiLaServe authors (DiLaServe B7, DiLaServe B9): 16 instances at TP1, fixed
threshold, all running requests of an instance in every step, admitted up to a sum of full
lengths, at most 100 admitted unfinished requests, the rest waiting first come first served, no
migration. It exists to fit constants and to cross-check the simulator; it shares only the step
table with it.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

INSTANCES = 16
ADMITTED = 100
RESIDENT_TOKENS = 8192
BLOCK = 32


@dataclass(slots=True)
class Job:
    """One request: full length in tokens, and its steps in each block."""

    arrival_s: float
    tokens: int
    blocks: list[int]
    done: int = 0  # steps run in the present block


def even_blocks(steps: int, blocks: int) -> list[int]:
    """``steps`` spread evenly over the blocks, 1 to 32 each."""
    steps = min(max(steps, blocks), blocks * BLOCK)
    return [(steps * (i + 1)) // blocks - (steps * i) // blocks for i in range(blocks)]


def latencies(
    jobs: list[Job],
    seconds: Callable[[int, int], float],
    instances: int = INSTANCES,
    admitted_limit: int = ADMITTED,
    stall_s: float = 0.0,
    patience_s: float = float("inf"),
) -> list[float]:
    """Seconds from arrival to completion, infinite where dropped, in order of arrival.

    ``seconds(tokens, rows)`` is the time of a step; none begins before ``stall_s``. Who has
    waited for longer than ``patience_s`` is dropped.
    """
    result = [float("inf")] * len(jobs)
    running_requests: list[list[int]] = [[] for _ in range(instances)]
    load, busy = [0] * instances, [stall_s > 0.0] * instances
    waiting: deque[int] = deque()
    admitted = 0
    heap: list[tuple[float, int, tuple[int, ...]]] = [
        (job.arrival_s, 0, (index,)) for index, job in enumerate(jobs)
    ]
    heap += [(stall_s, 1 + e, ()) for e in range(instances) if busy[e]]
    heapq.heapify(heap)

    def place(now_s: float) -> None:
        nonlocal admitted
        while waiting and admitted < admitted_limit:
            job = jobs[waiting[0]]
            if now_s - job.arrival_s > patience_s:
                waiting.popleft()
                continue
            room = [e for e in range(instances) if load[e] + job.tokens <= RESIDENT_TOKENS]
            if not room:
                return
            best = min(room, key=lambda e: (seconds(load[e] + job.tokens, 1), load[e], e))
            running_requests[best].append(waiting.popleft())
            load[best] += job.tokens
            admitted += 1

    def begin(e: int, now_s: float) -> None:
        busy[e] = bool(running_requests[e])
        if not busy[e]:
            return
        rows = [jobs[i] for i in running_requests[e]]
        tokens = sum(job.tokens if job.done == 0 else BLOCK for job in rows)
        for job in rows:
            job.done += 1
        running = tuple(running_requests[e])
        heapq.heappush(heap, (now_s + seconds(tokens, len(rows)), 1 + e, running))

    def end(e: int, running: tuple[int, ...], now_s: float) -> None:
        nonlocal admitted
        for index in running:
            job = jobs[index]
            if job.done == job.blocks[0]:
                job.blocks.pop(0)
                job.done = 0
            if not job.blocks:
                running_requests[e].remove(index)
                load[e] -= job.tokens
                admitted -= 1
                result[index] = now_s - job.arrival_s

    while heap:
        now_s, kind, what = heapq.heappop(heap)
        if kind == 0:
            waiting.extend(what)
        else:
            end(kind - 1, what, now_s)
            busy[kind - 1] = False
        place(now_s)
        for e in range(instances):
            if not busy[e]:
                begin(e, now_s)
    return result

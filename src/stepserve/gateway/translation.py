"""Threads for what takes long in proportion to its input: text to tokens and back."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

SMALL = 2_048
"""Characters or token ids below which an input is small: it takes less time than another thread
would to take it up."""

LARGE = 16_384
"""Characters or token ids from which on an input is large: about 10 ms of work."""


class TranslationThreads:
    """Keeps the event loop free, and small inputs from waiting for large ones.

    Small inputs are done at once, medium ones on a thread in the order in which they came, and
    large ones on another.
    """

    def __init__(self) -> None:
        self._medium = ThreadPoolExecutor(1, thread_name_prefix="translate")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="translate-large")

    async def run(self, size: int, call: Callable[..., T], *args: Any) -> T:
        """The answer of ``call(*args)`` on an input of so many characters or token ids."""
        if size < SMALL:
            return call(*args)
        threads = self._large if size >= LARGE else self._medium
        return await asyncio.get_running_loop().run_in_executor(threads, call, *args)
